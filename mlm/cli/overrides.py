"""Overrides before Hydra sees them: all faults of spelling at once, and text taken literally."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    QuotedString,
    RangeSweep,
)
from hydra.errors import HydraException
from omegaconf import OmegaConf

from mlm.cli.commands import Command
from mlm.config.build import concerns, describe_type, nearest_key, show, unknown_key
from mlm.config.neighbours import FLAGS, KEYS
from mlm.config.paths import CONFIG_DIR, groups
from mlm.config.suggest import nearest, nearest_choice
from mlm.config.tree import MISSING_VALUE, leaves, sections
from mlm.train.config import PretrainConfig

MOST_LISTED = 16  # choices that one line names
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
OF_OWN_CODE = ("model.options=", "model.options.")
"""Settings whose names only the user's own code knows: Hydra needs ++ to add them."""
GROUP_SETS = {
    "parallel": {"tp", "pp", "vp", "dp", "recompute", "train"},
    "cluster": {"dist"},
    "task": {"name", "out", "task", "optimizer", "train", "schedule"},
    "experiment": {"name", "out", *sections(PretrainConfig), "tp", "pp", "vp", "dp", "recompute"},
}
"""What the groups set that are not named as the section they fill."""


@dataclass
class Prepared:
    """Overrides that Hydra can compose, and the faults of the others."""

    overrides: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    """Keys and sections that the faulty overrides were meant for: what the rest of the config says about
    them is not what the user asked for, so further faults about them are no news."""

    def swept(self, overrides: Iterable[str]) -> str:
        """Those of a job's overrides that the sweep varies: what its folder is named by."""
        parser = OverridesParser.create()
        keys = {o.key_or_group for o in parser.parse_overrides(self.overrides) if o.is_sweep_override()}
        job = parser.parse_overrides(list(overrides))
        kept = sorted(o.input_line or "" for o in job if o.key_or_group in keys and o.key_or_group != "out")
        return ",".join(kept)

    def all_faults(self, further: Iterable[str]) -> list[str]:
        """The faults of spelling, and those of `further` that do not follow from them."""
        return [*self.faults, *(fault for fault in further if not concerns(fault, self.doubtful))]


def command_groups(command: Command, config_dir: str | None = None) -> dict[str, list[str]]:
    """The config groups of a command and their options, shipped and the user's own."""
    primary = OmegaConf.load(CONFIG_DIR / f"{command.config}.yaml")
    assert OmegaConf.is_dict(primary)
    chosen = {str(name) for entry in primary.defaults if OmegaConf.is_dict(entry) for name in entry}
    user = groups(Path(config_dir)) if config_dir else {}
    shipped = groups(CONFIG_DIR)
    return {
        name: sorted({*shipped.get(name, []), *user.get(name, [])}) for name in sorted(chosen | user.keys())
    }


def prepare(
    command: Command, typed: Sequence[str], *, config_dir: str | None, multirun: bool, own_path: bool = False
) -> Prepared:
    """Sort overrides into composable ones and faults.

    `own_path` says that the user replaced the config search path: choices are then left to Hydra.
    """
    prepared = Prepared(_own_choices(command, typed))
    typed = [f"++{text}" if text.startswith(OF_OWN_CODE) else text for text in typed]
    multirun = multirun or any(text.startswith("hydra.mode=") for text in typed)
    own_path = own_path or any("hydra.searchpath=" in text for text in typed)
    options = command_groups(command, config_dir)
    parser = OverridesParser.create()
    for text in typed:
        fault = _spelling(command, text, options)
        if fault is None:
            text = literal(command, text, multirun=multirun)
            fault = _grammar(command, parser, text, multirun=multirun)
        if fault is None and not own_path:
            override = parser.parse_override(text)
            fault = _choice(command, override, options, config_dir) or _keys_below(command, override)
        if fault is None:
            prepared.overrides.append(text)
        else:
            prepared.faults.append(fault)
            prepared.doubtful |= _meant(command, text, options)
    return prepared


def _own_choices(command: Command, typed: Sequence[str]) -> list[str]:
    """What the command chooses where an experiment would choose for it, unless it is typed."""
    keys = {text.partition("=")[0].lstrip("+~") for text in typed}
    choices = command.own_choices if "experiment" in keys else ()
    return [choice for choice in choices if choice.partition("=")[0] not in keys]


def literal(command: Command, text: str, *, multirun: bool) -> str:
    """Quote the value of a text key, so that prompt=To be, or needs no second pair of quotes.

    Hydra's own syntax stays: quoted text, null, interpolations, and sweeps under --multirun.
    """
    key, equals, value = text.partition("=")
    leaf = leaves(command.spec).get(key)
    if not equals or leaf is None or leaf.type not in (str, str | None):
        return text
    null = value == "null" and leaf.type is not str
    if QUOTED.fullmatch(value) or null or "${" in value or (multirun and _parses(text)):
        return text
    return f"{key}={quote(value)}"


