"""Overrides before Hydra sees them: all mistakes at once, and text taken literally."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

from mlm.cli.command import Command
from mlm.cli.compose.arguments import quote
from mlm.cli.compose.groups import (
    ALSO,
    CUSTOM_TASK,
    GLOBAL,
    TASK,
    choice_file,
    command_groups,
    comment_of,
)
from mlm.config.fields import expand_home
from mlm.config.imports import is_path
from mlm.config.paths import CONFIG_DIR
from mlm.config.plain_yaml import parse, problem_of, read_text
from mlm.config.suggest import foreign_option, foreign_options, nearest, nearest_key, unknown_key
from mlm.config.tree import MISSING_VALUE, OPTIONS, describe_values, flatten, leaves, other_names, sections
from mlm.runs.config import PretrainConfig
from mlm.util.errors import Problem, UserError, escape_controls, format_value

MOST_LISTED = 16  # choices that one line names
QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
TEXTS = (str, str | None, str | tuple[str, ...])
"""Types of the keys whose value may be a text."""
USER_OPTIONS = ("model.options.", "optimizer.options.", "schedule.options.")
"""Sections whose keys only the user's code knows."""
IMPORT_KEYS = tuple(key for key, leaf in leaves(PretrainConfig).items() if leaf.shipped)
"""Keys of a run that take import paths."""
GROUP_SETS = {
    "parallel": {"tp", "cp", "pp", "vp", "dp", "sequence_parallel", "zero", "recompute", "train"},
    "cluster": {"dist"},
    "task": {"name", "out", "task", "optimizer", "train", "schedule"},
    "experiment": {"name", "out", *sections(PretrainConfig), "tp", "cp", "pp", "vp", "dp", "recompute"},
}
"""Sections and keys set by groups that are not named like their section."""


@dataclass
class Overrides:
    """Overrides that Hydra can compose, and the problems of the others."""

    texts: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    rejected_keys: set[str] = field(default_factory=set)
    """Keys and sections of rejected overrides. They have other values than typed, so their further problems
    are not reported."""
    import_paths: list[str] = field(default_factory=list)
    """Typed import paths of the run that the command reads; no other saved path is imported."""

    def reject(self, problem: Problem, keys: Iterable[str]) -> None:
        self.problems.append(problem)
        self.rejected_keys.update(keys)

    def all_problems(self, problems: Iterable[Problem]) -> list[Problem]:
        """All problems, without those that follow from a rejected override."""
        return [
            *self.problems,
            *(problem for problem in problems if not problem.concerns(self.rejected_keys)),
        ]


def prepare(command: Command, typed: Sequence[str], *, config_dir: str | None = None) -> Overrides:
    # An experiment does not replace these choices of the command, typed ones do.
    keys = {text.partition("=")[0].lstrip("+") for text in typed}
    choices = command.fixed_choices if "experiment" in keys else ()
    overrides = Overrides([choice for choice in choices if choice.partition("=")[0] not in keys])
    options, schema = command_groups(command, config_dir), leaves(command.spec)
    for text in _with_files(command, typed, overrides):
        text = text.lstrip("+")  # Hydra's + and ++, which compose() adds itself
        key, _, value = text.partition("=")
        of_run = key in IMPORT_KEYS and key not in schema and ("ckpt" in schema or "incident" in schema)
        if of_run and is_path(path := value.strip("'\"")):
            overrides.import_paths.append(path)
            continue
        problem = _spelling(command, text, options)
        if problem is None:
            # Text is literal, so that prompt=To be, or needs no second quotes. Hydra's syntax stays: quoted
            # text, interpolations, lists if the key takes them, and null unless the text cannot be null.
            leaf = schema.get(key)
            is_list = leaf is not None and leaf.type == str | tuple[str, ...] and value.startswith("[")
            is_text = leaf is not None and leaf.type in TEXTS and not is_list
            is_null = value == "null" and leaf is not None and (leaf.type is not str or leaf.role is not None)
            if is_text and not (is_null or "${" in value or QUOTED.fullmatch(value)):
                text = f"{key}={quote(value)}"
            problem = _value_problem(command, text, options, config_dir)
        if problem is None:
            overrides.texts.append(text)
            continue
        name = text.partition("=")[0]
        if option := foreign_option(command.spec, name):
            overrides.reject(problem, {name, *option.keys})
            continue
        if name not in options and name not in schema:
            group = nearest(name, options) if "." not in name else None
            name = group or nearest_key(command.spec, name) or name
        overrides.reject(problem, GROUP_SETS.get(name) or {name})
    return overrides


