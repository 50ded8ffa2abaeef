"""Rows of the tables of models and tokenizers in the record are those that the script makes."""

import re

import pytest
from compare_conversions import TABLES, row
from links import ROOT

RECORD = (ROOT / "scripts/results/conversions.md").read_text().splitlines()
SAMPLED = ("Llama, rotary llama3", "Qwen 2, tied, yarn", "Gemma", "Llama 2, LlamaTokenizer")


def without_rounding(line: str) -> list[str]:
    """Cells of a line, with the differences that a sum in another order makes as one word."""
    return [re.sub(r"^(0|\d+e-\d+)\b", "rounding", cell.strip()) for cell in line.split("|")]


@pytest.mark.parametrize(
    ("table", "name"),
    [(table, name) for table, (_, rows, _) in enumerate(TABLES) for name in rows if name in SAMPLED],
)
def test_a_row_of_the_record_is_made_again(table: int, name: str) -> None:
    head, _, compare = TABLES[table]
    lines = RECORD[RECORD.index(head) :]
    kept = next(line for line in lines if line.startswith(f"| {name} |"))
    assert without_rounding(row(compare, name)) == without_rounding(kept)
