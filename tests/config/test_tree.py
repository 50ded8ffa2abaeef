"""Run specs as trees of keys."""

from dataclasses import dataclass, fields

import pytest

from mlm.cli.commands import SPECS
from mlm.config.tree import field_docs, leaves
from mlm.parallel.config import ParallelConfig
from mlm.runs.config import PretrainConfig


def test_parallel_fields_are_top_level_keys() -> None:
    assert {field.name for field in fields(ParallelConfig)} <= leaves(PretrainConfig).keys()
    assert not any(key.startswith("parallel") for key in leaves(PretrainConfig))


@pytest.mark.parametrize("spec", SPECS.values())
def test_every_key_of_every_run_spec_has_a_docstring(spec: type) -> None:
    assert [leaf.key for leaf in leaves(spec).values() if not leaf.doc] == []


def test_field_docs_belong_to_the_field_above() -> None:
    @dataclass
    class Example:
        """Not a field's."""

        a: int
        """Of a,
        folded."""
        b: int
        c: int = 0
        """Of c."""

    assert field_docs(Example) == {"a": "Of a, folded.", "c": "Of c."}
    assert len(fields(Example)) == 3
