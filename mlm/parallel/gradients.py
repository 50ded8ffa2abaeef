"""Data-parallel gradient reduction: buckets summed over dp while backward still runs.

Each bucket is a flat buffer, and parameters' `.grad` are views of it. Only the first gradient of a step is
copied, over the last step's: no pass sets buckets to zero. Buckets are filled in the order of the backward
pass; on the last micro-batch the all-reduce of a bucket starts with its last gradient: in the backward pass,
or in the last batch of weight gradients that a zero-bubble schedule defers. Earlier micro-batches only
accumulate.

The sum, not the mean, is taken: the loss is already divided by the tokens of the global batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from mlm.parallel.collectives import Pending, all_reduce, start_all_reduce
from mlm.parallel.config import ZeroReduce
from mlm.parallel.expert.router import routers
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mlm.parallel.mesh import Axis
from mlm.parallel.pipeline.engine import Reducer
from mlm.parallel.sharding import ParameterShard, parameters_by_axis

BUCKET_BYTES = 25 << 20
"""Large enough for bandwidth, small enough that the last one finishes soon after backward."""
BUCKET_BYTES_PER_RANK = 4 << 20
"""A ring splits a bucket into one piece per rank; small pieces are bound by latency."""


class _Bucket:
    """Gradients of some parameters in one flat buffer, which is summed over `axis`."""

    def __init__(self, parameters: list[nn.Parameter], axis: Axis) -> None:
        self.parameters, self.axis = parameters, axis
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.views = _views(self.flat, parameters)
        self.missing = len(parameters)
        self.work: Pending | None = None

    def reduce(self) -> None:
        """Start the sum. Parameters without a gradient in this step have one of zeros."""
        for p, view in zip(self.parameters, self.views, strict=True):
            if p.grad is None:
                p.grad = view.zero_()
            elif p.grad is not view:  # assigned without autograd
                p.grad = view.copy_(p.grad)
        self.work = start_all_reduce(self.flat, self.axis)


class GradientReducer:
    """The Reducer of replicated parameters (zero=0): sums their gradients over the replicas of a model.

    On an axis of one rank it communicates nothing. In a custom training loop:

        reducer = GradientReducer(model.parameters(), ctx.replicas)
        reducer.start_step()  # clears the gradients, in place of optimizer.zero_grad()
        for n, batch in enumerate(batches, 1):
            reducer.sync = n == len(batches)  # the last backward pass overlaps with the sums
            loss(batch).backward()
        reducer.finish()

    Args:
        parameters: parameters replicated over `dp`.
        dp: axis of the sums.
        bucket_bytes: size of a message; the default grows with the ranks.
        late: parameters whose gradients are computed outside backward passes.
        keep_buffers: keep buffers on an axis of one rank, too.
        joined: parameters whose first gradient of a step is added to zeros, not written.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        dp: Axis,
        bucket_bytes: int | None = None,
        late: Iterable[nn.Parameter] = (),
        keep_buffers: bool = False,
        joined: Iterable[nn.Parameter] = (),
    ) -> None:
        self.sync = self.sync_late = False
        self.bucket_bytes, self.keep_buffers = bucket_bytes, keep_buffers
        self.late, self.joined = frozenset(late), frozenset(joined)
        self.unbuffered: list[nn.Parameter] = []
        self.buckets: list[_Bucket] = []
        self.add(parameters, dp)

    def add(self, parameters: Iterable[nn.Parameter], axis: Axis) -> None:
        """Also sum the gradients of parameters replicated over another axis."""
        parameters = [p for p in parameters if p.requires_grad]
        if axis.size == 1 and not self.keep_buffers:
            self.unbuffered += parameters
            return
        limit = self.bucket_bytes or max(BUCKET_BYTES, BUCKET_BYTES_PER_RANK * axis.size)
        members: list[nn.Parameter] = []
        size, buckets = 0, list[_Bucket]()
        for p in reversed(parameters):  # backward reaches the last layers first
            if members and (size + p.nbytes > limit or p.dtype != members[0].dtype):
                buckets.append(_Bucket(members, axis))
                members, size = [], 0
            members.append(p)
            size += p.nbytes
        if members:
            buckets.append(_Bucket(members, axis))
        for bucket in buckets:
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                hook = partial(self._take_gradient, bucket, view, p in self.late)
                p.register_post_accumulate_grad_hook(hook)
        self.buckets += buckets

    def _take_gradient(self, bucket: _Bucket, view: Tensor, is_late: bool, p: Tensor) -> None:
        if p.grad is not None and p.grad is not view:  # the first of this step
            p.grad = view.copy_(p.grad)
        # hooks also run if a backward pass defers a gradient or adds it itself
        if self.sync_late if is_late else self.sync:
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.reduce()

    def start_step(self) -> None:
        for p in self.unbuffered:
            p.grad = None
        for bucket in self.buckets:
            bucket.missing, bucket.work = len(bucket.parameters), None
            zeros = []
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                p.grad = view if p in self.joined else None
                zeros += [view] if p in self.joined else []
            if zeros:
                torch._foreach_zero_(zeros)
        self.sync = self.sync_late = False

    def drop_gathered(self) -> None:
        """Do nothing: each rank holds full weights."""

    def settle(self) -> None:
        """End a batch; gradients are already accumulated in the parameters' dtype."""
        self.sync_late = False

    def finish(self) -> None:
        """Wait for the reductions; first reduce buckets with missing gradients."""
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.reduce()
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.missing, bucket.work = (
                len(bucket.parameters),
                None,
            )  # a custom loop may clear gradients itself