def _spelling(command: Command, text: str, options: dict[str, list[str]]) -> Problem | None:
    """The problem of a key that the command lacks, or of a word without a key."""
    key, equals, value = text.partition("=")
    spec = command.spec
    names, foreign = [*leaves(spec), *options], other_names(spec)
    if equals and not key:
        return Problem((key,), f"cannot read '{text}': no key before =", "write key=value without spaces")
    if not equals and text.endswith((".py", ".yaml", ".yml")):
        answer = next(option.answer for option in foreign_options() if "config" in option.names)
        return Problem((key,), f"cannot read '{text}': no file of settings is read", answer)
    if not equals:
        suggestion = nearest(text.lstrip("~"), names, foreign)
        hint = f"did you mean {suggestion}=…?" if suggestion else ""
        return Problem((key,), f"cannot read '{text}': expected key=value", hint)
    if "@" in key or key.startswith("~"):
        name = key.lstrip("~").partition("@")[0]
        fix = f"use {name}={value or '…'}" if name in names else "--help lists the keys"
        return Problem((name,), f"{text}: a setting is typed as key=value or group=choice alone", fix)
    if key.partition(".")[0].partition("/")[0] == "hydra":
        fix = "leave it out; own YAML is --config-dir"
        return Problem((key,), f"{text}: mlm composes with Hydra and runs without it", fix)
    if key in names or key in sections(spec) or key.startswith(USER_OPTIONS):
        return None
    if foreign_option(spec, key):
        return unknown_key(spec, key, value)
    group = nearest(key, options) if "." not in key else None
    if group and nearest(key, names, foreign) == group:
        return Problem((key,), f"unknown key '{key}'", f"did you mean '{group}'?")
    return unknown_key(spec, key)


def _value_problem(
    command: Command, text: str, options: dict[str, list[str]], config_dir: str | None
) -> Problem | None:
    """The problem of a value: unreadable, several, an unknown choice or key of a section."""
    key, override = text.partition("=")[0], _parsed(text)
    schema, is_section = leaves(command.spec), key in sections(command.spec)
    leaf = schema.get(key)
    if override is None:
        if leaf is None or leaf.type in (*TEXTS, tuple[str, ...]):
            quoted = "'…'" if leaf is None or leaf.type in (str, str | None) else "['…','…']"
            return Problem((key,), f"cannot read '{text}'", f'quote the value: "{key}={quoted}"')
        example = (
            "" if leaf.default in (None, MISSING_VALUE) else f", such as '{key}={format_value(leaf.default)}'"
        )
        return Problem((key,), f"cannot read '{text}': {key} must be {describe_values(leaf)}{example}")
    value = override.value()
    if leaf is not None and isinstance(value, dict) and key.rpartition(".")[2] not in OPTIONS:
        return Problem((key,), f"{text} must be {describe_values(leaf)}")
    if override.is_sweep_override():
        return Problem((key,), f"{text}: more than one value", "start a run for each, or quote the value")
    if is_section and isinstance(value, dict):
        keys = (f"{key}.{_unquoted(name)}" for name in value)
        return next((unknown_key(command.spec, name) for name in keys if name not in schema), None)
    if key not in options:
        return unknown_key(command.spec, key) if is_section else None
    for choice in value if isinstance(value, list) else [value]:
        if problem := _choice_problem(command, key, _unquoted(choice), options[key], config_dir):
            return problem
    return None


