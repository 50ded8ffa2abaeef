"""Sums of gradients over micro-batches and ranks: the choice of a reducer, and its calls in a step."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from mlm.parallel.compute_state import DeferredWeightGrads
from mlm.parallel.expert.router import Router
from mlm.parallel.gradients import GradientReducer, Reducer, ReducerGroup, ReduceWhen
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mlm.parallel.mesh import Axis
from mlm.parallel.pipeline.engine import ChunkGradients
from mlm.parallel.sharding import parameters_by_axis


class FusedAccumulation:
    """The linear layers of a model chunk, whose weight gradients join the sums inside their own products.

    A product that writes a gradient and a pass that adds it to the sum move 16 bytes a weight and micro-batch
    and hold a second matrix; a product that adds moves 8. The first micro-batch has no sum to join where
    gradients begin as None.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = [m for m in modules if isinstance(m, ColumnParallelLinear | RowParallelLinear)]

    def start(self) -> None:
        """Let the next forward pass's gradients join the sums that exist."""
        for layer in self.layers:
            layer.compute.fused_grad = layer.weight.grad

    def stop(self) -> None:
        """Let them go through autograd, and hold no sum."""
        for layer in self.layers:
            layer.compute.fused_grad = None


@contextmanager
def fuse_embedding_grad(tables: Iterable[VocabParallelEmbedding]) -> Iterator[None]:
    """In the block, let the loss add the gradients of these tables in its forward passes.

    Kept until the backward pass, each would be a matrix for each micro-batch in flight; so it is none.
    For cleared gradients, and passes that are each followed by one backward pass from a seed of 1. A
    reduction may start in a chunk's last backward pass: all its forward passes are over then, and autograd
    calls the hooks of a weight for which a backward pass returns nothing.
    """
    tables = list(tables)
    for table in tables:
        table.fuses_grad = True
    try:
        yield
    finally:
        for table in tables:
            table.fuses_grad = False


class ReducedGradients(ChunkGradients):
    """Gradients of a chunk that are summed over micro-batches, and over dp in the last one.

    Args:
        reducer: sums them over dp.
        fused: linear layers that add their weight gradients inside their products; None for none.
        deferred: where weight gradients go that a zero-bubble schedule computes later.
        defers_weight_grads: True for such a schedule.
    """

    def __init__(
        self,
        reducer: Reducer,
        fused: FusedAccumulation | None,
        deferred: DeferredWeightGrads,
        *,
        defers_weight_grads: bool,
    ) -> None:
        super().__init__(deferred)
        self.reducer, self.fused, self.defers_weight_grads = reducer, fused, defers_weight_grads

    def before_forward(self, *, is_last: bool) -> None:
        """Choose if weight gradients join the sums inside their products."""
        if self.fused is None:
            return
        if is_last and self.defers_weight_grads:  # a reduction waits for what autograd adds
            self.fused.stop()
        else:
            self.fused.start()

    def before_backward(self, *, is_last: bool) -> None:
        """Reduce in the last one."""
        self.reducer.sync = is_last

    def before_weights(self, *, is_last: bool) -> None:
        """Reduce in the last ones."""
        self.reducer.sync_late = is_last

    def after_weights(self) -> None:
        """Take them in."""
        self.reducer.settle()

    def finish(self) -> None:
        """Reduce what is not yet reduced, and wait for it."""
        if self.fused is not None:
            self.fused.stop()
        self.reducer.finish()


def build_reducer(
    model: nn.Module,
    dp: Axis,
    *,
    zero: int,
    compute_dtype: torch.dtype,
    units: Iterable[nn.Module] = (),
    methods: Sequence[str] = (),
    reduce: ReduceWhen = "last",
    late_weights: bool = False,
    keep_buffers: bool = False,
    fuse_accumulation: bool = False,
    replicated: Sequence[nn.Parameter] = (),
) -> Reducer:
    """Make a model's gradients sum over dp; with zero=2|3 its parameters are sharded over dp from here on.

    Call when the parameters have their initial values, before `parameter_shards`.

    Args:
        model: the model; its parameters may be replaced by shards.
        dp: data-parallel axis.
        zero: 0 keeps all on each rank, 2 and 3 shard it. No effect on an axis of one rank.
        compute_dtype: dtype of activations; what gathered weights are cast to if it is half precision.
        units: submodules to gather on their own, in the order they run.
        methods: names of methods other than `forward` that compute with the parameters.
        reduce: micro-batches of a step that reduce gradients sharded over dp (ParallelConfig.zero_reduce).
        late_weights: True if weight gradients arrive outside backward passes, before a call of `settle`.
        keep_buffers: keep gradients of one rank in buffers, too: those that backward returns are overwritten.
        fuse_accumulation: weight gradients of linear layers are added inside their products.
        replicated: the trained parameters of a model whose others are frozen: zero=2|3 leaves them whole.
    """
    weights = [m.weight for m in model.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]

    def whole(parameters: list[nn.Parameter], axis: Axis) -> Reducer:
        # what graphs return is theirs, so that writing it takes a copy, and a call of ours for each parameter
        return GradientReducer(
            parameters,
            axis,
            late=weights if late_weights else (),
            keep_buffers=keep_buffers,
            joined=parameters if keep_buffers else weights if fuse_accumulation else [],
        )

    if zero == 0 or dp.group is None:
        return _grouped([whole(some, axis) for axis, some in parameters_by_axis(model, dp).items()])
    unsharded = _left_whole(model, dp, replicated)
    from mlm.parallel.sharded import ShardedReducer  # loads FSDP: 0.5 s in every rank's start

    sharded = ShardedReducer(
        model,
        dp,
        zero=zero,
        compute_dtype=compute_dtype,
        units=units,
        methods=methods,
        reduce=reduce,
        late_weights=late_weights,
        whole={p for _, some in unsharded for p in some},
    )
    return _grouped([sharded, *(whole(some, axis) for axis, some in unsharded if some)])


def _left_whole(
    model: nn.Module, dp: Axis, replicated: Sequence[nn.Parameter]
) -> list[tuple[Axis, list[nn.Parameter]]]:
    """Parameters that zero=2|3 leaves whole: of routers, `replicated` ones and those of one rank alone."""
    routers = (p for m in model.modules() if isinstance(m, Router) for p in m.parameters())
    kept = {*routers, *replicated}
    return [
        (axis, [p for p in some if p in kept or axis.group is None])
        for axis, some in parameters_by_axis(model, dp).items()
    ]


def _grouped(reducers: Sequence[Reducer]) -> Reducer:
    return reducers[0] if len(reducers) == 1 else ReducerGroup(reducers)
