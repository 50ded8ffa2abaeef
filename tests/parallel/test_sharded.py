"""Parameters cut over dp by FSDP2 against one process that keeps them whole, in float64."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mlm.checkpoint.save_load import load_checkpoint, save_checkpoint
from mlm.config.schema import ModelConfig, OptimizerConfig
from mlm.models.gpt2 import GPT2
from mlm.models.init import init_parameters
from mlm.models.stage import Stage
from mlm.optim.adamw import MOMENTS, build_optimizer, ensure_state, moment
from mlm.optim.clip import gradient_norm
from mlm.parallel.collectives import all_reduce
from mlm.parallel.gradients import Reducer
from mlm.parallel.linear import Postponed
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharded import build_reducer
from mlm.parallel.sharding import ParameterShard, parameter_shards
from mlm.parallel.watch import Watch
from mlm.train.state import is_stored, parameter_name, training_shards
from tests.ranks import run_on_ranks

VOCAB, SEQ, BATCH, LAYERS = 61, 5, 2, 2
MODEL = ModelConfig(
    num_layers=LAYERS,
    hidden_size=12,
    num_heads=2,
    max_positions=SEQ,  # over dp=4 its rows are 2, 2, 1 and none
    vocab_size=VOCAB,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
SCALE = torch.tensor(0.1, dtype=torch.float64)
MICRO_BATCHES = 3
EXACT = {"rtol": 0.0, "atol": 1e-10}


class Rank:
    """A model with its reducer, shards and optimizer, as a trainer has them."""

    def __init__(
        self,
        ctx: ParallelContext,
        zero: int = 0,
        *,
        dtype: torch.dtype = torch.float64,
        master: torch.dtype = torch.float64,
        recompute: str = "none",
        stage: Stage | None = None,
    ) -> None:
        self.ctx = ctx
        self.model = GPT2(MODEL, tp=ctx.tp, dtype=dtype, recompute=recompute, stage=stage).to(master)
        init_parameters(self.model, 7, ctx.tp)
        self.reducer: Reducer = build_reducer(
            self.model,
            ctx.dp,
            zero=zero,
            compute_dtype=dtype,
            units=self.model.layers.values(),
            methods=("losses", "last_logits"),
        )
        self.shards = tuple(parameter_shards(self.model, ctx.tp))
        self.optimizer = build_optimizer(self.shards, OptimizerConfig(lr=1e-2))
        ensure_state(self.optimizer, self.shards)

    def loss(self, sample: Tensor) -> Tensor:
        out: Tensor = self.model(sample[:, :-1], sample[:, 1:], SCALE)
        return out

    def accumulate(self, samples: Sequence[Tensor]) -> float:
        """Gradients of the sum of the losses of this rank's micro-batches, summed over dp; their loss."""
        total = 0.0
        self.reducer.start_step()
        for i, sample in enumerate(samples):
            self.reducer.sync = i == len(samples) - 1
            loss = self.loss(sample)
            loss.backward()
            total += loss.item()
        self.reducer.finish()
        return total


def samples_of(step: int, dp_rank: int) -> Tensor:
    """Token ids [micro-batch, B, S + 1] of a data-parallel rank."""
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    return torch.randint(0, VOCAB, (MICRO_BATCHES, BATCH, SEQ + 1), generator=generator)


def all_samples(ctx: ParallelContext, step: int) -> list[Tensor]:
    return [x for rank in range(ctx.dp.size) for x in samples_of(step, rank)]


def wholes(one: Rank, of: str) -> dict[str, Tensor]:
    """Whole weights ("data") or gradients ("grad") of an uncut model."""
    return {s.name: s.without_padding(getattr(s.parameter, of)) for s in one.shards}


def rectangle(shard: ParameterShard, whole: Tensor) -> Tensor:
    """The elements of `whole` that a rank holds."""
    size = shard.without_padding(shard.parameter).shape
    return whole[tuple(slice(o, o + n) for o, n in zip(shard.offset, size, strict=True))]


def assert_gradients_equal(mine: Rank, one: Rank) -> None:
    expected = wholes(one, "grad")
    for s in mine.shards:
        assert s.parameter.grad is not None, s.name
        torch.testing.assert_close(
            s.without_padding(s.parameter.grad), rectangle(s, expected[s.name]), msg=s.name, **EXACT
        )


LAYOUTS = [(1, 2, 2), (1, 2, 3), (2, 2, 2), (2, 2, 3), (1, 4, 2), (1, 4, 3)]


@pytest.mark.parametrize(("tp", "dp", "zero"), LAYOUTS)
def test_steps_equal_those_of_one_process(tp: int, dp: int, zero: int) -> None:
    """Losses, gradients and their norm over three steps of three micro-batches."""
    run_on_ranks(check_steps, zero, tp=tp, dp=dp)