def build_reducer(
    model: nn.Module,
    dp: Axis,
    *,
    zero: int,
    compute_dtype: torch.dtype,
    units: Iterable[nn.Module] = (),
    methods: Sequence[str] = (),
    reduce: ZeroReduce = "last",
    late_weights: bool = False,
    keep_buffers: bool = False,
    fuse_accumulation: bool = False,
    replicated: Sequence[nn.Parameter] = (),
) -> Reducer:
    """Build the reducer of a model's gradients over dp; zero=2|3 shards its parameters over dp.

    Args:
        model: has its initial values, and no `parameter_shards` yet; shards may replace its parameters.
        dp: data-parallel axis.
        zero: 0 replicates, 2 and 3 shard. No effect on an axis of one rank.
        compute_dtype: dtype of activations, and of gathered weights if it is half precision.
        units: submodules to gather separately, in the order they run.
        methods: names of methods other than `forward` that compute with the parameters.
        reduce: micro-batches of a step that reduce gradients sharded over dp (ParallelConfig.zero_reduce).
        late_weights: True if weight gradients are computed outside backward passes, before `settle`.
        keep_buffers: keep gradients of one rank in buffers, as CUDA graphs own their outputs.
        fuse_accumulation: weight gradients of linear layers are added inside their products.
        replicated: trained parameters of a partly frozen model, which zero=2|3 does not shard.
    """
    weights = [m.weight for m in model.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    by_axis = parameters_by_axis(model, dp)
    is_sharded = zero > 0 and dp.group is not None
    if is_sharded:  # except for routers, `replicated` parameters and parameters of one rank alone
        unsharded = {*replicated, *(p for router in routers(model) for p in router.parameters())}
        for axis, parameters in by_axis.items():
            if axis.group is not None:
                by_axis[axis] = [p for p in parameters if p in unsharded]
    full = {p for parameters in by_axis.values() for p in parameters}
    joined = full if keep_buffers else weights if fuse_accumulation else ()
    late = weights if late_weights else ()
    reducer = GradientReducer(by_axis.pop(dp), dp, late=late, keep_buffers=keep_buffers, joined=joined)
    for axis, parameters in by_axis.items():
        reducer.add(parameters, axis)
    if not is_sharded:
        return reducer
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
        full=full,
        replicated=reducer,
    )


def sum_replicated_gradients(
    shards: Sequence[ParameterShard], tp: Axis, *, sequence_parallel: bool = True
) -> None:
    """Sum partial gradients of replicated parameters over tp. One message for each kind.

    With sequence parallelism (arXiv:2205.05198, section 4.2.2) norms, biases of row-parallel layers and
    positions have the gradients of this rank's rows. In any case, head norms and key-value heads that several
    ranks share (arXiv:2305.13245) have the gradients of this rank's queries.
    """
    if tp.size == 1:
        return
    unsplit = [s for s in shards if s.tp_dim is None]
    adapters = [s for s in unsplit if s.experts is not None]  # of experts
    if adapters and adapters[0].tp.size > 1:
        _sum_gradients(adapters, adapters[0].tp)
    dense = [s for s in unsplit if s.experts is None]
    _sum_gradients([s for s in dense if sequence_parallel or getattr(s.module, "is_partial", False)], tp)
    for replicas in sorted({s.replicas for s in shards if s.replicas > 1}):
        _sum_over_neighbours([s for s in shards if s.replicas == replicas], tp, replicas)


def sum_tied_gradients(shards: Sequence[ParameterShard], tied: Axis) -> None:
    """Sum the token table's gradient over the first and the last pipeline stage, which both hold it."""
    _sum_gradients([s for s in shards if isinstance(s.module, VocabParallelEmbedding)], tied)


def _sum_gradients(shards: Sequence[ParameterShard], axis: Axis) -> None:
    grads = [s.parameter.grad for s in shards if s.parameter.grad is not None]
    if len(grads) == 1 and grads[0].is_contiguous():
        all_reduce(grads[0], axis)
    elif grads:
        flat = torch.cat([g.flatten() for g in grads])
        all_reduce(flat, axis)
        torch._foreach_copy_(grads, _views(flat, grads))


def _sum_over_neighbours(shards: Sequence[ParameterShard], tp: Axis, replicas: int) -> None:
    """Sum gradients over groups of `replicas` neighbouring ranks: one sum over tp with a row for each group.

    Groups have equal sizes; rows of other groups are zeros here.
    """
    grads = [s.parameter.grad for s in shards if s.parameter.grad is not None]
    if not grads:
        return
    flat = torch.cat([g.flatten() for g in grads])
    rows = flat.new_zeros(tp.size // replicas, len(flat))
    group_row = rows[tp.rank // replicas]
    group_row.copy_(flat)
    all_reduce(rows, tp)
    torch._foreach_copy_(grads, _views(group_row, grads))


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([x.numel() for x in like])
    return [part.view_as(x) for part, x in zip(parts, like, strict=True)]


@contextmanager
def fuse_embedding_grad(tables: Iterable[VocabParallelEmbedding]) -> Iterator[None]:
    """In the block, let the loss add the gradients of these tables in its forward passes.

    This saves a matrix of the table's size for each micro-batch in flight. Clear gradients before, and follow
    each forward pass by one backward pass from a seed of 1. A reduction may start in a chunk's last backward
    pass: all forward passes are over then, and autograd calls a weight's hooks even without a gradient.
    """
    tables = list(tables)
    for table in tables:
        table.fuses_grad = True
    try:
        yield
    finally:
        for table in tables:
            table.fuses_grad = False
