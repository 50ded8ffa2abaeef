"""Every layout equals one process in half precision too, to what rounding explains; slips of a dtype show."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mlm.models.norms import LayerNorm, RMSNorm
from mlm.optim.precision import DTYPES
from mlm.parallel.sharded import _Collective
from mlm.training.observer import StepOutcome
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.slow import slow, slow_but
from tests.verify.half_precision import (
    AXES,
    FAMILIES,
    ROUNDOFF,
    STEPS,
    compare_half,
    draw,
    groups,
    is_compatible,
    layout_of,
    problems,
    rounding_of,
)
from tests.verify.parity_layouts import Layout

PAIRS = draw(2, 40, most_ranks=4)
"""Every two values of AXES that can meet do."""


@pytest.mark.parametrize("layout", slow_but({6, 9, 27}, map(layout_of, PAIRS)), ids=str)
def test_layout_equals_one_process_of_its_precision(layout: Layout) -> None:
    for half in run_on_ranks(compare_half, layout, **layout.sizes):
        assert list(problems(half, layout)) == []


def half_of(trainer: Trainer) -> torch.dtype:
    return DTYPES[trainer.config.precision.dtype]


def rounded(x: Tensor, trainer: Trainer) -> Tensor:
    return x.to(half_of(trainer)).to(x.dtype)


def gradients_reduced_in_half(trainer: Trainer) -> None:
    for reducer in trainer.reducers:
        for bucket in reducer.buckets:
            reduce = bucket.reduce

            def in_half(bucket: Any = bucket, reduce: Any = reduce) -> None:
                bucket.flat.copy_(rounded(bucket.flat, trainer))
                reduce()

            bucket.reduce = in_half


class ReduceScatterInHalf(_Collective):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        held = output_tensor.to(torch.bfloat16)
        super().__call__(held, input_tensor.to(torch.bfloat16), *args, **kwargs)
        output_tensor.copy_(held)


def sharded_gradients_reduced_in_half(trainer: Trainer) -> None:
    for reducer in trainer.reducers:
        for unit in (*reducer.units, reducer.root):
            unit.set_custom_reduce_scatter(ReduceScatterInHalf(trainer.ctx.replicas))


def sums_over_micro_batches_in_half(trainer: Trainer) -> None:
    def round_sum(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.copy_(rounded(parameter.grad, trainer))

    for shard in trainer.shards:
        shard.parameter.register_post_accumulate_grad_hook(round_sum)


def norms_in_half(trainer: Trainer) -> None:
    """The weights that norms read, which the optimizer keeps in float32."""
    for module in trainer.model.chunks[0].modules():
        if isinstance(module, RMSNorm):
            module.forward = lambda x, m=module: rms_norm(x, rounded(m.weight, trainer), m.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


def statistics_in_half(trainer: Trainer) -> None:
    """Means and variances of layer norms."""
    for module in trainer.model.chunks[0].modules():
        if isinstance(module, LayerNorm):
            module.forward = lambda x, m=module: layer_norm(x, m.weight.to(x), m.bias.to(x), m.eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias


def loss_scale_forgotten(trainer: Trainer) -> None:
    trainer.scaler.scale.fill_(1.0)


def loss_scale_not_applied(trainer: Trainer) -> None:
    forward_backward = trainer.forward_backward

    def without(batches: Any, objective: Any = None) -> Tensor:
        with patch.object(trainer.scaler, "scale", torch.ones(())):
            return forward_backward(batches)

    trainer.forward_backward = without


def after_update(trainer: Trainer, change: Callable[[], None]) -> None:
    update = trainer.clip_and_update

    def changed(parts: Tensor) -> StepOutcome:
        outcome = update(parts)
        with torch.no_grad():
            change()
        return outcome

    trainer.clip_and_update = changed


def master_weights_in_half(trainer: Trainer) -> None:
    def change() -> None:
        for shard in trainer.shards:
            shard.parameter.copy_(rounded(shard.parameter, trainer))

    after_update(trainer, change)


def moments_in_half(trainer: Trainer) -> None:
    def change() -> None:
        for state in trainer.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(rounded(state[name], trainer))

    after_update(trainer, change)


def residual_in_bfloat16(trainer: Trainer) -> None:
    """In a run in float16."""
    for layer in trainer.model.chunks[0].layers.values():
        layer.register_forward_hook(lambda m, _, y: y.to(torch.bfloat16).to(y.dtype))


@dataclass(frozen=True)
class Slip:
    """A dtype that is not the one it should be, on the layout alone."""

    plant: Callable[[Trainer], None]
    layout: Layout
    found: str
    """In the problems."""


SLIPS = (
    Slip(gradients_reduced_in_half, Layout(dp=2, precision="bf16"), "gradient 1 of"),
    Slip(sharded_gradients_reduced_in_half, Layout(dp=2, zero=2, precision="bf16"), "gradient in half"),
    Slip(sums_over_micro_batches_in_half, Layout(pp=2, precision="bf16"), "gradient 1 of"),
    Slip(norms_in_half, Layout(dp=2, llama="llama", precision="bf16"), "gradient 2 of"),
    Slip(statistics_in_half, Layout(dp=2, precision="bf16"), "gradient 1 of"),
    Slip(loss_scale_forgotten, Layout(tp=2, precision="fp16", micro_batches=4), "gradient 1 of"),
    Slip(loss_scale_not_applied, Layout(dp=2, zero=2, precision="fp16"), "gradient 1 of"),
    Slip(master_weights_in_half, Layout(dp=2, zero=3, llama="llama", precision="bf16"), "weight in half"),
    Slip(moments_in_half, Layout(pp=2, precision="bf16", micro_batches=4), "weight of"),
    Slip(residual_in_bfloat16, Layout(tp=2, precision="fp16", micro_batches=4), "gradient 1 of"),
)


@pytest.mark.parametrize("slip", slow_but({1, 2, 4, 5, 6, 7, 9}, SLIPS), ids=lambda slip: slip.plant.__name__)
def test_slip_of_a_dtype_is_found(slip: Slip) -> None:
    half = run_on_ranks(compare_half, slip.layout, slip.plant, **slip.layout.sizes)[0]
    assert any(slip.found in problem for problem in problems(half, slip.layout))


def test_layouts_meet_every_pair() -> None:
    possible = (dict(zip(AXES, values, strict=True)) for values in product(*AXES.values()))
    wanted = set().union(*(groups(a, 2) for a in possible if is_compatible(a, 4)))
    met = set().union(*(groups(a, 2) for a in PAIRS))
    assert wanted - met == set()


@pytest.mark.parametrize(
    ("family", "precision"), [("gpt2", "bf16"), ("llama", "fp16"), slow(("bert", "bf16"))]
)
def test_one_process_is_float64_to_rounding(family: str, precision: str) -> None:
    """A pass rounds some 20 results a layer, there and back: at random sqrt(20 L / 3) u."""
    layout = Layout(precision=precision, micro_batches=4, **FAMILIES[family])
    limit = math.sqrt(20 * layout.layers / 3) * ROUNDOFF[precision]
    for step in range(1, STEPS + 1):
        gradients = rounding_of(layout).of("gradient", step)
        assert math.hypot(*(x.distance for x in gradients)) <= limit * math.hypot(
            *(x.norm for x in gradients)
        )