def check_steps(ctx: ParallelContext, zero: int, recompute: str = "none") -> None:
    one, mine = Rank(ParallelContext()), Rank(ctx, zero, recompute=recompute)
    for step in range(3):
        expected_loss = one.accumulate(all_samples(ctx, step))
        loss = mine.accumulate(list(samples_of(step, ctx.dp.rank)))
        total = all_reduce(torch.tensor(loss, dtype=torch.float64), ctx.dp)
        torch.testing.assert_close(total.item(), expected_loss, **EXACT)
        assert_gradients_equal(mine, one)
        norm = gradient_norm(mine.shards, ctx)
        torch.testing.assert_close(norm, gradient_norm(one.shards, one.ctx), **EXACT)
        one.optimizer.step()
        mine.optimizer.step()
        evaluated = mine.model.losses(*tokens_and_labels(ctx))  # gathers the new weights, not the old ones
        torch.testing.assert_close(evaluated, one.model.losses(*tokens_and_labels(ctx)), **EXACT)


def tokens_and_labels(ctx: ParallelContext) -> tuple[Tensor, Tensor]:
    sample = samples_of(0, ctx.dp.rank)[0]
    return sample[:, :-1], sample[:, 1:]


@pytest.mark.parametrize("zero", [2, 3])
def test_recomputed_layers_give_the_same_gradients(zero: int) -> None:
    run_on_ranks(check_steps, zero, "full", dp=2)


@pytest.mark.parametrize("zero", [2, 3])
def test_weights_loaded_after_an_evaluation_are_trained_from(zero: int) -> None:
    """Weights that an evaluation gathered are out of date once others are loaded."""
    run_on_ranks(check_reload, zero, dp=2)


def check_reload(ctx: ParallelContext, zero: int) -> None:
    one, mine = Rank(ParallelContext()), Rank(ctx, zero)
    mine.model.losses(*tokens_and_labels(ctx))
    with torch.no_grad():
        for rank in (one, mine):
            for s in rank.shards:
                s.parameter.mul_(0.5)
    one.accumulate(all_samples(ctx, 0))
    mine.accumulate(list(samples_of(0, ctx.dp.rank)))
    assert_gradients_equal(mine, one)


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("late_weights", [False, True])
def test_passes_of_a_pipeline_equal_one_process(zero: int, late_weights: bool) -> None:
    """Several forwards before the first backward, begun at a place in the graph; with `late_weights` the
    gradients of weights come when all backward passes are over, and no pass reduces."""
    run_on_ranks(check_pipeline, zero, late_weights, dp=2)


def check_pipeline(ctx: ParallelContext, zero: int, late_weights: bool) -> None:
    one, mine = Rank(ParallelContext()), Rank(ctx, zero)
    postponed = postpone_weights(mine.model) if late_weights else Postponed()
    for step in range(2):
        one.accumulate(all_samples(ctx, step))
        mine.reducer.start_step()
        edges = [get_gradient_edge(mine.loss(x)) for x in samples_of(step, ctx.dp.rank)]
        for i, edge in enumerate(edges):
            mine.reducer.sync = i == len(edges) - 1 and not late_weights
            torch.autograd.backward(edge, torch.ones_like(SCALE))
        jobs = postponed.take()
        assert bool(jobs) == late_weights
        for job in jobs:
            job()
            mine.reducer.settle()
        mine.reducer.finish()
        assert_gradients_equal(mine, one)
        one.optimizer.step()
        mine.optimizer.step()


@pytest.mark.parametrize("zero", [2, 3])
def test_chunks_of_a_pipeline_equal_one_process(zero: int) -> None:
    """The first, one of layers alone and the last: each is cut on its own, the middle one has no rest."""
    run_on_ranks(check_chunks, zero, dp=2)


def check_chunks(ctx: ParallelContext, zero: int) -> None:
    one = Rank(ParallelContext())
    stages = [Stage(range(1), True, False), Stage(range(1, 2), False, False), Stage(range(2, 2), False, True)]
    chunks = [Rank(ctx, zero, stage=stage) for stage in stages]
    one.accumulate(all_samples(ctx, 0))
    for chunk in chunks:
        chunk.reducer.start_step()
    samples = samples_of(0, ctx.dp.rank)
    passes = [forward_through(chunks, sample) for sample in samples]  # all forwards before any backward
    for i, kept in enumerate(passes):
        dy = torch.ones_like(SCALE)
        for chunk, (x, edge) in zip(chunks[::-1], kept[::-1], strict=True):
            chunk.reducer.sync = i == len(samples) - 1
            torch.autograd.backward(edge, dy)
            if x is not None:
                assert x.grad is not None
                dy = x.grad
    for chunk in chunks:
        chunk.reducer.finish()
    (embedding,) = (s.parameter.grad for s in chunks[0].shards if s.name == "token.weight")
    for s in chunks[-1].shards:
        if s.name == "token.weight":  # summed over the stages: the trainer's part
            embedding += s.parameter.grad
            s.parameter.grad = embedding
    for chunk in chunks:
        assert_gradients_equal(chunk, one)


