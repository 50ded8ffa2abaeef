"""The record of faults: every row names a test that is there, or a case of the rehearsal that passed."""

import ast
import json
import re
from functools import cache

import pytest

from tests.pages import ROOT

PAGE = ROOT / "scripts/results/faults.md"
RECORD = ROOT / "scripts/results/rehearsal/rehearsal.json"
COLUMNS = "| planted | found within | said | lost | proof |"


def rows() -> list[list[str]]:
    found = []
    for table in PAGE.read_text().split(COLUMNS)[1:]:
        lines = table.strip().splitlines()[1:]
        body = lines[: next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))]
        found += [[cell.strip() for cell in line.strip("|").split("|")] for line in body]
    return found


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_there_are_enough_rows_of_five_cells_that_differ() -> None:
    assert len(rows()) >= 30
    assert all(len(row) == 5 and all(row) for row in rows())
    assert len({tuple(row[:1]) for row in rows()}) == len(rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_names_a_test_or_a_case_that_passed(row: list[str]) -> None:
    test = re.fullmatch(r"`(tests/\S+\.py)::(\w+)`", row[4])
    if test:
        assert test[2] in names_in(test[1])
        return
    case = re.fullmatch(r"rehearsal: (.+)", row[4])
    assert case is not None, row[4]
    passed = {one["case"]: one["passed"] for one in json.loads(RECORD.read_text())["cases"]}
    assert passed[case[1]]


def test_every_case_of_the_rehearsal_that_plants_something_is_a_row() -> None:
    cases = {row[4].removeprefix("rehearsal: ") for row in rows()}
    recorded = json.loads(RECORD.read_text())["cases"]
    assert not [
        one["case"]
        for one in recorded
        if not one["planted"].startswith("nothing") and one["case"] not in cases
    ]
