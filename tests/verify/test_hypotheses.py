"""Each hypothesis about wrong numbers, on tensors made by hand, and on numbers that none explains."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mlm.verify.audit.compare import Comparison
from mlm.verify.audit.diagnose import Finding, diagnose
from mlm.verify.audit.formats import Formats
from mlm.verify.audit.hypotheses import LossRows
from mlm.verify.audit.record import Key, Record

TP = {"pp": 1, "dp": 1, "cp": 1, "tp": 2}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def finding(kind: str, wrong: list[Tensor], right: Tensor, **more: Tensor) -> Finding | None:
    """Of a step of a split matrix w and a copied vector b, whose tensor of a kind is wrong on two ranks."""
    start = {"w": draw(6, 4), "b": draw(4, seed=1)}
    grads = {"w": draw(6, 4, seed=2), "b": draw(4, seed=3)}
    ends = {name: x + 0.01 * draw(*x.shape, seed=4) for name, x in start.items()} | more
    norm = torch.tensor(math.sqrt(sum(float(g.square().sum()) for g in grads.values())), dtype=torch.float64)
    whole = Record({Key(0, "initial", name): x for name, x in start.items()})
    whole.tensors |= {Key(0, "gradient", name): x for name, x in grads.items()} | {
        Key(0, "norm", "norm"): norm
    }
    whole.tensors |= {Key(0, "weight", name): x for name, x in ends.items()}
    ranks = {}
    for rank in range(2):
        tensors = {k: x.chunk(2)[rank] if k.name == "w" else x for k, x in whole.tensors.items()}
        name = {"norm": "norm", "weight": "b"}[kind]
        tensors[Key(0, kind, name)] = wrong[rank]
        ranks[0, 0, 0, rank] = Record(tensors, {"w": None, "b": None})
    whole.tensors[Key(0, kind, name)] = right if kind == "weight" else norm
    return diagnose(Comparison(whole, ranks, TP))


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
    w, b = draw(6, 4, seed=2).square(), draw(4, seed=3).square().sum()
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
        (lambda start, end: end + 0.01 * draw(4, seed=9), "update depends on the layout"),
    ],
)
def test_update_gets_the_cause_whose_formula_gives_its_weights(formula, cause: str) -> None:  # type: ignore[no-untyped-def]
    start = draw(4, seed=1)
    end = start + 0.01 * draw(4, seed=4)
    found = finding("weight", [formula(start, end)] * 2, end)
    assert found is not None
    assert found.cause == cause


def test_rows_of_a_smoothed_loss_with_z_loss_are_read_from_its_gradient() -> None:
    logits, labels = draw(5, 8).requires_grad_(), torch.tensor([0, 3, 7, 7, 2])
    weights = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4], dtype=torch.float64)
    log_sum = logits.logsumexp(-1)
    label = logits.gather(-1, labels[:, None])[:, 0]
    (weights * (log_sum - 0.9 * label - 0.1 * logits.mean(-1) + 0.01 * log_sum.square())).sum().backward()
    assert logits.grad is not None
    rows = LossRows.fit(logits.detach().softmax(-1), logits.grad)
    assert rows is not None
    torch.testing.assert_close(rows.w, 0.9 * weights)
    torch.testing.assert_close(rows.s, -0.1 / 8 * weights)
    torch.testing.assert_close(rows.a, weights * (1 + 0.02 * log_sum.detach()))
    assert rows.label[rows.counts].tolist() == [0, 3, 7, 2]


def test_a_gradient_of_another_loss_has_no_rows() -> None:
    assert LossRows.fit(draw(5, 8).softmax(-1), draw(5, 8, seed=1)) is None


def test_counts_are_not_moved_and_what_is_rounded_is_by_a_unit() -> None:
    formats, counts, x = Formats(seed=1), torch.ones(3) * 5, draw(100).float()
    add, before = torch.ops.aten.add.Tensor, x.clone()
    formats.see(add, (counts, counts), counts, "a", is_update=False)
    assert formats.narrowest == {}
    formats.see(add, (x, x), x, "b", is_update=False)
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
        formats.see(torch.ops.aten.add.Tensor, (x, x), x + x, "a", is_update=False)
    assert formats.narrowest == {}