def forward_through(chunks: list[Rank], sample: Tensor) -> list[tuple[Tensor | None, Any]]:
    """Each chunk's input and the place of its output in the graph."""
    kept: list[tuple[Tensor | None, Any]] = []
    x = None
    for chunk in chunks:
        y = chunk.model(sample[:, :-1], sample[:, 1:], SCALE, None, x)
        kept.append((x, get_gradient_edge(y)))
        x = y.detach().requires_grad_()
    return kept


class Counting(Watch):
    """Counts the collectives of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"all_gather": 0, "reduce_scatter": 0}

    @contextmanager
    def waiting(self, op: str, axis: str, ranks: tuple[int, ...]) -> Iterator[None]:
        self.seen[op] += 1
        yield


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_are_reduced_in_the_last_micro_batch_only(zero: int) -> None:
    run_on_ranks(check_reductions, zero, dp=2)


def check_reductions(ctx: ParallelContext, zero: int) -> None:
    seen, mine = counted(ctx, zero)
    mine.reducer.start_step()
    for sample in samples_of(0, ctx.dp.rank)[1:]:
        mine.loss(sample).backward()
    assert seen["reduce_scatter"] == 0
    mine.reducer.sync = True
    mine.loss(samples_of(0, ctx.dp.rank)[0]).backward()
    assert seen["reduce_scatter"] == LAYERS + 1  # under way before finish() is called
    mine.reducer.finish()
    assert seen["reduce_scatter"] == LAYERS + 1


def counted(ctx: ParallelContext, zero: int) -> tuple[dict[str, int], Rank]:
    watch = Counting()
    return watch.seen, Rank(replace(ctx, dp=replace(ctx.dp, watch=watch)), zero)


@pytest.mark.parametrize(("zero", "per_step"), [(2, LAYERS + 1), (3, MICRO_BATCHES * (2 * LAYERS + 1))])
def test_weights_are_gathered_once_per_step_or_pass(zero: int, per_step: int) -> None:
    """zero=2: once per step. zero=3: forward and backward of each micro-batch, the root's once for both."""
    assert run_on_ranks(gathers_of_two_steps, zero, dp=2) == [2 * per_step] * 2


def gathers_of_two_steps(ctx: ParallelContext, zero: int) -> int:
    seen, mine = counted(ctx, zero)
    for step in range(2):
        mine.accumulate(list(samples_of(step, ctx.dp.rank)))
    return seen["all_gather"]


@pytest.mark.parametrize(("zero", "parts"), [(0, 1), (2, 4), (3, 4)])
def test_optimizer_state_is_cut_over_dp(zero: int, parts: int) -> None:
    """Bytes of the moments: all of them on each rank, or together once."""
    sizes = run_on_ranks(state_bytes, zero, dp=4)
    whole = run_on_ranks(state_bytes, 0)[0]
    assert sum(sizes) * parts == whole * 4
    assert max(sizes) <= whole / parts * 1.05  # uneven rows


def state_bytes(ctx: ParallelContext, zero: int) -> int:
    mine = Rank(ctx, zero)
    mine.accumulate(list(samples_of(0, ctx.dp.rank)))
    mine.optimizer.step()
    moments = [moment(mine.optimizer, s, name) for s in mine.shards for name in MOMENTS]
    return sum(x.untyped_storage().nbytes() for x in moments)


def test_a_rank_of_one_is_not_cut() -> None:
    mine = Rank(ParallelContext(), zero=3)
    assert all(s.dp_slice is None for s in mine.shards)


@pytest.mark.parametrize("zero", [2, 3])
def test_bfloat16_gradients_are_added_up_in_float32(zero: int) -> None:
    """Five equal micro-batches give exactly five times the gradient: bfloat16 cannot hold that sum."""
    run_on_ranks(check_accumulation, zero, dp=2)


def check_accumulation(ctx: ParallelContext, zero: int) -> None:
    mine = Rank(ctx, zero, dtype=torch.bfloat16, master=torch.float32)
    sample = samples_of(0, ctx.dp.rank)[0]
    mine.accumulate([sample])
    once = [s.parameter.grad.clone() for s in mine.shards if s.parameter.grad is not None]
    mine.accumulate([sample] * 5)
    for s, grad in zip(mine.shards, once, strict=True):
        assert s.parameter.grad is not None
        assert s.parameter.grad.dtype == s.parameter.dtype == torch.float32
        assert torch.equal(s.parameter.grad, 5 * grad), s.name


