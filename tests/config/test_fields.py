"""Keys that are paths: which they are, and how what is typed is read."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from mlm.cli.commands import SPECS
from mlm.config.build import build
from mlm.config.fields import FRACTION, POSITIVE, READ, Aliases, InputPath, Role, path_argument, path_problem
from mlm.config.suggest import nearest_key
from mlm.config.tree import Leaf, choices, defaults, leaves
from mlm.util.errors import ConfigError
from tests.util.special_files import put

A_PATH = re.compile(r"(?i)(\w+ )?(file|folder|path|run directory|prefix|tokenizer|checkpoint|corpus)\b")
"""Beginning of the docstring of a key that is a path."""
PATHS = [
    (name, leaf)
    for name, spec in SPECS.items()
    for leaf in leaves(spec).values()
    if leaf.role not in (None, Role.STORE)
]
IDS = [f"{name}-{leaf.key}" for name, leaf in PATHS]


def test_key_that_is_a_file_or_folder_is_declared_as_a_path() -> None:
    texts = [
        leaf
        for spec in SPECS.values()
        for leaf in leaves(spec).values()
        if leaf.type in (str, str | None, tuple[str, ...]) and leaf.role is None
    ]
    assert [leaf.key for leaf in texts if A_PATH.match(leaf.doc)] == []


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
        if known.default == "???" and known.type in (int, float):
            given = 2
        if known.default == "???" and choices(known.type):
            given = choices(known.type)[0]
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
def test_home_is_expanded_and_an_empty_path_or_a_loop_of_links_is_an_error(
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
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=f"{leaf.key}=.*leads through a loop of links"):
        build(SPECS[name], values_with(name, leaf, f"{tmp_path}/loop/x"))


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
@pytest.mark.parametrize("role", READ)
def test_what_is_no_file_or_folder_is_not_read(tmp_path: Path, kind: str, role: Role) -> None:
    path = put(kind, tmp_path / "x")
    problem = path_problem("data.path", str(path), role)
    assert problem == f"data.path={path}: is a {kind}; name a file or a folder"


@pytest.mark.parametrize("value", [None, 7, b"run", "s3://bucket/run", "a\0b", ""], ids=repr)
def test_an_argument_that_is_no_path_is_named(value: object) -> None:
    with pytest.raises((TypeError, ConfigError), match=r"^ckpt(: |=)"):
        path_argument("ckpt", value)


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A run spec that no feature has: the engine knows a key by its annotation alone."""

    floors: Annotated[int, POSITIVE, Aliases("storeys", "levels")] = 3
    """Number of floors."""
    heights: Annotated[tuple[float, ...], FRACTION] = ()
    """One for each floor."""
    plan: InputPath | None = None
    """A drawing."""


def test_key_of_a_feature_is_declared_at_its_field_alone() -> None:
    floors = leaves(Tower)["floors"]
    assert (floors.type, floors.bound, floors.aliases) == (int, POSITIVE, ("storeys", "levels"))
    assert leaves(Tower)["plan"].role is Role.INPUT
    assert nearest_key(Tower, "levels") == "floors"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"floors": 0}, "floors=0 must be greater than 0"),
        ({"floors": 2**31}, "floors=2147483648 must be at most 2147483647"),
        ({"heights": [0.5, 1.0]}, "heights=[0.5,1.0] must be at least 0 and below 1"),
        ({"plan": " "}, "plan= is empty; name a path, or omit the key"),
    ],
)
def test_every_command_checks_the_bounds_of_its_fields(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build(Tower, defaults(Tower) | values, lambda _: ())
    assert raised.value.problems == (problem,)


@pytest.mark.parametrize("path", ["s3://bucket/corpus", "hf://datasets/a/b"])
@pytest.mark.parametrize("role", [Role.INPUT, Role.FOLDER])
def test_a_path_of_another_role_is_none_of_a_remote_store(path: str, role: Role) -> None:
    problem = path_problem("data.path", path, role)
    assert problem == (
        f"data.path={path}: not read from or written to a remote store; copy it to this machine, or mount "
        "it, and name that path"
    )
    assert path_problem("data.path", path.replace("://", ":"), role) is None
