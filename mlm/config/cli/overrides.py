"""Overrides before Hydra sees them: all problems of spelling at once, and text taken literally."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
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

from mlm.config.cli.arguments import quote
from mlm.config.cli.choices import other_names as other_choices
from mlm.config.cli.commands import Command
from mlm.config.cli.tasks import GROUP as TASKS
from mlm.config.cli.tasks import OWN
from mlm.config.elsewhere import OWN_CONFIG, Typed, elsewhere, plain
from mlm.config.fields import expand_home, length_problem
from mlm.config.imports import is_path
from mlm.config.paths import CONFIG_DIR, groups
from mlm.config.plain_yaml import problem_of
from mlm.config.suggest import nearest, nearest_key, unknown_key
from mlm.config.tree import MISSING_VALUE, describe_values, flatten, leaves, other_names, sections
from mlm.training.config import PretrainConfig
from mlm.util.errors import Problem, show, visible

MOST_LISTED = 16  # choices that one line names
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
OF_OWN_CODE = tuple(
    f"{section}.options{end}" for section in ("model", "optimizer", "schedule") for end in "=."
)
"""Settings whose names only the user's own code knows: Hydra needs ++ to add them."""
PATHS_OF_RUN = tuple(key for key, leaf in leaves(PretrainConfig).items() if leaf.shipped)
"""Keys of a run that take import paths."""
RUNS = ("ckpt", "incident")
"""Keys that name something of a run."""
GROUP_SETS = {
    "parallel": {"tp", "cp", "pp", "vp", "dp", "sequence_parallel", "zero", "recompute", "train"},
    "cluster": {"dist"},
    "task": {"name", "out", "task", "optimizer", "train", "schedule"},
    "experiment": {"name", "out", *sections(PretrainConfig), "tp", "cp", "pp", "vp", "dp", "recompute"},
}
"""Sections and keys that the groups set which are not named as the section they fill."""


@dataclass
class Prepared:
    """Overrides that Hydra can compose, and the problems of the others."""

    overrides: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    """Keys and sections that the rejected overrides were meant for: the rest of the config does not have the
    values that the user asked for, so further problems of these keys are no news."""
    paths_of_run: list[str] = field(default_factory=list)
    """Import paths of the run that the command reads: saved ones are followed only if typed."""

    def swept(self, overrides: Iterable[str]) -> list[str]:
        """Those of a job's overrides that the sweep varies, sorted: what its folder is named by."""
        parser = OverridesParser.create()
        keys = {o.key_or_group for o in parser.parse_overrides(self.overrides) if o.is_sweep_override()}
        job = parser.parse_overrides(list(overrides))
        return sorted(o.input_line or "" for o in job if o.key_or_group in keys and o.key_or_group != "out")

    def all_problems(self, further: Iterable[Problem]) -> list[Problem]:
        """The problems of spelling, and those of `further` that do not follow from them."""
        return [*self.problems, *(each for each in further if not each.concerns(self.doubtful))]


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
    """Sort overrides into composable ones and problems.

    `own_path` says that the user replaced the config search path: choices are then left to Hydra.
    """
    prepared = Prepared(_own_choices(command, typed))
    typed, file_problems = with_files(command, typed)
    prepared.problems += file_problems
    prepared.doubtful |= {key for each in file_problems for key in each.keys}
    typed = [f"++{text}" if text.startswith(OF_OWN_CODE) else text for text in typed]
    multirun = multirun or any(text.startswith("hydra.mode=") for text in typed)
    own_path = own_path or any("hydra.searchpath=" in text for text in typed)
    options = command_groups(command, config_dir)
    parser = OverridesParser.create()
    values = {plain(key): value for key, _, value in (text.partition("=") for text in typed)}
    for text in typed:
        if path := _path_of_run(command, text):
            prepared.paths_of_run.append(path)
            continue
        problem = _spelling(command, text, options, values)
        if problem is None:
            text = literal(command, text, multirun=multirun)
            problem = _grammar(command, parser, text, multirun=multirun)
        if problem is None and not own_path:
            override = parser.parse_override(text)
            problem = _choice(command, override, options, config_dir) or _keys_below(command, override)
        if problem is None:
            prepared.overrides.append(text)
        else:
            prepared.problems.append(problem)
            prepared.doubtful |= _meant(command, text, options)
    return prepared


def _path_of_run(command: Command, text: str) -> str | None:
    """The import path of `data.kind=my_module:build`, for a command that reads runs and has no such key."""
    key, _, value = text.partition("=")
    known, path = leaves(command.spec), value.strip("'\"")
    of_run = key in PATHS_OF_RUN and key not in known and any(name in known for name in RUNS)
    return path if of_run and is_path(path) else None


