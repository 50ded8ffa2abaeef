"""The list of long tests names tests that are there."""

import ast
from pathlib import Path

from tests.conftest import SLOW, listed

ROOT = Path(__file__).parents[1]


def test_long_tests_that_are_listed_exist() -> None:
    names: dict[str, set[str]] = {}
    for test in listed():
        file, *classes, function = test.split("::")
        if file not in names:
            tree = ast.parse((ROOT / file).read_text())
            names[file] = {
                node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
            }
        assert {*classes, function} <= names[file], test


def test_the_list_is_sorted_and_names_each_once() -> None:
    lines = SLOW.read_text().splitlines()
    assert lines == sorted(set(lines))
