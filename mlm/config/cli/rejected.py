"""The override that Hydra could not compose, in our words and with a fix."""

import re
from collections.abc import Collection, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from mlm.config.cli.commands import Command
from mlm.config.cli.overrides import command_groups
from mlm.config.suggest import nearest, unknown_key
from mlm.config.tree import leaves, sections
from mlm.util.errors import Problem


def rejected_override(
    command: Command, overrides: Sequence[str], groups: Collection[str], complaint: str
) -> Problem | None:
    """The error of the first override that Hydra's complaint names and that it may reject, None if none is.

    The complaint's first line is searched for the override's own key only: no sentence of Hydra's is read.
    """
    line = complaint.partition("\n")[0]
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        name = override.key_or_group + ("" if override.package is None else f"@{override.package}")
        if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.@])", line) and (
            error := _error(command, override, groups)
        ):
            return error
    return None


def _error(command: Command, override: Override, groups: Collection[str]) -> Problem | None:
    text, name = override.input_line or "", override.key_or_group
    chosen = f"{name}={text.partition('=')[2] or '…'}"
    if override.package is not None and name not in groups:
        near = nearest(name, groups)
        others = f"use {_listed(groups)}" if groups else "leave it out"
        hint = f"did you mean '{near}'?" if near else others
        return Problem((name,), f"{text}: no config group '{name}'", hint)
    if override.package is not None:
        one = f"{text}: a config group has one place, and @ names another"
        return Problem((name,), one, f"use {chosen}")
    if override.is_delete():
        return _deletion(command, override, groups)
    if override.is_add() or override.is_force_add():
        return Problem((name,), f"{text}: {name} has a value, and + adds what has none", f"use {chosen}")
    if name == "experiment" and name in command_groups(command):  # its file is there: `prepare` looked
        problem = (
            f"{text}: {name}/{text.partition('=')[2]}.yaml overrides a choice that its package does not have"
        )
        return Problem((name,), problem, "let its first line be `# @package _global_`")
    if name in groups:
        none = f"{text}: `mlm {command.name}` has no choice of {name} to replace"
        return Problem((name,), none, f"use +{chosen}")
    return None


def _deletion(command: Command, override: Override, groups: Collection[str]) -> Problem:
    text, name = override.input_line or "", override.key_or_group
    _, valued, value = text.partition("=")
    if name not in {*leaves(command.spec), *sections(command.spec), *groups}:
        return unknown_key(command.spec, name)
    if not valued:
        return Problem((name,), f"{text}: {name} has no value to delete", "leave it out")
    fix = f"use {name}={value} to set it, or leave {text} out"
    return Problem((name,), f"{text}: {name} has another value", fix)


def _listed(groups: Collection[str]) -> str:
    *most, last = sorted(groups)
    return f"{', '.join(most)} or {last}" if most else last