def with_files(command: Command, typed: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Overrides with each `group=FILE.yaml` of the command's file groups as the keys that the file sets."""
    overrides, problems = list[str](), list[Problem]()
    for text in typed:
        group, _, value = text.partition("=")
        path = Path(expand_home(value.strip("'\"")))
        if text in command.own_files:
            own = command.own_files[text]()
            if isinstance(own, Problem):
                problems.append(own)
                continue
            path = own
        is_file = group in command.file_groups and path.suffix in (".yaml", ".yml")
        is_shipped = is_file and path.name == str(path) and isfile(CONFIG_DIR / group / path)
        if not is_file or is_shipped:
            overrides.append(text)
            continue
        found = _keys_of_file(command, group, path)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            overrides += [f"~{group}", *found]
    return overrides, problems


def _keys_of_file(command: Command, group: str, path: Path) -> list[str] | Problem:
    """Overrides that set what a YAML holds for a group's section: all its required keys and no others."""
    typed = f"{group}={path}"
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        return Problem((group,), f"{typed}: {error.strerror}", f"name a file, or a choice of {group}")
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        return Problem((group,), f"{typed}: no YAML ({' '.join(str(error).split())})", "correct the file")
    if not isinstance(values, dict):
        return Problem((group,), f"{typed}: no YAML with keys", "correct the file")
    flat = {f"{group}.{key}": value for key, value in flatten(values).items()}
    known = {key: leaf for key, leaf in leaves(command.spec).items() if key.startswith(f"{group}.")}
    missing = [key for key, leaf in known.items() if leaf.default == MISSING_VALUE and flat.get(key) is None]
    for key in sorted(flat.keys() - known.keys()):
        if below := [name for name in known if name.startswith(f"{key}.")]:
            problem = f"{typed}: {key.removeprefix(f'{group}.')}={show(flat[key])} must hold keys"
            return Problem((group,), problem, f"such as {below[0].rpartition('.')[2]}: …")
    for key, value in flat.items():
        if why := problem_of(value) or _not_printable(value):
            return Problem((group,), f"{typed}: {key.removeprefix(f'{group}.')}: {why}")
    unknown = [key for key in flat if key not in known]
    if missing or unknown:
        short = [key.removeprefix(f"{group}.") for key in (missing or unknown)]
        has = "lacks" if missing else "has unknown keys:"
        example = next((CONFIG_DIR / group).glob("*.yaml"))
        fix = f"{'add' if missing else 'remove'} them, as in {example.relative_to(CONFIG_DIR.parent)}"
        return Problem((group,), f"{typed}: {has} {', '.join(short)}", fix)
    return [f"{key}={quote(v) if isinstance(v, str) else show(v)}" for key, v in flat.items()]


def _not_printable(value: Any) -> str | None:
    """The reason why a text cannot stand on a page: marks that turn or hide what follows."""
    if not isinstance(value, str) or value.isprintable():
        return None
    return f"{visible(value)[:60]} holds characters that cannot be seen; write it without"


def _own_choices(command: Command, typed: Sequence[str]) -> list[str]:
    """Choices of the command itself where an experiment would choose for it, unless typed."""
    keys = {text.partition("=")[0].lstrip("+~") for text in typed}
    choices = command.own_choices if "experiment" in keys else ()
    return [choice for choice in choices if choice.partition("=")[0] not in keys]


def literal(command: Command, text: str, *, multirun: bool) -> str:
    """Quote the value of a text key, so that prompt=To be, or needs no second pair of quotes.

    Hydra's own syntax stays: quoted text, null (of a text that is no path and cannot be null, a word),
    interpolations, and sweeps under --multirun.
    """
    key, equals, value = text.partition("=")
    leaf = leaves(command.spec).get(key)
    if not equals or leaf is None or leaf.type not in (str, str | None):
        return text
    null = value == "null" and (leaf.type is not str or leaf.role is not None)
    if QUOTED.fullmatch(value) or null or "${" in value or (multirun and _parses(text)):
        return text
    return f"{key}={quote(value)}"


def _spelling(command: Command, text: str, options: dict[str, list[str]], typed: Typed) -> Problem | None:
    key, equals, value = text.partition("=")
    name = key.lstrip("+~")
    known, theirs = [*leaves(command.spec), *options], other_names(command.spec)
    if key.startswith("+++"):
        problem = f"cannot read '{text}': + adds a key, ++ adds or replaces one"
        return Problem((name,), problem, f"use ++{name}=…")
    if not equals and text.endswith((".py", ".yaml", ".yml")):
        return Problem((name,), f"cannot read '{text}': no file of settings is read", OWN_CONFIG)
    if not equals and not text.startswith("~"):
        near = nearest(text, known, theirs)
        hint = f"did you mean {near}=…?" if near else ""
        return Problem((name,), f"cannot read '{text}': expected key=value", hint)
    if text.startswith("hydra="):
        return Problem((name,), f"{text}: hydra is a section", "set its keys, such as hydra.sweep.dir=…")
    left_to_hydra = key[:1] in ("+", "~") or "@" in key or name.split(".")[0].split("/")[0] == "hydra"
    if left_to_hydra or name in leaves(command.spec) or name in options or name in sections(command.spec):
        return None
    if elsewhere(command.spec, name):
        return unknown_key(command.spec, name, value, typed)
    group = nearest(name, options) if "." not in name else None
    if group and nearest(name, known, theirs) == group:
        return Problem((name,), f"unknown key '{name}'", f"did you mean '{group}'?")
    return unknown_key(command.spec, name)


def _meant(command: Command, text: str, options: dict[str, list[str]]) -> set[str]:
    """Keys and sections that a rejected override was meant to set."""
    name = text.partition("=")[0].lstrip("+~")
    if found := elsewhere(command.spec, name):
        return {name, *found.keys}
    if name not in options and name not in leaves(command.spec):
        group = nearest(name, options) if "." not in name else None
        name = group or nearest_key(command.spec, name) or name
    return GROUP_SETS.get(name) or {name}


def _grammar(command: Command, parser: OverridesParser, text: str, *, multirun: bool) -> Problem | None:
    key = text.partition("=")[0]
    try:
        override = parser.parse_override(text)
    except (HydraException, ValueError, RecursionError):  # ValueError: a number of more than 4,300 digits
        leaf = leaves(command.spec).get(key)
        if leaf is None or leaf.type in (str, str | None):
            return Problem((key,), f"cannot read '{text}'", f"quote the value: \"{key}='…'\"")
        example = "" if leaf.default in (None, MISSING_VALUE) else f", such as '{key}={show(leaf.default)}'"
        problem = f"cannot read '{text}': {key} must be {describe_values(leaf)}{example}"
        return Problem((key,), problem)
    if override.is_sweep_override() and not multirun:
        return Problem((key,), f"{text} is a sweep: add --multirun, or quote the value")
    return None


def _choice(
    command: Command, override: Override, options: dict[str, list[str]], config_dir: str | None
) -> Problem | None:
    group = override.key_or_group
    if group.startswith("hydra/"):
        return _hydra_choice(override)
    if group not in options:
        return None
    for choice in _chosen(override, is_section=group in sections(command.spec)):
        roots = [CONFIG_DIR, *([Path(config_dir)] if config_dir else [])]
        name = choice.removesuffix(".yaml") if isinstance(choice, str) else None
        if name is None or not any(os.path.isfile(root / group / f"{name}.yaml") for root in roots):
            typed = choice if isinstance(choice, str) else show(choice)
            theirs = other_choices(group, options[group], config_dir)
            near = theirs.get(typed.lower().replace("-", "_")) or nearest(typed, options[group])
            hint = f"did you mean {near}? (list: mlm {command.name} --help)"
            if near is None:
                own = f"; {OWN}" if group == TASKS else ""
                hint = _listed(command, options[group]) + own
            group = f"~{group}" if override.is_delete() else group
            return Problem((override.key_or_group,), f"{group}={typed}: no such choice", hint)
    return None


def _hydra_choice(override: Override) -> Problem | None:
    """The problem of a choice among Hydra's own groups that is no name; Hydra knows the names."""
    group = override.key_or_group
    for choice in _chosen(override, is_section=False):
        if not isinstance(choice, str):
            return Problem.at(group, choice, "no such choice", "name one of Hydra's, or leave it out")
        if problem := length_problem(group, f"{choice}.yaml"):
            return problem
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


def _keys_below(command: Command, override: Override) -> Problem | None:
    """The first key that a section does not have, of a value that sets several: `optimizer={lr: 0.1}`."""
    name, value = override.key_or_group, override.value()
    if name not in sections(command.spec) or not isinstance(value, dict):
        return None
    keys = [f"{name}.{_unquoted(key)}" for key in value]
    return next((unknown_key(command.spec, key) for key in keys if key not in leaves(command.spec)), None)


def _parses(text: str) -> bool:
    try:
        OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):
        return False
    return True
