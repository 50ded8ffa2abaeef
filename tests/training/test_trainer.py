"""Training steps across layouts, precisions and restarts."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlm.data.config import DataConfig
from mlm.data.sampler import Batch, Loader, SyntheticDataset
from mlm.optim.adamw import MOMENTS, moment
from mlm.optim.clip import gradient_norm
from mlm.optim.config import OptimizerConfig, PrecisionConfig, ScheduleConfig
from mlm.parallel.config import IGNORE_INDEX, ParallelConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.training.trainer import StopAgreed, StopVote, Trainer
from tests.models.tiny import tiny
from tests.ranks import on_ranks, run_on_ranks

VOCAB, SEQ = 61, 16


def config(
    *, dropout: float = 0.0, dtype: str = "fp64", recompute: str = "none", **train: int
) -> PretrainConfig:
    """A tiny run in float64: 8 samples a step in micro-batches of 2."""
    return PretrainConfig(
        name="test",
        out="unused",
        seed=3,
        model=tiny(max_positions=SEQ, vocab_size=VOCAB, hidden_dropout=dropout, attention_dropout=dropout),
        parallel=ParallelConfig(recompute=recompute),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=1e-2),
        schedule=ScheduleConfig(warmup_steps=5, min_lr=1e-4),
        precision=PrecisionConfig(dtype=dtype, initial_loss_scale=2.0**16, loss_scale_window=3),  # type: ignore[arg-type]
        data=DataConfig(kind="synthetic", seq_length=SEQ),
        train=TrainConfig(**{"steps": 20, "global_batch_size": 8, "micro_batch_size": 2, **train}),
    )


def steps_of(trainer: Trainer, count: int) -> list[float]:
    spec, ctx = trainer.config, trainer.ctx
    samples = SyntheticDataset(VOCAB, SEQ, spec.train.steps * spec.train.global_batch_size, spec.seed)
    with Loader(
        samples,
        consumed_samples=trainer.consumed_samples,
        global_batch_size=spec.train.global_batch_size,
        micro_batch_size=spec.train.micro_batch_size,
        rank=ctx.dp.rank,
        size=ctx.dp.size,
    ) as loader:
        return [trainer.mean_loss(trainer.train_step(next(loader))) for _ in range(count)]


def train(ctx: ParallelContext, spec: PretrainConfig, count: int = 20) -> list[float]:
    return steps_of(Trainer(spec, ctx), count)


def test_weights_cast_once_a_step_give_the_same_bits() -> None:
    layouts: list[dict[str, int]] = [{}, {"pp": 2}]
    for layout in layouts:
        once, each = (run_on_ranks(train_cast, cast, **layout)[-1] for cast in ("step", "use"))
        assert once == each


def train_cast(ctx: ParallelContext, cast: str) -> tuple[list[float], list[float]]:
    """Losses of bfloat16 steps, four micro-batches each, and of a validation."""
    spec = config(dtype="bf16", dropout=0.1)
    spec = replace(spec, precision=replace(spec.precision, cast=cast))  # type: ignore[arg-type]
    trainer: Trainer[Batch] = Trainer(spec, ctx)
    assert bool(trainer.model.casts.reads) == (cast == "step")
    losses = steps_of(trainer, 3)
    assert all(
        layer.compute.weight_copy is None for layer, *_ in trainer.model.casts.reads
    )  # weights may change again
    tokens = torch.arange(4 * SEQ).view(4, SEQ) % VOCAB
    return losses, trainer.validate([Batch(tokens, tokens, 0)])


@pytest.mark.slow
def test_half_precision_learns_what_float32_does() -> None:
    """20 steps on the same eight samples: a fall of a nat, and the narrow formats within 0.05 of float32."""
    fp32, *others = (run_on_ranks(overfit, dtype)[0] for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8"))
    assert fp32 < math.log(VOCAB) - 0.9
    assert others == pytest.approx([fp32] * 4, abs=0.05)


def overfit(ctx: ParallelContext, dtype: str) -> float:
    trainer = Trainer(config(dtype=dtype), ctx)
    loss = math.inf
    for _ in range(20):
        trainer.consumed_samples = 0  # the same eight samples again
        loss = steps_of(trainer, 1)[0]
    return loss


def test_an_overflow_skips_the_step_on_all_ranks_and_halves_the_scale() -> None:
    """One tp rank's weight is made to overflow for one step: nobody moves, then training continues."""
    for before, during, after, skipped, scales, moved in run_on_ranks(overflow_once, tp=2):
        assert before == during  # weights untouched by the skipped step
        assert after != during
        assert skipped == 1
        assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**16]  # doubled after three clean steps
        assert moved == 4.0  # Adam's own count leaves the skipped step out


