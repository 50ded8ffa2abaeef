"""Causes by the factors of addends, by samples and by parts of norms, on tensors made by hand."""

import math

import pytest
import torch
from torch import Tensor

from mlm.verify.audit.calls import explain_samples
from mlm.verify.audit.compare import Comparison
from mlm.verify.audit.diagnose import Finding, diagnose
from mlm.verify.audit.record import ADDEND, AXES, SQUARE, Key, Record

DP = {"pp": 1, "dp": 2, "cp": 1, "tp": 1}
MEAN = 0.25
"""Factor of each of two replicas' two micro-batches."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def comparison_of(axis: str, whole: Record, ranks: list[Record]) -> Comparison:
    layout = {name: 1 + (name == axis) for name in AXES}
    at = [tuple(n * (name == axis) for name in AXES) for n in range(2)]
    return Comparison(whole, dict(zip(at, ranks, strict=True)), layout)


def finding_of_gradients(factors: list[list[float]], axis: str = "dp", right: float = MEAN) -> Finding | None:
    """Ranks have sums of the addends of two ranks and their micro-batches with these factors, by rank."""
    count = len(factors[0]) // 2
    addends = [[draw(6, 4, seed=10 * rank + micro) for micro in range(count)] for rank in range(2)]
    every = torch.stack([x for own in addends for x in own])
    initial = {Key(0, "initial", "w"): draw(6, 4)}
    whole = Record(initial | {Key(0, "gradient", "w"): right * every.sum(0)}, {"w": None})
    ranks = []
    for rank in range(2):
        actual = torch.einsum("n,nij->ij", torch.tensor(factors[rank], dtype=torch.float64), every)
        tensors = initial | {Key(0, "gradient", "w"): actual}
        tensors |= {Key(0, ADDEND, "w", call=micro): x for micro, x in enumerate(addends[rank])}
        ranks.append(Record(tensors, {"w": None}))
    return diagnose(comparison_of(axis, whole, ranks))


@pytest.mark.parametrize(
    ("factors", "cause", "words"),
    [
        ([[0.5, 0.25, 0.5, 0.25]] * 2, "micro-batches counted unequally", "count 2, 1 times"),
        ([[0.25, 0.0, 0.25, 0.0]] * 2, "micro-batches counted unequally", "count 1, 0 times"),
        ([[0.1, 0.1, 0.4, 0.4]] * 2, "ranks weighed unequally", "count 0.4, 1.6 times"),
        (
            [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]],
            "gradients not reduced",
            "dp rank has its own",
        ),
        ([[0.25, 0.25, 0, 0], [0, 0, 0.25, 0.25]], "gradients not summed", "dp rank has one addend"),
        ([[0.5] * 4] * 2, "unscaled mean", "it is 2 times"),
        ([[1 / 16] * 4] * 2, "wrong divisor", "it is 0.25 times"),
    ],
)
def test_a_gradient_gets_the_cause_of_its_factors(factors: list[list[float]], cause: str, words: str) -> None:
    found = finding_of_gradients(factors)
    assert found is not None
    assert found.cause == cause
    assert words in found.sentence


@pytest.mark.parametrize(
    ("factors", "cause"),
    [([[0.5, 0.5]] * 2, "averaged instead of summed"), ([[1, 0], [0, 1]], "tied weights not summed")],
)
def test_a_weight_on_two_stages_gets_the_cause_of_its_factors(factors: list[list[float]], cause: str) -> None:
    found = finding_of_gradients(factors, "pp", right=1.0)
    assert found is not None
    assert found.cause == cause


def test_gradients_clipped_before_their_sum_are_told_from_others_that_count_unequally() -> None:
    norms = [float(sum(draw(6, 4, seed=10 * rank + micro) for micro in range(2)).norm()) for rank in range(2)]
    found = finding_of_gradients([[0.2 / norms[0]] * 2 + [0.2 / norms[1]] * 2] * 2)
    assert found is not None
    assert found.cause == "clipped before the sum"


def test_a_gradient_of_other_addends_has_no_factors() -> None:
    found = finding_of_gradients([[0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.7, 0.2]])
    assert found is not None
    assert found.cause == "backward pass"  # where it is, and no formula


@pytest.mark.parametrize(
    ("reads", "missing"), [(([0, 1, 2, 3], [2, 3, 4, 5]), "[6, 7]"), (([0, 1], [0, 1]), "[2, 3, 4, 5, 6, 7]")]
)
def test_replicas_that_leave_out_samples_are_told_which(
    reads: tuple[list[int], list[int]], missing: str
) -> None:
    tokens = torch.arange(24).view(8, 3)
    key = Key(0, "input", "")
    ranks = {(0, n, 0, 0): Record({key: tokens[ids]}) for n, ids in enumerate(reads)}
    cause = explain_samples(Record({key: tokens}), ranks, DP)[0]
    assert f"{missing} are read by none" in cause.reason


def test_ranks_of_a_replica_that_read_other_samples_are_told_which() -> None:
    tokens, key = torch.arange(12).view(4, 3), Key(0, "input", "")
    ranks = {(0, n, 0, m): Record({key: tokens[[0, 1], :] + 6 * m}) for n in range(2) for m in range(2)}
    cause = explain_samples(Record({key: tokens}), ranks, DP | {"tp": 2})[0]
    assert "ranks of one replica, dp rank 0, read samples [0, 1] and [2, 3]" in cause.reason


@pytest.mark.parametrize("shape", [(8, 3), (8,)], ids=str)
def test_replicas_that_read_each_sample_once_have_no_cause(shape: tuple[int, ...]) -> None:
    tokens, key = torch.arange(math.prod(shape)).view(shape), Key(0, "input", "")
    ranks = {(0, n, 0, 0): Record({key: tokens[n::2]}) for n in range(2)}
    assert not explain_samples(Record({key: tokens}), ranks, DP)


def test_samples_of_several_lengths_have_no_cause() -> None:
    key = Key(0, "input", "")
    inputs = {key._replace(micro=n): torch.arange(2 * n).view(2, n) for n in (3, 4)}
    assert not explain_samples(Record(inputs), {(0, n, 0, 0): Record(inputs) for n in range(2)}, DP)


def finding_of_norm(axis: str, squares: list[dict[str, float]], norms: list[float]) -> Finding | None:
    """Ranks have whole gradients, such as DTensors put together, with these squares of their own parts."""
    grads = {"w": draw(6, 4), "tied": draw(4, seed=1)}
    tensors = {Key(0, "initial", n): x for n, x in grads.items()} | {
        Key(0, "gradient", n): x for n, x in grads.items()
    }
    norm = math.sqrt(sum(float(x.square().sum()) for x in grads.values()))
    whole = Record(tensors | {Key(0, "norm", "norm"): torch.tensor(norm).double()}, dict.fromkeys(grads))
    ranks = []
    for own, value in zip(squares, norms, strict=True):
        held = {key: x for key, x in tensors.items() if key.name in own}
        held |= {Key(0, SQUARE, n): torch.tensor(x).double() for n, x in own.items()}
        ranks.append(
            Record(held | {Key(0, "norm", "norm"): torch.tensor(value).double()}, dict.fromkeys(own))
        )
    return diagnose(comparison_of(axis, whole, ranks))


def test_norms_of_stages_that_are_added_are_told_where_a_weight_is_on_both() -> None:
    w, tied = (float(draw(*shape, seed=n).square().sum()) for n, shape in enumerate([(6, 4), (4,)]))
    value = math.sqrt(tied) + math.sqrt(w)  # the tied weight counts on the first stage alone
    found = finding_of_norm("pp", [{"tied": tied}, {"tied": tied, "w": w}], [value] * 2)
    assert found is not None
    assert found.cause == "norm of roots"


def test_norms_of_a_ranks_part_of_what_is_recorded_whole_are_told() -> None:
    w, tied = draw(6, 4).square(), float(draw(4, seed=1).square().sum())
    squares = [{"w": float(part.sum()), "tied": tied} for part in w.chunk(2)]
    found = finding_of_norm("tp", squares, [math.sqrt(sum(own.values())) for own in squares])
    assert found is not None
    assert found.cause == "norm misses parameters"


def test_an_update_of_a_weight_that_begins_at_zero_is_told_by_its_factor() -> None:
    moved = draw(4)
    start = {Key(0, "initial", "b"): torch.zeros(4, dtype=torch.float64)}
    whole = Record(start | {Key(0, "weight", "b"): moved}, {"b": None})
    ranks = [Record(start | {Key(0, "weight", "b"): 2 * moved}, {"b": None}) for _ in range(2)]
    found = diagnose(comparison_of("dp", whole, ranks))
    assert found is not None
    assert "weights move 2 times as far" in found.sentence
