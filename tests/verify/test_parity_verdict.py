"""Verdicts on recorded numbers: of a model of four parameters on two tensor-parallel ranks."""

import hashlib
from collections.abc import Callable
from math import inf, nan

import pytest
import torch
from torch import Tensor

from mlm.parallel.mesh import shape_context
from mlm.runs.corpora import train_dataset
from mlm.training.trainer import Trainer
from mlm.verify.audit.record import AXES, Key, Record
from mlm.verify.parity import Report, judge, record_step
from mlm.verify.verdict import TOLERANCES, Verdict
from tests.verify.parity_layouts import Layout

NAMES = ("token.weight", "layers.0.attention_norm.bias", "layers.0.mlp.up.weight", "final_norm.bias")
LR = 0.1

Change = Callable[[Tensor], Tensor]


def recorded(step: int, rank: int | None, precision: str, **changed: Change) -> Record:
    """What a step computes: of the whole, or of one of two ranks; what changes is named by a beginning."""
    record = Record(precision=precision)
    values = {("loss", "loss"): torch.tensor(4.0).double(), ("norm", "norm"): torch.tensor(1.0).double()}
    for n, name in enumerate(NAMES):
        numbers = torch.rand(8, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        numbers[::4] = 1.0
        values["gradient", name], values["weight", name] = numbers, numbers + step
        record.offsets[name] = (4 * (rank or 0) if name.endswith("weight") else 0,)
    for (kind, name), whole in values.items():
        part = whole if rank is None or not name.endswith("weight") else whole.chunk(2)[rank]
        for word, change in changed.items():
            if (kind if word in ("loss", "norm") else f"{kind}_{name}".replace(".", "_")).startswith(word):
                part = change(part)
        record.tensors[Key(step, kind, name)] = part.clone()
    return record


def report_of(
    *steps: tuple[Record, list[Record]], lr: float = LR, axis: str = "tp", is_exact: bool = False
) -> Report:
    """The report on steps of one process and of both ranks of an axis."""
    report = Report({name: 1 + (name == axis) for name in AXES}, eps=1e-8, is_exact=is_exact)
    for reference, records in steps:
        ranks = {tuple(n * (name == axis) for name in AXES): record for n, record in enumerate(records)}
        report.add(reference, ranks, lr)
    return report


def judged(*steps: dict[str, Change], precision: str = "fp64", lr: float = LR, both: bool = False) -> Verdict:
    """The verdict on steps of which the layout, or `both` sides, have changed numbers."""
    records = [
        (
            recorded(step, None, precision, **changed if both else {}),
            [recorded(step, rank, precision, **changed) for rank in range(2)],
        )
        for step, changed in enumerate(steps)
    ]
    return judge(report_of(*records, lr=lr))


def add(by: float, at: int = 0) -> Change:
    """Add to one element."""
    return lambda x: x.index_add(0, torch.tensor([at]), x.new_tensor([by])) if x.ndim else x + by


def fill(value: float) -> Change:
    return lambda x: torch.full_like(x, value)


UP = "gradient_layers_0_mlp_up"


def test_equal_numbers_are_equal() -> None:
    verdict = judged({}, {})
    assert (verdict.word, verdict.hint) == ("EQUAL", "")
    assert verdict.sentence.endswith("2 parameters held in copies, all bit-equal")


@pytest.mark.parametrize("what", ["loss", "norm", "gradient_final_norm", "weight_token"])
def test_with_exact_the_last_bit_counts(what: str) -> None:
    """Of a run with exact=N, whose digest is that of names and bits; of others it is rounding."""

    def judged(*, is_exact: bool, **changed: Change) -> Verdict:
        ranks = [recorded(0, rank, "fp32", **changed) for rank in range(2)]
        return judge(report_of((recorded(0, None, "fp32"), ranks), is_exact=is_exact))

    def next_number(x: Tensor) -> Tensor:
        return x.nextafter(torch.full_like(x, inf))

    assert judged(is_exact=False, **{what: next_number}).word == "EQUAL"
    equal, changed = judged(is_exact=True), judged(is_exact=True, **{what: next_number})
    assert equal.word == "EQUAL bit for bit"
    digest = hashlib.sha256()
    for key, x in recorded(0, None, "fp32").tensors.items():
        digest.update(f"{key.kind} {key.name}\n".encode() + x.numpy().tobytes())
    assert equal.sentence == f"10 tensors of 1 steps, sha256:{digest.hexdigest()}"
    assert changed.word == "DIFFERENT"
    assert changed.sentence.startswith("the first bits that differ are of the ")


@pytest.mark.parametrize("what", ["loss", "norm"])
@pytest.mark.parametrize("precision", TOLERANCES)
def test_loss_and_norm_are_judged_by_the_tolerance_of_the_precision(precision: str, what: str) -> None:
    allowed = getattr(TOLERANCES[precision], what)
    assert judged({what: add(0.9 * allowed)}, precision=precision).equal
    assert not judged({what: add(1.1 * allowed)}, precision=precision).equal


@pytest.mark.parametrize("factor", [1.001, 2.0])
def test_a_loss_that_both_replicas_have_wrong_is_a_difference(factor: float) -> None:
    """Their mean and their sum are not tried: the loss of every rank is the global batch's."""
    ranks = [recorded(0, None, "fp64", loss=lambda x: factor * x) for _ in range(2)]
    report = report_of((recorded(0, None, "fp64"), ranks), axis="dp")
    assert judge(report).hint.startswith("forward pass")


@pytest.mark.parametrize("precision", TOLERANCES)
def test_a_gradient_is_judged_more_strictly_before_weights_have_moved(precision: str) -> None:
    first, later = TOLERANCES[precision].gradient, TOLERANCES[precision].later
    assert judged({UP: add(0.9 * first)}, {UP: add(0.9 * later)}, precision=precision).equal
    assert not judged({UP: add(1.1 * first)}, {}, precision=precision).equal
    assert not judged({}, {UP: add(1.1 * later)}, precision=precision).equal


@pytest.mark.parametrize("what", ["loss", "norm", UP, "weight_token"])
def test_what_is_not_a_number_on_the_layout_is_never_equal(what: str) -> None:
    assert judged({what: add(nan)}).word == judged({what: add(inf)}).word == "DIFFERENT"


def test_what_is_not_a_number_on_either_side_decides_nothing() -> None:
    verdict = judged({}, {"loss": fill(inf), "gradient": fill(nan), "norm": fill(nan)}, both=True)
    assert verdict.word == "UNDECIDED"
    assert verdict.sentence.startswith("the loss in step 2 is not finite on one process either")


@pytest.mark.parametrize(("precision", "is_recorded"), [("fp64", True), ("fp32", True), ("bf16", False)])
def test_loads_of_experts_are_compared_where_rounding_moves_no_token(
    precision: str, is_recorded: bool
) -> None:
    config = Layout(precision=precision, moe="sigmoid", layers=2).config(steps=1)
    trainer: Trainer = Trainer(config, shape_context())
    with trainer.batches(train_dataset(config, config.train.global_batch_size)) as steps:
        record, _ = record_step(trainer, next(steps), precision)
    loads = [key for key in record.tensors if key.name.endswith((".router.bias", ".router.load"))]
    assert bool(loads) == is_recorded


def test_the_first_difference_on_the_way_back_is_named() -> None:
    verdict = judged({}, {"gradient_token": add(0.5, 1), "gradient_layers_0_attention": add(0.25, 1)})
    assert verdict.sentence == (
        "first at layers.0.attention_norm.bias (reduced gradient, step 2, off by 0.25 of its largest "
        "element); 1 more tensors of that step differ"
    )
    assert "layers.0.mlp.up.weight is right and all before it are wrong" in verdict.hint


def test_weights_are_judged_in_units_of_the_learning_rate() -> None:
    """Two steps of 0.1."""
    assert judged({}, {"weight_token": add(0.2 * 0.9e-5)}).equal
    assert (
        "(updated weight, step 2, off by 1.5 of what it moved)"
        in judged({}, {"weight_token": add(0.3)}).sentence
    )


def test_the_suspect_is_named() -> None:
    """As tests/verify/test_patterns.py and test_hypotheses.py name causes."""
    assert judged({"gradient": lambda x: 2 * x}).hint.startswith("unscaled mean: it is 2 times")
    assert judged({"loss": add(1.0)}).hint.startswith("forward pass: it is 5 in place of 4")
    assert judged({UP: add(1.0, 1)}).hint.startswith(
        "backward pass: final_norm.bias is right and some before"
    )


def test_an_update_that_differs_is_told_from_samples_that_differ() -> None:
    """Both show in the loss of the next step; weights are compared before."""
    verdict = judged({"weight_token": add(0.15)}, {"loss": add(0.1)})
    assert "token.weight (updated weight, step 1" in verdict.sentence
    assert verdict.hint.startswith("update depends on the layout: the gradients are right")
    assert judged({}, {"loss": add(0.1)}).hint.endswith("which samples each replica reads")


def test_unequal_copies_are_a_difference() -> None:
    """By one bit, on one rank."""
    ranks = [recorded(0, 0, "fp64"), recorded(0, 1, "fp64", weight=add(2.0**-52))]
    report = report_of((recorded(0, None, "fp64"), ranks))
    assert report.torn == ("layers.0.attention_norm.bias", "final_norm.bias")
    verdict = judge(report)
    assert verdict.sentence.startswith("the copies of layers.0.attention_norm.bias on several ranks")
    assert verdict.sentence.endswith("nor those of 1 more")


OVERFLOW = {"norm": fill(inf), UP: add(inf)}


def test_an_overflow_is_a_difference_unless_both_sides_skip_the_step() -> None:
    assert judged({}, OVERFLOW, precision="fp16", both=True).word == "UNDECIDED"
    assert judged(OVERFLOW, precision="fp16").word == "DIFFERENT"


def test_a_vanishing_gradient_is_measured_against_the_largest_of_the_model() -> None:
    """A difference of 1e-16 in a gradient that is itself 1e-16 is no difference of 100 %."""
    ranks = [recorded(0, rank, "fp64", **{UP: fill(2e-16)}) for rank in range(2)]
    report = report_of((recorded(0, None, "fp64", **{UP: fill(1e-16)}), ranks))
    found = {each.name: each.relative for each in report.of("gradient", 1)}
    assert found["layers.0.mlp.up.weight"] == pytest.approx(1e-13)


def test_weights_that_no_learning_rate_moves_are_equal_or_not() -> None:
    assert "weights to the last bit, as every learning rate is 0" in judged({}, lr=0.0).sentence
    assert judged({"weight_token": add(1e-9)}, lr=0.0).word == "DIFFERENT"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16], ids=str)
def test_narrow_formats_that_numpy_lacks_travel_exactly(dtype: torch.dtype) -> None:
    key, x = Key(0, "output", "a"), torch.tensor([1.5, -448.0, 0.0]).to(dtype)
    (found,) = Record.of_bytes(Record({key: x}).to_bytes()).tensors.values()
    assert torch.equal(found, x.float())
