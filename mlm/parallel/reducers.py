"""The reducer of a model's gradients: whole, or sharded where zero=2|3."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from mlm.parallel.expert.router import Router
from mlm.parallel.gradients import GradientReducer, Reducer, ReducerGroup, ReduceWhen
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import parameters_by_axis


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
    unsharded = _unsharded(model, dp, replicated)
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


def _unsharded(
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
