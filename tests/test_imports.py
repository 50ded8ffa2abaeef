"""Imports between rooms run down, and no two files import each other: counted from the source.

Types count, and so do import strings ("mlm.room.file:name"), which load a module later. mlm/__init__.py alone
names what is above it, its public names, and loads none of it before it is used.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = re.compile(r"(mlm(?:\.\w+)+):\w+")


def modules() -> dict[str, Path]:
    """The modules of the package but its own top, by name."""
    paths = sorted((ROOT / "mlm").rglob("*.py"))
    names = (path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths)
    return {
        name.removesuffix(".__init__"): path
        for name, path in zip(names, paths, strict=True)
        if name not in ("mlm.__init__", "mlm.__main__")
    }


def imports(tree: ast.AST, known: dict[str, Path], *, strings: bool) -> Iterator[str]:
    """The modules that a file imports, at its top or later, for types or by a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found = name if name in known else node.module
                if found in known:
                    yield found
        elif strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
            target = TARGET.fullmatch(node.value)
            if target and target[1] in known:
                yield target[1]


def arrows(*, strings: bool) -> dict[str, set[str]]:
    """Each module with those that it imports."""
    known = modules()
    return {
        name: set(imports(ast.parse(path.read_text()), known, strings=strings)) - {name}
        for name, path in known.items()
    }


def layers() -> dict[str, int]:
    """The height of each room, as the first contract of import-linter has it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    rooms = settings["contracts"][0]["layers"]
    return {room.strip(): height for height, level in enumerate(reversed(rooms)) for room in level.split("|")}


def test_imports_run_down_and_every_room_has_its_height() -> None:
    height = layers()
    up = [
        f"{name} -> {other}"
        for name, others in arrows(strings=True).items()
        for other in others
        if (room := ".".join(name.split(".")[:2])) != (below := ".".join(other.split(".")[:2]))
        and height[room] <= height[below]
    ]
    assert up == []


def test_no_files_import_each_other() -> None:
    try:
        TopologicalSorter(arrows(strings=True)).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_import_linter_ignores_nothing_but_the_public_names() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    ignored = [each for contract in settings["contracts"] for each in contract.get("ignore_imports", ())]
    assert ignored == ["mlm -> mlm.**"]
