"""Choice of a reducer: replicated gradients, or shards."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from mlm.parallel.gradients import GradientReducer, Reducer, ReduceWhen
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm.parallel.mesh import Axis


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
    """
    if zero == 0 or dp.group is None:
        linear = (m for m in model.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear))
        weights, all_of_them = [layer.weight for layer in linear], list(model.parameters())
        # what graphs return is theirs, so that writing it takes a copy, and a call of ours for each parameter
        joined = all_of_them if keep_buffers else weights if fuse_accumulation else []
        return GradientReducer(
            all_of_them,
            dp,
            late=weights if late_weights else (),
            keep_buffers=keep_buffers,
            joined=joined,
        )
    from mlm.parallel.sharded import ShardedReducer  # loads FSDP: 0.5 s in every rank's start

    return ShardedReducer(
        model,
        dp,
        zero=zero,
        compute_dtype=compute_dtype,
        units=units,
        methods=methods,
        reduce=reduce,
        late_weights=late_weights,
    )