def overflow_once(ctx: ParallelContext) -> tuple[Any, ...]:
    trainer = Trainer(config(dtype="fp16"), ctx)
    steps_of(trainer, 1)
    weight = trainer.model.chunks[0].position.weight
    before, scales = float(weight.double().sum()), [trainer.scaler.scale.item()]
    shard = trainer.model.chunks[0].layers["0"].mlp.up.weight
    kept = shard.detach().clone()
    if ctx.tp.rank == 1:
        shard.data.fill_(1e5)  # beyond float16
    steps_of(trainer, 1)
    scales.append(trainer.scaler.scale.item())
    during = float(weight.double().sum())
    shard.data.copy_(kept)
    for _ in range(3):
        steps_of(trainer, 1)
        scales.append(trainer.scaler.scale.item())
    after = float(weight.double().sum())
    applied = float(next(iter(trainer.optimizer.state.values()))["step"])
    return before, during, after, int(trainer.scaler.skipped), scales, applied


def test_each_step_uses_the_learning_rate_of_its_own_number() -> None:
    """Adam's first step moves a bias by the learning rate, whose warm-up takes five steps."""
    trainer = Trainer(config(), shape_context())
    bias = trainer.model.chunks[0].layers["0"].mlp.up.bias
    before = bias.detach().clone()
    steps_of(trainer, 1)
    assert (bias.detach() - before).abs().max().item() == pytest.approx(1e-2 / 5, rel=1e-3)
    for step in (2, 3):
        steps_of(trainer, 1)
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        assert rates == pytest.approx([1e-2 * step / 5] * len(rates))


def test_a_step_with_nothing_to_score_has_no_loss_and_no_gradient() -> None:
    trainer = Trainer(config(), shape_context())
    tokens = torch.zeros(2, SEQ, dtype=torch.int64)
    parts = trainer.compute_gradients([Batch(tokens, torch.full_like(tokens, IGNORE_INDEX), 0)])
    assert parts.tolist() == [0.0]
    assert gradient_norm(trainer.shards, trainer.ctx).item() == 0.0


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_gradients_and_moments_in_float16_are_those_without_the_loss_scale(clip: float) -> None:
    """Adam's steps alone would not show it: they do not depend on the size of the gradient."""
    found = []
    for dtype in ("fp32", "fp16"):
        spec = config(dtype=dtype)
        trainer = Trainer(
            replace(spec, optimizer=replace(spec.optimizer, clip_grad_norm=clip)), shape_context()
        )
        steps_of(trainer, 1)
        # gradients as the optimizer read them, and its first and second moments
        values = [[shard.parameter.grad for shard in trainer.shards]]
        values += [[moment(trainer.optimizer, s, name) for s in trainer.shards] for name in MOMENTS]
        found.append([torch.cat([x.flatten() for x in tensors]) for tensors in values])
    for exact, half in zip(*found, strict=True):
        assert (half @ exact / (exact @ exact)).item() == pytest.approx(1, rel=5e-3)


@on_ranks(dp=2)
def test_a_stop_asked_of_one_rank_is_heard_by_all(ctx: ParallelContext) -> None:
    vote = StopVote(Trainer(config(), ctx), lambda: 15 * ctx.rank)
    vote.before_update()
    assert vote.result() == 15


def test_all_ranks_leave_a_validation_after_the_same_batch() -> None:
    """Rank 1 is asked to stop while it computes batch 1; the vote that hears it travels with batch 2."""
    assert run_on_ranks(batches_until_stop, dp=2) == [[0, 1, 2], [0, 1, 2]]


def batches_until_stop(ctx: ParallelContext) -> list[int]:
    seen: list[int] = []
    vote = StopVote(Trainer(config(), ctx), lambda: 15 * (ctx.rank == 1 and 1 in seen))
    with suppress(StopAgreed):
        for number in vote.polled(range(9)):
            seen.append(number)
    return seen