@pytest.mark.parametrize("zero", [2, 3])
def test_late_bfloat16_weight_gradients_are_added_up_in_float32(zero: int) -> None:
    """The same where they come after the backward passes and are settled one micro-batch at a time."""
    run_on_ranks(check_late_accumulation, zero, dp=2)


def check_late_accumulation(ctx: ParallelContext, zero: int) -> None:
    mine = Rank(ctx, zero, dtype=torch.bfloat16, master=torch.float32)
    postponed = postpone_weights(mine.model)
    sample = samples_of(0, ctx.dp.rank)[0]
    sums = []
    for count in (1, 5):
        mine.reducer.start_step()
        jobs = []
        for _ in range(count):
            mine.loss(sample).backward()
            jobs.append(postponed.take())
        for late in jobs:
            for job in late:
                job()
            mine.reducer.settle()
        mine.reducer.finish()
        sums.append([s.parameter.grad for s in mine.shards])
    for s, once, five_times in zip(mine.shards, *sums, strict=True):
        assert torch.equal(five_times, 5 * once), s.name


def postpone_weights(model: GPT2) -> Postponed:
    """Let backward passes of the model leave their weight gradients in what is returned."""
    postponed = Postponed()
    postponed.open = True
    for module in model.modules():
        if hasattr(module, "postponed"):
            module.postponed = postponed
    return postponed


@pytest.mark.parametrize("zero", [2, 3])
def test_bfloat16_gradients_are_near_those_of_replicated_weights(zero: int) -> None:
    run_on_ranks(check_half, zero, dp=2)


def check_half(ctx: ParallelContext, zero: int) -> None:
    """Within a few roundings of bfloat16 (2^-8) of each parameter's largest gradient."""
    half = {"dtype": torch.bfloat16, "master": torch.float32}
    replicated, mine = Rank(ctx, 0, **half), Rank(ctx, zero, **half)
    for rank in (replicated, mine):
        rank.accumulate(list(samples_of(0, ctx.dp.rank)))
    expected = wholes(replicated, "grad")
    for s in mine.shards:
        assert s.parameter.grad is not None
        error = s.without_padding(s.parameter.grad) - rectangle(s, expected[s.name])
        assert not error.numel() or error.abs().max() <= 2**-6 * expected[s.name].abs().max(), s.name


def test_a_checkpoint_moves_between_sharded_and_tensor_parallel_layouts(tmp_path: Path) -> None:
    """zero=3 dp=4 -> zero=0 tp=2 dp=2 -> zero=2 tp=2 dp=2 -> one process, moments included, bit for bit."""
    run_on_ranks(train_and_save, tmp_path / "a", dp=4)
    run_on_ranks(load_and_save, tmp_path / "a", tmp_path / "b", 0, tp=2, dp=2)
    run_on_ranks(load_and_save, tmp_path / "b", tmp_path / "c", 2, tp=2, dp=2)
    first, last = (run_on_ranks(load_whole_state, tmp_path / name)[0] for name in ("a", "c"))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert all(x.any() for x in first.values())


def train_and_save(ctx: ParallelContext, path: Path) -> None:
    mine = Rank(ctx, 3, master=torch.float32, dtype=torch.float32)
    for step in range(2):
        mine.accumulate(list(samples_of(step, ctx.dp.rank)))
        mine.optimizer.step()
    save(mine, path)


def save(mine: Rank, path: Path) -> None:
    stored = {s.name for s in mine.shards if is_stored(s, mine.ctx)}
    mine_only = {k: v for k, v in training_shards(state_of(mine)).items() if parameter_name(k) in stored}
    save_checkpoint(path, 1, mine_only, state={}, keep_last=1, keep_every=0, **place(mine.ctx))


def state_of(mine: Rank) -> Any:
    return SimpleNamespace(shards=mine.shards, optimizer=mine.optimizer)


def place(ctx: ParallelContext) -> dict[str, Any]:
    return {"rank": ctx.rank, "world_size": ctx.world_size, "group": ctx.host_group}


def load_and_save(ctx: ParallelContext, old: Path, new: Path, zero: int) -> None:
    mine = Rank(ctx, zero, master=torch.float32, dtype=torch.float32)
    load_checkpoint(old / "step-00000001", training_shards(state_of(mine)), **place(ctx))
    save(mine, new)


def load_whole_state(ctx: ParallelContext, path: Path) -> dict[str, Tensor]:
    one = Rank(ctx, master=torch.float32, dtype=torch.float32)
    shards = training_shards(state_of(one))
    load_checkpoint(path / "step-00000001", shards, **place(ctx))
    return {name: shard.tensor.clone() for name, shard in shards.items()}
