"""Tables of the papers as data, each row with its source."""

import csv
from importlib.resources import files


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a table, `sc21_table1`."""
    text = (files(__name__) / f"{name}.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))
