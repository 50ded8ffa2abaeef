"""A layout against one process: the same few steps on both, every loss, gradient and weight compared.

Rank 0 runs the whole model a second time, alone, on the same micro-batches. After each backward pass it
broadcasts the gradients, one whole parameter at a time, and each rank compares its own region. Dropout
masks are functions of their place, so one process can draw exactly those of t tensor-parallel ranks.

The layout is run by the same `Trainer` as training: what is compared is what trains.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from mlm.checkpoint.native.save_load import resolve
from mlm.data.sampler import Dataset, Loader, MicroBatch
from mlm.optim.precision import parameter_dtype
from mlm.parallel.collectives import all_gather, all_reduce, broadcast
from mlm.parallel.config import ParallelConfig
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis, ParallelContext, shape_context
from mlm.parallel.sharding import ParameterShard, parameter_shards
from mlm.training.config import PretrainConfig
from mlm.training.corpora import train_dataset
from mlm.training.pipelined import PipelinedModel
from mlm.training.state import is_stored, load_weights
from mlm.training.trainer import Trainer
from mlm.verify.config import ParityConfig, comparable

ROUNDING = 1e-6
"""Float64: where the two gradients of an element differ by more than this share of it (plus Adam's eps), it
holds little but rounding. Keys' biases are such: softmax cancels them, so their true gradient is zero. Adam
divides a gradient by its own size, which makes whole steps of rounding: these weights are not compared, their
gradients are. The bound on weights in narrower formats allows for such steps."""

Value = Callable[[Trainer, ParameterShard], Tensor]
"""The compared value of a parameter: a tensor laid out like this rank's shard."""


@dataclass(frozen=True)
class Pair:
    """A number as one process and as the layout have it."""

    one_process: float
    layout: float

    @property
    def difference(self) -> float:
        """|layout - one process|; NaN where either is."""
        return abs(self.layout - self.one_process)


@dataclass(frozen=True)
class Difference:
    """Difference of a parameter's gradient or weight between the layout and one process."""

    name: str
    replicated: bool
    """True if every tensor-parallel rank holds all of it."""
    largest: float
    """Largest magnitude of an element on one process."""
    difference: float
    """Largest difference of an element, over all ranks and replicas. Infinite where one side is not finite,
    or where the ranks together do not hold each element exactly once."""
    factor: float
    """The layout's is this many times that of one process, by least squares."""
    cosine: float
    """1 where the two have the same direction."""
    norm: float = 0.0
    """Length of the vector of all elements on one process."""
    distance: float = 0.0
    """Length of the vector of all differences, replicas counted once."""


@dataclass(frozen=True)
class StepReport:
    """One step on both sides."""

    step: int
    loss: Pair
    """Mean loss per token of the global batch, in nats."""
    grad_norm: Pair
    """Global gradient norm before clipping."""
    lr: float
    gradients: tuple[Difference, ...]
    """Of every parameter, in the order of the model."""
    weights: tuple[Difference, ...] = ()
    """Of every parameter, after the update."""


@dataclass(frozen=True)
class Report:
    """All that was compared; the same on every rank."""

    steps: tuple[StepReport, ...]
    weights: tuple[Difference, ...]
    """After the last step."""
    replicated: int
    """Parameters that several ranks hold copies of."""
    torn: tuple[str, ...]
    """Those of them whose copies are not equal bit for bit after the last step."""
    by_gradient: int = 0
    """Elements whose gradient is rounding, so that it is compared and the weight is not."""


def compare(config: ParityConfig, ctx: ParallelContext, on_step: Callable[[], None] = lambda: None) -> Report:
    """Run `config.steps` steps on the layout and, on rank 0, on one process. Collective over all ranks.

    `on_step` is called after each. Raises UserError for what the user can fix.
    """
    config = comparable(config)
    layout: Trainer[MicroBatch] = Trainer(config, ctx)
    alone = one_process(config, ctx) if ctx.is_main else None
    if config.ckpt is not None:
        load_weights(tuple(layout.shards), resolve(config.ckpt), ctx)
        if alone is not None:
            load_weights(tuple(alone.shards), resolve(config.ckpt), alone.ctx)
    comparison = Comparison(layout, alone)
    samples = train_dataset(config, config.steps * config.train.global_batch_size)
    steps = []
    with _batches(layout, samples) as own, _batches(alone, samples) as whole:
        for _, batches, all_batches in zip(range(config.steps), own, whole, strict=False):
            steps.append(_step(comparison, batches, all_batches))
            on_step()
    replicated, torn = comparison.torn_replicas()
    return Report(tuple(steps), steps[-1].weights, replicated, torn, comparison.count_rounding())


def one_process(config: ParityConfig, ctx: ParallelContext) -> Trainer:
    """The whole run on this rank alone, with the attention masks that the layout's kernels draw."""
    alone: Trainer[MicroBatch] = Trainer(config.on_one_process(), replace(shape_context(), device=ctx.device))
    alone.split_parts = tuple(range(ctx.tp.size))
    return alone


def _batches(trainer: Trainer | None, samples: Dataset) -> AbstractContextManager[Iterator[list[MicroBatch]]]:
    """This rank's micro-batches of each step, for the trainer's layout; nothing, for ever, without one."""
    if trainer is None:
        return nullcontext(repeat([]))
    config, ctx = trainer.config, trainer.ctx
    return Loader(
        samples,
        consumed_samples=0,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        rank=ctx.dp.rank,
        size=ctx.dp.size,
        ramp=config.train.ramp_batch,
    )


def _step(
    comparison: "Comparison", batches: Sequence[MicroBatch], all_batches: Sequence[MicroBatch]
) -> StepReport:
    """One step on both sides, over this rank's micro-batches and over all of them."""
    layout, alone = comparison.layout, comparison.alone
    parts = layout.compute_gradients(batches)
    expected_parts = None if alone is None else alone.compute_gradients(all_batches)
    gradients = comparison.differences(_gradient, note_rounding=True)
    outcome = layout.clip_and_update(parts)
    numbers = [layout.mean_loss(outcome), float(outcome.grad_norm.item())]
    expected = [0.0, 0.0]
    if alone is not None:
        assert expected_parts is not None
        expected_outcome = alone.clip_and_update(expected_parts)
        expected = [alone.mean_loss(expected_outcome), float(expected_outcome.grad_norm.item())]
    expected = broadcast(torch.tensor(expected, dtype=torch.float64), comparison.everyone, 0).tolist()
    loss_pair, norm_pair = map(Pair, expected, numbers)
    weights = comparison.differences(lambda _, shard: shard.parameter.detach(), skip_rounding=True)
    return StepReport(layout.step, loss_pair, norm_pair, outcome.lr, gradients, weights)


def _gradient(trainer: Trainer, shard: ParameterShard) -> Tensor:
    """Gradient of the loss itself, without the loss scale of half precision."""
    grad = shard.parameter.grad
    return torch.zeros_like(shard.parameter) if grad is None else grad / trainer.scaler.scale


class Comparison:
    """Compares what the layout's ranks hold with what rank 0 holds alone. Every method is collective."""

    def __init__(self, layout: Trainer, alone: Trainer | None) -> None:
        self.layout, self.alone = layout, alone
        self.everyone = layout.ctx.world
        self.whole = whole_parameters(layout.config)
        self.shared = shared_over_tp(layout.config, layout.ctx.tp.size)
        self.held: dict[str, list[ParameterShard]] = {name: [] for name in self.whole}
        for shard in layout.shards:
            self.held[shard.name].append(shard)
        self.alone_held = {} if alone is None else {shard.name: shard for shard in alone.shards}
        self.is_exact = parameter_dtype(layout.config.precision) == torch.float64
        self.rounding: dict[ParameterShard, Tensor] = {}
        """Mask of the true elements of a part whose gradient held rounding, see ROUNDING."""

    def differences(
        self, value: Value, *, note_rounding: bool = False, skip_rounding: bool = False
    ) -> tuple[Difference, ...]:
        """Return how far each parameter's `value` is from that on one process; the same on every rank.

        `note_rounding` remembers elements that hold rounding, `skip_rounding` leaves them out of the result.
        """
        maxima = torch.zeros(len(self.whole), 2, dtype=torch.float64)
        sums = torch.zeros(len(self.whole), 5, dtype=torch.float64)
        for row, (name, shards) in enumerate(self.held.items()):
            expected = self._expected(name, value)
            maxima[row, 0] = expected.abs().amax()
            for shard in shards:
                mine = shard.without_padding(value(self.layout, shard)).double().cpu()
                part = _slice_of(expected, shard, mine.shape).double()
                if mine.numel() == 0:
                    continue
                off = (mine - part).abs().nan_to_num(nan=torch.inf)  # a maximum over ranks drops NaN
                if note_rounding and self.is_exact:
                    self._note_rounding(shard, off, part)
                if skip_rounding and shard in self.rounding:
                    off = off.masked_fill(self.rounding[shard] & off.isfinite(), 0)
                maxima[row, 1] = maxima[row, 1].maximum(off.amax())
                if is_stored(shard, self.layout.ctx):
                    x, y, z = mine.flatten(), part.flatten(), off.flatten()
                    sums[row] += torch.stack([torch.tensor(float(x.numel())), x @ y, x @ x, y @ y, z @ z])
        all_reduce(maxima, self.everyone, dist.ReduceOp.MAX)
        all_reduce(sums, self.everyone)
        rows = zip(self.whole.values(), maxima.tolist(), sums.tolist(), strict=True)
        return tuple(_difference(*row, shared=row[0].name in self.shared) for row in rows)

    def _note_rounding(self, shard: ParameterShard, off: Tensor, expected: Tensor) -> None:
        holds = off > ROUNDING * (expected.abs() + self.layout.config.optimizer.eps)
        before = self.rounding.get(shard)
        self.rounding[shard] = holds if before is None else before | holds

    def count_rounding(self) -> int:
        """Elements of the whole model that hold rounding; the same on every rank."""
        counts = [int(m.sum()) for shard, m in self.rounding.items() if is_stored(shard, self.layout.ctx)]
        return int(all_reduce(torch.tensor(sum(counts)), self.everyone).item())

    def _expected(self, name: str, value: Value) -> Tensor:
        """The whole parameter's value on one process, on every rank's host."""
        if self.alone is None:
            dtype = parameter_dtype(self.layout.config.precision)
            expected = torch.empty(self.whole[name].global_shape, dtype=dtype)
        else:
            shard = self.alone_held[name]
            expected = shard.without_padding(value(self.alone, shard)).cpu().contiguous()
        return broadcast(expected, self.everyone, 0)

    def torn_replicas(self) -> tuple[int, tuple[str, ...]]:
        """Return the number of replicated parameters, and the names of those with unequal copies."""
        ctx, names = self.layout.ctx, list(self.whole)
        replica_axes = dict.fromkeys(s.replica_axis(ctx.replicas) for s in self.layout.shards)
        flags = torch.zeros(2, len(names))  # copied, torn
        axes: list[tuple[Axis, Callable[[ParameterShard], int]]] = [
            *((axis, partial(_copies_over, axis, ctx.replicas)) for axis in replica_axes),
            (ctx.tp, lambda shard: ctx.tp.size if shard.tp_dim is None else shard.replicas),
            (ctx.tied, lambda shard: ctx.tied.size if is_tied_table(shard, self.layout.config) else 1),
        ]
        for axis, copies in axes:
            for shard in self.layout.shards:
                if copies(shard) == 1:
                    continue
                row = names.index(shard.name)
                flags[0, row] = 1
                flags[1, row] += not _is_equal_over(axis, shard.parameter.detach(), copies(shard))
        all_reduce(flags, self.everyone, dist.ReduceOp.MAX)
        copied, torn = flags.bool().tolist()
        return sum(copied), tuple(name for name, differs in zip(names, torn, strict=True) if differs)


def whole_parameters(config: PretrainConfig) -> dict[str, ParameterShard]:
    """Every parameter of the unsplit model in its order, by name; shapes only."""
    ctx = replace(shape_context(), device=torch.device("meta"))
    model = PipelinedModel(config.model, ParallelConfig(), config.precision, ctx)
    return {s.name: s for chunk in model.chunks for s in parameter_shards(chunk, ctx.tp)}


def _slice_of(whole: Tensor, shard: ParameterShard, shape: Sequence[int]) -> Tensor:
    """The slice of a whole tensor that a rank's shard covers."""
    return whole[tuple(slice(o, o + n) for o, n in zip(shard.offset, shape, strict=True))]


def shared_over_tp(config: PretrainConfig, tp: int) -> set[str]:
    """Names of the parameters of which several of `tp` ranks hold the same part."""
    ctx = replace(shape_context(tp=tp), device=torch.device("meta"))
    model = PipelinedModel(config.model, ParallelConfig(tp=tp), config.precision, ctx)
    shards = (shard for chunk in model.chunks for shard in parameter_shards(chunk, ctx.tp))
    return {shard.name for shard in shards if shard.tp_dim is None or shard.replicas > 1}


def _copies_over(axis: Axis, replicas: Axis, shard: ParameterShard) -> int:
    """Number of ranks of the axis that hold the same part."""
    is_copied = shard.dp_slice is None and shard.replica_axis(replicas) == axis
    return axis.size if is_copied else 1


def _difference(whole: ParameterShard, maxima: list[float], sums: list[float], *, shared: bool) -> Difference:
    (largest, difference), (count, product, square, expected, off) = maxima, sums
    size = math.prod(whole.global_shape)
    lengths = (square * expected) ** 0.5
    return Difference(
        name=whole.name,
        replicated=shared,
        largest=largest,
        difference=difference if count == size else torch.inf,
        factor=product / expected if expected else torch.nan,
        cosine=product / lengths if lengths else torch.nan,
        norm=expected**0.5,
        distance=off**0.5,
    )


def is_tied_table(shard: ParameterShard, config: PretrainConfig) -> bool:
    """True for the token table of a model whose output layer it is too."""
    return config.model.is_tied and isinstance(shard.module, VocabParallelEmbedding)


def _is_equal_over(axis: Axis, x: Tensor, copies: int) -> bool:
    """True if this rank's copy has the bits of the first of the `copies` neighbouring ranks that hold it."""
    mine = x.contiguous().view(torch.uint8)
    first = all_gather(mine, axis)[axis.rank // copies * copies]
    return torch.equal(first, mine)
