"""Keys that are paths: which they are, and how what is typed is read."""

from pathlib import Path
from typing import Any

import pytest

from mlm.cli.commands import SPECS
from mlm.config.build import build
from mlm.config.fields import Role
from mlm.config.tree import Leaf, leaves
from mlm.errors import ConfigError

NO_PATHS = {
    *("name", "prompt", "revision", "split", "text_key", "id_key", "hub_config", "hub_split", "hub_revision"),
    *("eod", "stop"),
    *("model.kind", "optimizer.kind", "schedule.decay", "data.kind", "task.kind"),
    *("log.wandb_project", "normalise.languages"),
    *("executor.partition", "executor.time", "executor.environment"),
    *(f"task.{key}" for key in ("name", "columns", "label", "id", "labels", "metrics", "hub", "hub_config")),
    *(f"task.{key}" for key in ("subsets", "train", "validations", "tests", "submission")),
}
"""Texts that name no file. A new key of type str goes here, or gets a type of mlm/config/path_types.py."""
PATHS = [(name, leaf) for name, spec in SPECS.items() for leaf in leaves(spec).values() if leaf.role]
IDS = [f"{name}-{leaf.key}" for name, leaf in PATHS]


def test_every_text_key_is_a_path_or_is_listed_as_none() -> None:
    texts = {
        leaf.key: leaf.role
        for spec in SPECS.values()
        for leaf in leaves(spec).values()
        if leaf.type in (str, str | None, tuple[str, ...])
    }
    assert {key for key, role in texts.items() if role is None} == NO_PATHS


@pytest.mark.parametrize("name", SPECS)
def test_out_is_a_path_to_write_in_every_command(name: str) -> None:
    known = leaves(SPECS[name])
    if "out" in known:
        assert known["out"].role in (Role.RESULT, Role.FOLDER, Role.PLACE)


def values_with(name: str, leaf: Leaf, value: str) -> dict[str, Any]:
    """Composed values of a command whose required keys are given, and one key is `value`."""
    tree: dict[str, Any] = {}
    for key, known in leaves(SPECS[name]).items():
        given = "x" if known.default == "???" else known.default
        if key in ("model.num_layers", "model.hidden_size", "model.num_heads"):
            given = 2
        if known.default == "???" and known.type == tuple[str, ...]:
            given = ["x"]
        if key == leaf.key:
            given = [value] if leaf.type == tuple[str, ...] else value
        place = tree
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = list(given) if isinstance(given, tuple) else given
    return tree


def value_of(config: Any, leaf: Leaf) -> str:
    for part in leaf.key.split("."):
        config = getattr(config, part)
    return config[0] if isinstance(config, tuple) else config


@pytest.mark.parametrize(("name", "leaf"), PATHS, ids=IDS)
def test_tilde_expands_and_the_empty_path_is_an_error(
    name: str, leaf: Leaf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    weight = "0.3 " if leaf.role is Role.BLEND else ""
    config = build(SPECS[name], values_with(name, leaf, f"{weight}~/x"))
    assert value_of(config, leaf) == f"{weight}{tmp_path}/x"
    with pytest.raises(ConfigError) as raised:
        build(SPECS[name], values_with(name, leaf, f"{weight}~nobody-of-this-name/x"))
    assert "~nobody-of-this-name is no user's home folder" in str(raised.value)
    if leaf.role is not Role.BLEND:
        with pytest.raises(ConfigError) as raised:
            build(SPECS[name], values_with(name, leaf, ""))
        assert raised.value.problems == (f"{leaf.key}= is empty; name a path, or omit the key",)
