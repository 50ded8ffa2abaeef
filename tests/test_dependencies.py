"""Every library that mlm imports is declared in pyproject.toml, and every declared one is imported."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


COMES_WITH = {"tqdm": "lm-eval", "triton": "torch"}
"""Modules that are imported only beside a library that brings them: triton with torch for a GPU."""


def distribution(requirement: str) -> str:
    """`hydra-core>=1.3` → hydra-core."""
    return re.split(r"[\[<>=!~ ;]", requirement)[0].lower().replace("_", "-")


@cache
def imported_modules() -> set[str]:
    """Top-level modules that some file of mlm imports, at the top or within a function."""
    found = set()
    for file in (ROOT / "mlm").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.Import(names=names):
                    found |= {name.name.split(".")[0] for name in names}
                case ast.ImportFrom(module=str(module), level=0):
                    found.add(module.split(".")[0])
                case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(module)), *_]):
                    found.add(module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"mlm"}


def modules_of(name: str) -> set[str]:
    """Top-level modules of a distribution; its own name where it is not installed."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return {name}
    listed = (found.read_text("top_level.txt") or "").split()
    return set(listed) or {file.parts[0].removesuffix(".py") for file in found.files or []}


def test_imported_libraries_are_declared() -> None:
    groups = PROJECT["optional-dependencies"]
    extras = [each for name, group in groups.items() if name != "dev" for each in group]
    declared = {distribution(each) for each in (*PROJECT["dependencies"], *extras)}
    brought = {module for module, library in COMES_WITH.items() if library in declared}
    assert imported_modules() - brought - set().union(*map(modules_of, declared)) == set()


def test_declared_libraries_are_imported() -> None:
    declared = {distribution(each) for each in PROJECT["dependencies"]}
    assert {each for each in declared if not modules_of(each) & imported_modules()} == set()
