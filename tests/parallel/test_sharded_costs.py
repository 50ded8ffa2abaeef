"""Costs of sharded data parallelism: collectives, bytes and dtypes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.optim.adamw import MOMENTS, moment
from mlm.parallel import sharded
from mlm.parallel.compute_state import DeferredWeightGrads
from mlm.parallel.config import ZeroReduce
from mlm.parallel.gradients import Reducer
from mlm.parallel.mesh import ParallelContext, build_mesh
from mlm.parallel.watch import LostPeer
from tests.parallel.sharded_rank import LAYERS, MICRO_BATCHES, MODEL, Rank, defer_weight_grads, samples_of
from tests.ranks import on_ranks, run_on_ranks

EVEN = replace(MODEL, hidden_size=64, vocab_size=64, max_positions=8)


@contextmanager
def collectives() -> Iterator[dict[str, list[torch.dtype]]]:
    """Those over dp that have begun so far: what they carried."""
    seen: dict[str, list[torch.dtype]] = {"start_all_gather": [], "start_reduce_scatter": []}
    originals = {name: getattr(sharded, name) for name in seen}

    def note(name: str, x: Tensor, *args: Any) -> Any:
        seen[name].append(x.dtype)
        return originals[name](x, *args)

    with pytest.MonkeyPatch.context() as patch:
        for name in seen:
            patch.setattr(sharded, name, partial(note, name))
        yield seen


@pytest.mark.parametrize("zero", [2, 3])
@on_ranks(dp=2)
def test_gradients_of_the_last_samples_are_under_way_before_finish(ctx: ParallelContext, zero: int) -> None:
    mine, (last, *others) = Rank(ctx, zero), samples_of(0, ctx.dp.rank)
    with collectives() as seen:
        mine.reducer.start_step()
        for sample in others:
            mine.loss(sample).backward()
        assert seen["start_reduce_scatter"] == []
        mine.reducer.sync = True
        mine.loss(last).backward()
        assert len(seen["start_reduce_scatter"]) == LAYERS + 1
        mine.reducer.finish()


@pytest.mark.parametrize(("zero", "reduce"), [(2, "every"), (3, "last")])
def test_messages_of_two_steps(zero: int, reduce: ZeroReduce) -> None:
    """Weights are gathered once per step (zero=2), or forward and backward of each micro-batch, the root's
    once for both (zero=3); gradients are scattered once per step, or every micro-batch on request."""
    gathers = LAYERS + 1 if zero == 2 else MICRO_BATCHES * (2 * LAYERS + 1)
    scatters = (MICRO_BATCHES if reduce == "every" else 1) * (LAYERS + 1)
    assert run_on_ranks(messages_of_two_steps, zero, reduce, dp=2) == [(2 * gathers, 2 * scatters)] * 2


def messages_of_two_steps(ctx: ParallelContext, zero: int, reduce: ZeroReduce) -> tuple[int, int]:
    mine = Rank(ctx, zero, reduce=reduce)
    with collectives() as seen:
        for step in range(2):
            mine.accumulate(list(samples_of(step, ctx.dp.rank)))
    return len(seen["start_all_gather"]), len(seen["start_reduce_scatter"])


@pytest.mark.parametrize(
    ("reduce", "parts", "late_weights"), [("last", 1, True), ("every", 4, False), ("every", 4, True)]
)
def test_gradients_between_micro_batches_take_the_whole_or_its_share(
    reduce: ZeroReduce, parts: int, late_weights: bool
) -> None:
    """Bytes of gradients that a rank holds, of a model whose rows four ranks share evenly."""
    for whole, kept in run_on_ranks(bytes_between_micro_batches, reduce, late_weights, dp=4):
        assert [round(whole / each, 2) for each in kept] == [parts, parts]


def bytes_between_micro_batches(
    ctx: ParallelContext, reduce: ZeroReduce, late_weights: bool
) -> tuple[int, list[int]]:
    """Bytes of the whole gradient, and of what the rank holds after the first two micro-batches."""
    mine = Rank(
        ctx,
        2,
        master=torch.float32,
        dtype=torch.float32,
        reduce=reduce,
        late_weights=late_weights,
        model=EVEN,
    )
    deferred = defer_weight_grads(mine.model) if late_weights else DeferredWeightGrads()
    samples = list(samples_of(0, ctx.dp.rank))
    mine.accumulate(samples)
    mine.reducer.start_step()
    kept = []
    for sample in samples[:2]:
        mine.reducer.sync = False
        mine.loss(sample).backward()
        for job in deferred.take():
            job()
        if late_weights:
            mine.reducer.settle()
        kept.append(gradient_bytes(mine.reducer))
    mine.reducer.finish()
    parts = [shard.part_shape for shard in mine.shards]
    return sum(math.prod(shape) for shape in parts) * 4, kept


def gradient_bytes(reducer: Reducer) -> int:
    """Bytes of gradients that a rank holds, wherever FSDP2 keeps them: also what a reduction has read."""
    held: dict[int, int] = {}
    for unit in (*reducer.units, reducer.root):
        state = unit._get_fsdp_state()
        for group in state._fsdp_param_groups:
            for p in group.fsdp_params:
                rows = p.sharded_param.grad
                grads = [None if rows is None else rows.to_local(), p.unsharded_accumulated_grad]
                grads += [p.unsharded_param.grad] if hasattr(p, "_unsharded_param") else []
                grads += [read.reduce_scatter_input for read in group.comm_ctx.reduce_scatter_states]
                for grad in filter(torch.is_tensor, grads):
                    held[grad.untyped_storage().data_ptr()] = grad.untyped_storage().nbytes()
    return sum(held.values())


def test_weights_are_gathered_while_the_layer_before_computes() -> None:
    for events in run_on_ranks(events_of_a_step, 3, dp=2):
        forward = events[: events.index("compute 1") + 1]
        # the rest of the model, layer 0 before the embedding, layer 1 before layer 0
        assert forward == ["gather", "gather", "gather", "compute 0", "compute 1"]


def events_of_a_step(ctx: ParallelContext, zero: int) -> list[str]:
    """Gathers as they begin, and forward passes of layers."""
    mine, events = Rank(ctx, zero), list[str]()
    gather = sharded.start_all_gather

    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append("gather")
        return gather(*args, **kwargs)

    for name, layer in mine.model.layers.items():
        layer.attention_norm.register_forward_pre_hook(lambda *_, name=name: events.append(f"compute {name}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "start_all_gather", noted)
        mine.accumulate(list(samples_of(0, ctx.dp.rank)))
    return events


@pytest.mark.parametrize("missing", ["all_gather", "reduce_scatter"])
@on_ranks(dp=2)
def test_a_rank_that_does_not_come_is_named(ctx: ParallelContext, missing: str) -> None:
    """Rank 1 leaves before the first gather, or between forward and backward."""
    impatient = build_mesh(tp=1, pp=1, dp=2, device=ctx.device, timeout_s=1.0)
    mine = Rank(impatient, 2)
    mine.reducer.start_step()
    mine.reducer.sync = True
    if ctx.rank == 1 and missing == "all_gather":
        return
    expected = pytest.raises(LostPeer, match=rf"rank 0: {missing} over dp \(ranks 0, 1\)")
    with expected if ctx.rank == 0 else nullcontext():
        loss = mine.loss(samples_of(0, 0)[0])
        if ctx.rank == 0:
            loss.backward()


def test_optimizer_state_is_cut_over_dp() -> None:
    """Bytes of the moments: of all ranks together those of one process."""
    sizes = run_on_ranks(state_bytes, 2, dp=4)
    whole = state_bytes(ParallelContext(), 0)
    assert sum(sizes) == whole
    assert max(sizes) <= whole / 4 * 1.05  # uneven rows


def state_bytes(ctx: ParallelContext, zero: int) -> int:
    mine = Rank(ctx, zero)
    mine.accumulate(list(samples_of(0, ctx.dp.rank)))
    mine.optimizer.step()
    moments = [moment(mine.optimizer, s, name) for s in mine.shards for name in MOMENTS]
    return sum(x.untyped_storage().nbytes() for x in moments)


@pytest.mark.parametrize(("zero", "is_late"), [(3, False), (2, True)])
@on_ranks(dp=2)
def test_bfloat16_weights_travel_and_gradients_are_added_up_in_float32(
    ctx: ParallelContext, zero: int, is_late: bool
) -> None:
    """Five equal micro-batches give exactly five times the gradient: bfloat16 cannot hold that sum.

    Or where gradients come after the backward passes and are settled one micro-batch at a time.
    """
    mine = Rank(ctx, zero, dtype=torch.bfloat16, master=torch.float32)
    deferred = defer_weight_grads(mine.model) if is_late else DeferredWeightGrads()
    sample = samples_of(0, ctx.dp.rank)[0]
    sums = []
    with collectives() as seen:
        for count in (1, 5):
            mine.reducer.start_step()
            jobs = []
            for i in range(count):
                mine.reducer.sync = i == count - 1 and not is_late
                mine.loss(sample).backward()
                jobs.append(deferred.take())
            for late in jobs if is_late else ():
                for job in late:
                    job()
                mine.reducer.settle()
            mine.reducer.finish()
            sums.append([s.parameter.grad for s in mine.shards])
    assert set(seen["start_all_gather"]) == {torch.bfloat16}
    assert set(seen["start_reduce_scatter"]) == {torch.float32}
    for s, once, five_times in zip(mine.shards, *sums, strict=True):
        assert five_times.dtype == s.parameter.dtype == torch.float32
        assert torch.equal(five_times, 5 * once), s.name
