"""Config groups: the YAML of each choice, in configs/ or a --config-dir, and its description."""

import os
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mlm.cli.command import Command
from mlm.config.paths import CONFIG_DIR, groups
from mlm.config.tree import flatten
from mlm.util.errors import format_value

TASK = "task"
CUSTOM_TASK = "a task of your own needs --config-dir DIR, which holds task/NAME.yaml"
GLOBAL = "@package _global_"
"""First line of a YAML whose keys are the whole config's, such as an experiment's."""
LONGEST_LINE = 200  # characters of a YAML's comment that help shows
MOST_LINES = 10  # of a comment that are read
ALSO, PARAMETERS = "Also: ", "Parameters: "


@cache
def chosen_groups(config: str) -> tuple[str, ...]:
    path = CONFIG_DIR / f"{config}.yaml"
    primary = yaml.safe_load(path.read_text("utf-8")) if path.is_file() else {}
    entries = primary.get("defaults", [])
    return tuple(str(name) for entry in entries if isinstance(entry, dict) for name in entry)


def command_groups(command: Command, config_dir: str | None = None) -> dict[str, list[str]]:
    user = groups(Path(config_dir)) if config_dir else {}
    shipped = groups(CONFIG_DIR)
    names = sorted({*chosen_groups(command.config), *user})
    return {name: sorted({*shipped.get(name, []), *user.get(name, [])}) for name in names}


def choice_file(group: str, name: str, config_dir: str | None) -> Path | None:
    """The YAML of a choice, shipped or the user's; None if it does not exist."""
    folders = [CONFIG_DIR, *([Path(config_dir)] if config_dir else [])]
    files = (folder / group / f"{name}.yaml" for folder in folders)
    return next((file for file in files if os.path.isfile(file)), None)


def first_comment(path: Path | None) -> str:
    text = next((text for text in comment_of(path) if not text.startswith("@")), "")
    return "".join(c for c in text if c.isprintable())


def comment_of(path: Path | None) -> list[str]:
    """Lines of the first comment of a YAML; empty if the file cannot be read."""
    try:
        with open(path or os.devnull, encoding="utf-8", errors="replace") as f:
            lines = [f.readline(LONGEST_LINE) for _ in range(MOST_LINES)]
    except OSError:
        return []
    return [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines)]


def effect_of(group: str, path: Path) -> str:
    """The size of a shipped model, or the values that another choice sets."""
    values = _shipped_values(path)
    if group == "model":
        shape = values.get("model", values)
        layers = f"{shape['num_layers']} layers, hidden size {shape['hidden_size']}"
        return f"[{layers}, {shape['num_heads']} heads, {parameters_of(path)} parameters]"
    entries = [entry for entry in values.pop("defaults", []) if isinstance(entry, dict)]
    choices = [f"{name.removeprefix('override /')}={entry[name]}" for entry in entries for name in entry]
    settings = [*choices, *(f"{key}={format_value(value)}" for key, value in flatten(values).items())]
    return f"[{' '.join(settings)}]" if settings else ""


def parameters_of(path: Path) -> str:
    """Parameters of a shipped model, from its YAML's comment: counting would import torch."""
    lines = comment_of(path)
    return next(line.removeprefix(PARAMETERS) for line in lines if line.startswith(PARAMETERS))


def _shipped_values(path: Path) -> dict[str, Any]:
    """Values that a shipped YAML sets, defaults of its group included."""
    values: dict[str, Any] = yaml.safe_load(path.read_text("utf-8")) or {}
    for entry in values.get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            base = _shipped_values(path.parent / f"{entry.partition('@')[0]}.yaml")
            section = values.get("model", values)
            for key, value in base.items():
                section.setdefault(key, value)
    return values


def user_keys(choices: Mapping[str, Any], config_dir: str | None) -> set[str]:
    keys = set[str]()
    for group, name in choices.items():
        path = choice_file(group, str(name), config_dir)
        if path is not None and not path.is_relative_to(CONFIG_DIR):
            values = yaml.safe_load(path.read_text("utf-8")) or {}
            keys |= flatten(values, "" if GLOBAL in comment_of(path) else f"{group}.", opaque=()).keys()
    return keys


def takes_task(command: Command) -> bool:
    """True if a task is the first word after the command: `mlm finetune race`."""
    return command.positional[:1] == (TASK,)


def task_names(config_dir: str | None = None) -> list[str]:
    folders = [CONFIG_DIR, *([Path(config_dir)] if config_dir else [])]
    return sorted({name for folder in folders for name in groups(folder).get(TASK, [])})


def task_summaries(config_dir: str | None = None) -> list[tuple[str, str]]:
    """(name, first comment of its YAML) of each task."""
    return [(name, first_comment(choice_file(TASK, name, config_dir))) for name in task_names(config_dir)]
