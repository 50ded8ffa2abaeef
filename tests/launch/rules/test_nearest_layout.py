"""Fixes of layout problems: applied, they leave no problem."""

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
HERE = ", or here use "


def fixes(problem: Problem) -> list[dict[str, Any]]:
    """The alternatives that a problem offers here, as changes."""
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
def test_fixes_of_all_problems_together_leave_none(
    rules: Any, layout: dict[str, Any], launch: Launch, data: st.DataObject
) -> None:
    problems = layout_problems(layout, launch, rules)
    assume(problems)
    fixed = dict(layout)
    for problem in problems:
        if HERE not in problem:
            fixed |= data.draw(st.sampled_from(fixes(problem)))
    left = layout_problems(fixed, launch, rules)
    assert left == [problem for problem in left if HERE in problem]
    assert len(left) <= sum(HERE in problem for problem in problems)


@settings(max_examples=60, deadline=None)
@given(layout=LAYOUTS, launch=LAUNCHES)
def test_model_is_not_changed_to_suit_its_layout(layout: dict[str, Any], launch: Launch) -> None:
    assume(layout["model.hidden_size"] % layout["model.num_heads"] == 0)
    found = layout_problems(layout, launch, TRAIN_RULES)
    changed = [change for problem in found for change in fixes(problem)]
    assert not any(key.startswith("model.") for change in changed for key in change)


@settings(max_examples=20, deadline=None)
@given(layout=LAYOUTS, devices=st.none() | st.integers(1, 16), data=st.data())
def test_fix_of_too_many_ranks_is_a_layout_that_fits_here(
    layout: dict[str, Any], devices: int | None, data: st.DataObject
) -> None:
    launch = Launch(None, devices)
    too_many = [problem for problem in layout_problems(layout, launch, TRAIN_RULES) if HERE in problem]
    assume(too_many)
    change = data.draw(st.sampled_from(fixes(too_many[0])))
    assert layout_problems({**layout, **change}, launch, TRAIN_RULES) == []


LAYOUT = {
    **{"tp": 1, "cp": 1, "pp": 1, "vp": 1, "dp": None, "sequence_parallel": False, "tp_overlap": 1},
    **{"pipeline": "1f1b", "zero": 0, "model.num_layers": 12, "model.num_heads": 12},
    **{"model.hidden_size": 24, "model.ffn_hidden_size": None, "model.max_positions": 64},
    **{"data.seq_length": 64, "train.global_batch_size": 64, "train.micro_batch_size": 1},
}


@pytest.mark.parametrize(
    ("typed", "started", "nearest"),
    [
        ({"tp": 3, "train.global_batch_size": 6}, 16, {"tp": 4, "train.global_batch_size": 8}),
        # a number before null
        ({"dp": 3, "train.global_batch_size": 14}, 8, {"dp": 8, "train.global_batch_size": 16}),
        # no change of one key fits the layers: the likeliest key makes room for the next
        ({"cp": 10, "pp": 16, "vp": 13}, 12, {"cp": 1, "pp": 12, "vp": 1}),
    ],
    ids=str,
)
def test_changes_of_rules_in_turn_lead_to_a_valid_layout(
    typed: dict[str, Any], started: int, nearest: dict[str, Any]
) -> None:
    problems = layout_problems({**LAYOUT, **typed}, Launch(started, None), TRAIN_RULES)
    assert {key: value for p in problems for fix in fixes(p) for key, value in fix.items()} == nearest
