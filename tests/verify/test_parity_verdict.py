"""Verdicts on the numbers of a comparison."""

from dataclasses import replace
from math import inf, nan

import pytest

from mlm.verify.compare import Difference, Pair, Report, StepReport
from mlm.verify.parity import judge, relative
from mlm.verify.verdict import TOLERANCES

NAMES = ("token.weight", "layers.0.attention_norm.bias", "layers.0.mlp.up.weight", "final_norm.bias")


def gradient(name: str, difference: float = 0.0, factor: float = 1.0, largest: float = 1.0) -> Difference:
    return Difference(name, name.endswith("norm.bias"), largest, difference, factor, 1.0)


def step(number: int = 1, *, loss: float = 4.0, norm: float = 1.0, **off: float) -> StepReport:
    """A step in which the gradients named by a word of theirs are off by so much, twice too large."""
    found = {name: by for name in NAMES for word, by in off.items() if word in name}
    gradients = tuple(gradient(name, found.get(name, 0.0), 1.0 + (name in found)) for name in NAMES)
    return StepReport(number, Pair(4.0, loss), Pair(1.0, norm), 0.1, gradients)


def report(*steps: StepReport, weight: float = 0.0, torn: tuple[str, ...] = ()) -> Report:
    weights = (gradient("token.weight", weight),)
    return Report((*steps[:-1], replace(steps[-1], weights=weights)), weights, 2, torn)


def test_equal_numbers_are_equal() -> None:
    verdict = judge(report(step(1), step(2)), "fp64")
    assert (verdict.word, verdict.hint) == ("EQUAL", "")
    assert verdict.sentence.endswith("2 parameters held in copies, all bit-equal")


@pytest.mark.parametrize("precision", TOLERANCES)
def test_a_loss_is_judged_by_the_tolerance_of_the_precision(precision: str) -> None:
    allowed = TOLERANCES[precision].loss
    assert judge(report(step(loss=4.0 + 0.9 * allowed)), precision).equal
    assert not judge(report(step(loss=4.0 + 1.1 * allowed)), precision).equal


@pytest.mark.parametrize("precision", TOLERANCES)
def test_a_gradient_is_judged_more_strictly_before_weights_have_moved(precision: str) -> None:
    first, later = TOLERANCES[precision].gradient, TOLERANCES[precision].later
    assert judge(report(step(1, up=0.9 * first), step(2, up=0.9 * later)), precision).equal
    assert not judge(report(step(1, up=1.1 * first), step(2)), precision).equal
    assert not judge(report(step(1), step(2, up=1.1 * later)), precision).equal


@pytest.mark.parametrize("bad", [nan, inf])
def test_what_is_not_a_number_is_never_equal(bad: float) -> None:
    assert not judge(report(step(loss=bad)), "fp64").equal
    assert not judge(report(step(norm=bad)), "fp64").equal
    assert not judge(report(step(up=bad)), "fp64").equal
    assert not judge(report(step(), weight=bad), "fp64").equal


@pytest.mark.parametrize(("precision", "is_equal"), [("fp64", False), ("fp32", False), ("bf16", True)])
def test_loads_of_experts_are_judged_where_rounding_moves_no_token(precision: str, is_equal: bool) -> None:
    loads = (gradient("layers.0.mlp.router.load", 1.0),)
    verdict = judge(Report((replace(step(), weights=loads),), loads, 0, ()), precision)
    assert verdict.equal == is_equal
    assert is_equal or "counts of the experts' loads" in verdict.hint


def test_the_first_difference_on_the_way_back_is_named() -> None:
    verdict = judge(report(step(1), step(2, token=0.5, attention=0.25)), "fp64")
    assert verdict.sentence == (
        "the first difference is in the gradient of layers.0.attention_norm.bias at step 2: 0.25 of its "
        "largest element; 2 of 4 parameters differ"
    )
    assert verdict.hint.startswith("layers.0.mlp.up.weight is right and all before it is wrong")


@pytest.mark.parametrize(
    "off, hint",
    [
        ({"token": 1.0}, "only the table that embedding and head share"),
        ({"bias": 1.0}, "only parameters that every tp rank holds"),
        ({"up": 1.0}, "gradients before and after it are right"),
        ({"weight": 1.0, "bias": 1.0}, "all gradients are 2 times those of one process"),
    ],
)
def test_the_pattern_of_differences_names_the_suspect(off: dict[str, float], hint: str) -> None:
    assert judge(report(step(**off)), "fp64").hint.startswith(hint)


def test_weights_are_judged_in_units_of_the_learning_rate() -> None:
    """Two steps of 0.1."""
    assert judge(report(step(1), step(2), weight=0.2 * 0.9e-5), "fp64").equal
    verdict = judge(report(step(1), step(2), weight=0.2), "fp64")
    assert "1 times what the learning rate moved them" in verdict.sentence


def test_an_update_that_differs_is_told_from_samples_that_differ() -> None:
    """Both show in the loss of the next step; weights are compared before."""
    off = replace(step(1), weights=(gradient("token.weight", 0.1),))
    verdict = judge(report(off, step(2, loss=4.1)), "fp64", "mine:Muon")
    assert "token.weight differ by 0.1 after step 1" in verdict.sentence
    assert (
        verdict.hint == "suspect optimizer.kind=mine:Muon: an update of an element that reads other elements"
    )
    assert judge(report(step(1), step(2, loss=4.1)), "fp64").hint.endswith("suspect the samples of this step")


def test_unequal_copies_are_a_difference() -> None:
    verdict = judge(report(step(), torn=("token.weight", "final_norm.bias")), "fp64")
    assert verdict.sentence.startswith("the copies of token.weight on several ranks")
    assert verdict.sentence.endswith("nor those of 1 more")


def test_steps_that_both_sides_skip_decide_nothing() -> None:
    overflow = replace(step(up=inf), grad_norm=Pair(inf, inf))
    assert judge(report(overflow), "fp16").word == "UNDECIDED"
    assert judge(report(overflow, step(2)), "fp16").equal


def test_an_overflow_on_one_side_is_a_difference() -> None:
    assert not judge(report(replace(step(up=inf), grad_norm=Pair(1.0, inf))), "fp16").equal


def test_a_vanishing_gradient_is_measured_against_the_largest_of_the_model() -> None:
    """A difference of 1e-16 in a gradient that is itself 1e-16 is no difference of 100 %."""
    small = gradient("layers.0.mlp.up.weight", difference=1e-16, largest=1e-16)
    assert relative([gradient("token.weight"), small])[1] == pytest.approx(1e-13)


def test_weights_that_no_learning_rate_moves_are_equal_or_not() -> None:
    still = replace(step(), lr=0.0)
    assert "weights to 0.0e+00, as every learning rate is 0" in judge(report(still), "fp64").sentence
    verdict = judge(report(still, weight=1e-9), "fp64")
    assert (verdict.word, verdict.sentence.count("inf times what the learning rate moved them")) == (
        "DIFFERENT",
        1,
    )
