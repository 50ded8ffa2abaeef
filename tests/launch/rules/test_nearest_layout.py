"""Fixes of layout problems: applied, each leaves fewer."""

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlm.launch.rules.layout import RANK_RULES, SPLIT_RULES, TRAIN_RULES, Launch
from mlm.launch.rules.nearest import layout_problems
from mlm.util.errors import Problem

SIZE = st.integers(1, 12)
LAYOUTS = st.fixed_dictionaries(
    {
        "tp": SIZE,
        "cp": st.sampled_from([1, 1, 2, 3, 4]),
        "pp": SIZE,
        "vp": st.integers(1, 4),
        "dp": st.none() | SIZE,
        "sequence_parallel": st.booleans(),
        "tp_overlap": st.sampled_from([1, 1, 2, 3]),
        "pipeline": st.sampled_from(["1f1b", "gpipe", "zb_h1"]),
        "zero": st.sampled_from([0, 2, 3]),
        "model.num_layers": st.integers(1, 24),
        "model.num_heads": SIZE,
        "model.hidden_size": st.sampled_from([24, 32, 60]),
        "model.ffn_hidden_size": st.none() | st.sampled_from([30, 96]),
        "model.max_positions": st.integers(1, 40),
        "data.seq_length": st.integers(1, 48),
        "train.global_batch_size": st.integers(1, 100),
        "train.micro_batch_size": st.integers(1, 4),
    }
)
LAUNCHES = st.builds(Launch, st.none() | st.integers(1, 48), st.none() | st.integers(1, 16))


def fixes(problem: Problem) -> list[dict[str, Any]]:
    """The alternatives that a problem offers here, as changes; none if it names keys alone."""
    if "change " in problem.fix:
        return []
    offered = re.split(r" \(|, or ", re.split("^use |, or here use ", problem.fix)[1])[0]
    return [dict(map(typed, words.split())) for words in offered.split(" or ")]


def typed(word: str) -> tuple[str, Any]:
    key, value = word.split("=")
    return key, {"true": True, "false": False, "null": None}.get(
        value, int(value) if value.isdigit() else value
    )


@pytest.mark.parametrize("rules", [TRAIN_RULES, RANK_RULES, SPLIT_RULES])
@settings(max_examples=20, deadline=None)
@given(layout=LAYOUTS, launch=LAUNCHES, data=st.data())
def test_a_fix_solves_its_problem_and_makes_no_other(
    rules: Any, layout: dict[str, Any], launch: Launch, data: st.DataObject
) -> None:
    problems = layout_problems(layout, launch, rules)
    offered = [(n, change) for n, problem in enumerate(problems) for change in fixes(problem)]
    assume(offered)
    number, change = data.draw(st.sampled_from(offered))
    left = layout_problems({**layout, **change}, launch, rules)
    assert len(left) < len(problems)
    inputs = [problem.keys for problem in left]
    assert all(inputs.count(keys) <= [p.keys for p in problems].count(keys) for keys in inputs)
    assert inputs.count(problems[number].keys) < [p.keys for p in problems].count(problems[number].keys)


@settings(max_examples=60, deadline=None)
@given(layout=LAYOUTS, launch=LAUNCHES)
def test_model_is_not_changed_to_suit_its_layout(layout: dict[str, Any], launch: Launch) -> None:
    assume(layout["model.hidden_size"] % layout["model.num_heads"] == 0)
    found = layout_problems(layout, launch, TRAIN_RULES)
    changed = [change for problem in found for change in fixes(problem)]
    assert not any(key.startswith("model.") for change in changed for key in change)