def quote(value: str) -> str:
    """A text as a quoted value of Hydra's grammar.

    A backslash counts only before a quote: those, and the ones at the end, are doubled.
    """
    escaped, backslashes = "", 0
    for char in value:
        if char == "'":
            escaped += "\\" * backslashes + "\\"
        escaped += char
        backslashes = backslashes + 1 if char == "\\" else 0
    return "'" + escaped + "\\" * backslashes + "'"


def _spelling(command: Command, text: str, options: dict[str, list[str]]) -> str | None:
    key, equals, _ = text.partition("=")
    name = key.lstrip("+~")
    known = [*leaves(command.spec), *options]
    if key.startswith("+++"):
        return f"cannot read '{text}': + adds a key, ++ adds or replaces one; use ++{name}=…"
    if not equals and not text.startswith("~"):
        near = nearest(text, known)
        return f"cannot read '{text}': expected key=value" + (f"; did you mean {near}=…?" if near else "")
    left_to_hydra = key[:1] in ("+", "~") or "@" in key or name.split(".")[0].split("/")[0] == "hydra"
    if left_to_hydra or name in leaves(command.spec) or name in options or name in sections(command.spec):
        return None
    if FLAGS.get(name) or set(KEYS.get(name, ())) & set(known):
        return unknown_key(command.spec, name)
    if "." not in name and (group := nearest(name, options)) and nearest(name, known) == group:
        return f"unknown key '{name}'; did you mean '{group}'?"
    return unknown_key(command.spec, name)


def _meant(command: Command, text: str, options: dict[str, list[str]]) -> set[str]:
    """Keys and sections that a faulty override was meant to set."""
    name = text.partition("=")[0].lstrip("+~")
    if name not in options and name not in leaves(command.spec):
        group = nearest(name, options) if "." not in name else None
        name = group or nearest_key(command.spec, name) or name
    return GROUP_SETS.get(name) or {name}


def _grammar(command: Command, parser: OverridesParser, text: str, *, multirun: bool) -> str | None:
    try:
        override = parser.parse_override(text)
    except HydraException:
        key = text.partition("=")[0]
        leaf = leaves(command.spec).get(key)
        if leaf is None or leaf.type in (str, str | None):
            return f"cannot read '{text}'; quote the value: \"{key}='…'\""
        example = "" if leaf.default in (None, MISSING_VALUE) else f", such as '{key}={show(leaf.default)}'"
        return f"cannot read '{text}': {key} must be {describe_type(leaf.type)}{example}"
    if override.is_sweep_override() and not multirun:
        return f"{text} is a sweep: add --multirun, or quote the value"
    return None


def _choice(
    command: Command, override: Override, options: dict[str, list[str]], config_dir: str | None
) -> str | None:
    group = override.key_or_group
    if group not in options:
        return None
    for choice in _chosen(override, is_section=group in sections(command.spec)):
        roots = [CONFIG_DIR, *([Path(config_dir)] if config_dir else [])]
        name = choice.removesuffix(".yaml") if isinstance(choice, str) else None
        if name is None or not any(os.path.isfile(root / group / f"{name}.yaml") for root in roots):
            typed = choice if isinstance(choice, str) else show(choice)
            near = nearest_choice(typed, options[group])
            hint = f"did you mean {near}? (list: mlm {command.name} --help)"
            if near is None:
                hint = _listed(command, options[group])
            group = f"~{group}" if override.is_delete() else group
            return f"{group}={typed}: no such choice; {hint}"
    return None


def _listed(command: Command, choices: list[str]) -> str:
    """All choices where a line holds them, or where they stand."""
    if len(choices) > MOST_LISTED:
        return f"list: mlm {command.name} --help"
    return f"choose {', '.join(choices[:-1])} or {choices[-1]}" if choices[1:] else f"choose {choices[0]}"


def _chosen(override: Override, *, is_section: bool) -> list[Any]:
    """The choices that an override of a group makes. Values of the section that it fills are none."""
    value = override.value()
    if isinstance(value, Glob) or (is_section and isinstance(value, dict)):
        return []
    if override.is_delete() and value in (None, ""):
        return []
    if isinstance(value, RangeSweep | IntervalSweep):
        return [(override.input_line or "").partition("=")[2]]
    each = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
    return [_unquoted(choice) for choice in each]


def _unquoted(choice: Any) -> Any:
    return choice.text if isinstance(choice, QuotedString) else choice


def _keys_below(command: Command, override: Override) -> str | None:
    """The first key that a section does not have, of a value that sets several: `optimizer={lr: 0.1}`."""
    name, value = override.key_or_group, override.value()
    if name not in sections(command.spec) or not isinstance(value, dict):
        return None
    keys = [f"{name}.{_unquoted(key)}" for key in value]
    return next((unknown_key(command.spec, key) for key in keys if key not in leaves(command.spec)), None)


def _parses(text: str) -> bool:
    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        return False
    return True
