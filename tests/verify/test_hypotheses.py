"""Each hypothesis about wrong numbers, on tensors made by hand, and on numbers that none explains."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mlm.verify.audit.compare import Comparison
from mlm.verify.audit.diagnose import Finding, diagnose
from mlm.verify.audit.formats import Formats
from mlm.verify.audit.record import Key, Record

WIDTH = 24
TP = {"pp": 1, "dp": 1, "cp": 1, "tp": 2}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def finding(kind: str, wrong: list[Tensor], right: Tensor, *, w_factor: float = 1.0) -> Finding | None:
    """Of a step of a split matrix w and a copied vector b, whose tensor of a kind is wrong on two ranks.

    There w moves `w_factor` times as far as it should.
    """
    start = {"w": draw(6, 4), "b": draw(WIDTH, seed=1)}
    grads = {"w": draw(6, 4, seed=2), "b": draw(WIDTH, seed=3)}
    ends = {name: x + 0.01 * draw(*x.shape, seed=4) for name, x in start.items()}
    norm = torch.tensor(math.sqrt(sum(float(g.square().sum()) for g in grads.values())), dtype=torch.float64)
    whole = Record({Key(0, "initial", name): x for name, x in start.items()})
    whole.tensors |= {Key(0, "gradient", name): x for name, x in grads.items()} | {
        Key(0, "norm", "norm"): norm
    }
    whole.tensors |= {Key(0, "weight", name): x for name, x in ends.items()}
    ranks = {}
    for rank in range(2):
        tensors = {k: x.chunk(2)[rank] if k.name == "w" else x for k, x in whole.tensors.items()}
        moved = start["w"] + w_factor * (ends["w"] - start["w"])
        tensors[Key(0, "weight", "w")] = moved.chunk(2)[rank]
        name = {"norm": "norm", "weight": "b"}[kind]
        tensors[Key(0, kind, name)] = wrong[rank]
        ranks[0, 0, 0, rank] = Record(tensors, {"w": None, "b": None})
    whole.tensors[Key(0, kind, name)] = right if kind == "weight" else norm
    return diagnose(Comparison(whole, ranks, TP))


@pytest.mark.parametrize(
    ("factors", "words"),
    [((4, 1), "of split parameters count 4 times"), ((4, 2), "count 4 times, of replicated ones 2 times")],
)
@pytest.mark.parametrize("is_alone", [False, True])
def test_norm_whose_squares_count_as_often_as_ranks_hold_copies(
    factors: tuple[int, int], words: str, is_alone: bool
) -> None:
    """On dp=2 tp=2, and on dp=4 alone, where a larger layout says which parameters are split."""
    grads = {name: draw(6, 4, seed=n) for n, name in enumerate("pqrst")}
    squares = {name: float(x.square().sum()) for name, x in grads.items()}
    split = {"p", "q", "r"}

    def record(rank: int, *counts: int) -> Record:
        own = {n: x if is_alone or rank < 0 or n not in split else x.chunk(2)[rank] for n, x in grads.items()}
        norm = sum(square * counts[n not in split] for n, square in squares.items()) ** 0.5
        tensors = {Key(0, kind, n): x for kind in ("initial", "gradient") for n, x in own.items()}
        return Record(tensors | {Key(0, "norm", "norm"): torch.tensor(norm).double()}, dict.fromkeys(grads))

    at = [(0, n, 0, 0) if is_alone else (0, n // 2, 0, n % 2) for n in range(4)]
    layout = TP | ({"dp": 4, "tp": 1} if is_alone else {"dp": 2})
    comparison = Comparison(record(-1, 1, 1), {rank: record(rank[3], *factors) for rank in at}, layout)
    comparison.split_parameters |= split
    found = diagnose(comparison)
    assert found is not None
    assert words in found.sentence


@pytest.mark.parametrize(
    ("formula", "cause"),
    [
        (lambda w, b: [(x + b).sqrt() for x in w], "norm misses parameters"),
        (lambda w, b: [(w.sum() + 2 * b).sqrt()] * 2, "norm repeats parameters"),
        (lambda w, b: [w.sum().sqrt()] * 2, "norm misses parameters"),
        (lambda w, b: [sum((x + b).sqrt() for x in w)] * 2, "norm of roots"),
        (lambda w, b: [(w.sum() + b).sqrt() * 1.37] * 2, "norm"),  # none that is known
    ],
)
def test_norm_gets_the_cause_whose_formula_gives_its_number(formula, cause: str) -> None:  # type: ignore[no-untyped-def]
    w, b = draw(6, 4, seed=2).square(), draw(WIDTH, seed=3).square().sum()
    found = finding("norm", formula(torch.stack([x.sum() for x in w.chunk(2)]), b), b)
    assert found is not None
    assert found.cause == cause


@pytest.mark.parametrize(
    ("formula", "cause"),
    [
        (lambda start, end: end - 0.003 * start, "weight decay"),
        (lambda start, end: start + 2 * (end - start), "update scaled"),
        (lambda start, end: start, "not updated"),
        (lambda start, end: torch.cat([start[:2], end[2:]]), "partly updated"),
        (lambda start, end: start + (end - start + 0.01 * start).roll(-1) - 0.01 * start, "shards shifted"),
        (lambda start, end: end + 0.01 * draw(WIDTH, seed=9), "update depends on the layout"),
    ],
)
def test_update_gets_the_cause_whose_formula_gives_its_weights(formula, cause: str) -> None:  # type: ignore[no-untyped-def]
    start = draw(WIDTH, seed=1)
    end = start + 0.01 * draw(WIDTH, seed=4)
    found = finding("weight", [formula(start, end)] * 2, end)
    assert found is not None
    assert found.cause == cause


def test_updates_may_have_a_factor_by_parameter() -> None:
    start = draw(WIDTH, seed=1)
    end = start + 0.01 * draw(WIDTH, seed=4)
    found = finding("weight", [start + 0.64 * (end - start)] * 2, end, w_factor=0.8)
    assert found is not None
    assert found.cause == "update scaled"
    assert "0.8 (w), 0.64 (b)" in found.sentence


def test_counts_are_not_moved_and_what_is_rounded_is_by_a_unit() -> None:
    formats, counts, x = Formats(seed=1), torch.ones(3) * 5, draw(100).float()
    add, before = torch.ops.aten.add.Tensor, x.clone()
    formats.observe(add, (counts, counts), counts, "a", is_update=False)
    assert formats.narrowest == {}
    formats.observe(add, (x, x), x, "b", is_update=False)
    assert formats.narrowest == {"b": "fp32"}
    assert counts.tolist() == [5.0, 5.0, 5.0]
    assert bool((x != before).any())
    # one unit, and half a unit by which the moved number is rounded
    assert float(((x - before) / before).abs().max()) <= 1.5 * torch.finfo(torch.float32).eps


def test_fake_tensors_have_no_numbers_to_look_at() -> None:
    """DTensors run operations on them to learn shapes."""
    formats = Formats()
    with FakeTensorMode():
        x = torch.empty(4, dtype=torch.float32)
        formats.observe(torch.ops.aten.add.Tensor, (x, x), x + x, "a", is_update=False)
    assert formats.narrowest == {}