def _choice_problem(
    command: Command, group: str, choice: Any, options: list[str], config_dir: str | None
) -> Problem | None:
    file = choice_file(group, choice.removesuffix(".yaml"), config_dir) if isinstance(choice, str) else None
    if file is not None:
        if group == "experiment" and GLOBAL not in comment_of(file):
            return Problem(
                (group,),
                f"{group}={choice}: {file}: its keys are not those of the whole config",
                f"let its first line be `# {GLOBAL}`",
            )
        return None
    typed = choice if isinstance(choice, str) else format_value(choice)
    aliases = dict[str, str]()  # names that other programs have: `# Also: gpt2_medium` in a choice's comment
    for name in options:
        for line in comment_of(choice_file(group, name, config_dir)):
            if line.startswith(ALSO):
                aliases |= dict.fromkeys(line.removeprefix(ALSO).replace(",", " ").split(), name)
    longer = [option for option in options if option.startswith(f"{typed}_")]
    # an rtx_4090 is not a misspelled rtx_5090: a number names the hardware
    numbers = re.findall(r"\d+", typed)
    similar = [name for name in options if group != "hardware" or re.findall(r"\d+", name)[0] in numbers]
    match = aliases.get(typed.lower().replace("-", "_")) or (None if longer[1:] else nearest(typed, similar))
    if match:
        hint = f"did you mean {match}? (list: mlm {command.name} --help)"
    elif longer:
        hint = f"choose {', '.join(longer[:-1])} or {longer[-1]}"
    elif len(options) > MOST_LISTED:
        hint = f"list: mlm {command.name} --help"
    else:
        hint = "choose " + " or ".join(filter(None, (", ".join(options[:-1]), options[-1])))
    custom = f"; {CUSTOM_TASK}" if group == TASK and match is None else ""
    return Problem((group,), f"{group}={typed}: no such choice", hint + custom)


def _unquoted(value: Any) -> Any:
    return value.text if isinstance(value, QuotedString) else value


def _parsed(text: str) -> Override | None:
    """An override by Hydra's parser; None if it cannot be read."""
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):  # ValueError: a number of more than 4,300 digits
        return None


def keys_of(text: str) -> list[str]:
    """The keys that an override sets, also within a section: `lora={alpha:8}`."""
    key, _, value = text.partition("=")
    parsed = _parsed(text) if value.startswith("{") else None
    return list(flatten({key: parsed.value() if parsed else None}, opaque=()))


def _with_files(command: Command, words: Sequence[str], overrides: Overrides) -> list[str]:
    """Replace each `group=FILE.yaml` of the command's file groups by the keys that the file sets."""
    texts = list[str]()
    for text in words:
        group, _, value = text.partition("=")
        path = Path(expand_home(value.strip("'\"")))
        is_shipped = path.name == str(path) and isfile(CONFIG_DIR / group / path)
        is_file = group in command.file_groups and path.suffix in (".yaml", ".yml") and not is_shipped
        if text not in command.user_files and not is_file:
            texts.append(text)
            continue
        file = command.user_files[text]() if text in command.user_files else path
        keys = file if isinstance(file, Problem) else _keys_of_file(command, group, file)
        if isinstance(keys, Problem):
            overrides.reject(keys, keys.keys)
        else:
            overrides.texts.append(f"~{group}")
            texts += keys
    return texts


def _keys_of_file(command: Command, group: str, path: Path) -> list[str] | Problem:
    """Overrides for the keys in a group's YAML file, which must hold all required keys and no others."""
    typed = f"{group}={path}"
    try:
        flat = {f"{group}.{key}": value for key, value in flatten(parse(read_text(path), path)).items()}
    except UserError as error:
        return Problem((group,), f"{group}={error}")  # which begins with the path
    schema = {key: leaf for key, leaf in leaves(command.spec).items() if key.startswith(f"{group}.")}
    for key, value in flat.items():
        why = problem_of(value)
        if why is None and isinstance(value, str) and not value.isprintable():
            why = f"{escape_controls(value)[:60]} holds characters that cannot be seen; write it without"
        if why:
            return Problem((group,), f"{typed}: {key.removeprefix(f'{group}.')}: {why}")
    missing = [key for key, leaf in schema.items() if leaf.default == MISSING_VALUE and flat.get(key) is None]
    if wrong_keys := missing or [key for key in flat if key not in schema]:
        names = ", ".join(key.removeprefix(f"{group}.") for key in wrong_keys)
        example = next((CONFIG_DIR / group).glob("*.yaml")).relative_to(CONFIG_DIR.parent)
        has, fix = ("lacks", "add") if missing else ("has unknown keys:", "remove")
        return Problem((group,), f"{typed}: {has} {names}", f"{fix} them, as in {example}")
    return [f"{key}={quote(v) if isinstance(v, str) else format_value(v)}" for key, v in flat.items()]
