"""Data-parallel gradient reduction: buckets summed over dp while backward still runs.

Gradients live in flat buffers (a bucket each) that parameters' `.grad` are views of, so nothing is copied.
Buckets are filled in the order backward reaches them; on the last micro-batch the all-reduce of a bucket
starts as soon as its last gradient has arrived. Earlier micro-batches only accumulate.

The sum, not the mean, is taken: the loss is already divided by the tokens of the global batch.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlm.parallel.mesh import Axis

BUCKET_BYTES = 25 << 20
"""Large enough to use the wire well, small enough that the last one finishes soon after backward."""


class _Bucket:
    """Some parameters' gradients, one flat buffer."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.missing = len(parameters)
        self.work: dist.Work | None = None
        self.views: list[Tensor] = []
        offset = 0
        for p in parameters:
            self.views.append(self.flat[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


class GradientReducer:
    """Sums gradients over the data-parallel axis. One per model; on an axis of one rank it does nothing.

    Use: `start_step()`, then for each micro-batch set `sync` (True for the last one only) and run backward,
    then `finish()`. After `finish` every `.grad` holds the sum over dp.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], dp: Axis, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.dp = dp
        self.sync = False
        self.parameters = [p for p in parameters if p.requires_grad]
        self.buckets: list[_Bucket] = []
        if dp.size == 1:
            return
        group: list[nn.Parameter] = []
        size = 0
        for p in reversed(self.parameters):  # backward reaches the last layers first
            if group and (size + p.numel() * p.element_size() > bucket_bytes or p.dtype != group[0].dtype):
                self.buckets.append(_Bucket(group))
                group, size = [], 0
            group.append(p)
            size += p.numel() * p.element_size()
        self.buckets.append(_Bucket(group))
        for bucket in self.buckets:
            for p in bucket.parameters:
                p.register_post_accumulate_grad_hook(self._hook_of(bucket))

    def _hook_of(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if not self.sync:
                return
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.work = dist.all_reduce(bucket.flat, group=self.dp.group, async_op=True)

        return arrived

    def start_step(self) -> None:
        """Clear the gradients."""
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.missing, bucket.work = len(bucket.parameters), None
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                p.grad = view
        if not self.buckets:
            for p in self.parameters:
                p.grad = None
        self.sync = False

    def finish(self) -> None:
        """Wait for the reductions; reduce buckets that some parameter's gradient never reached."""
        for bucket in self.buckets:
            if bucket.work is None:
                bucket.work = dist.all_reduce(bucket.flat, group=self.dp.group, async_op=True)
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
