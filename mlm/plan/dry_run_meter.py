"""Count a step's operations as PyTorch dispatches them: FLOPs, messages, allocations and releases.

Memory is followed by weak references to storages, so that blocks freed by autograd or a recomputation are
freed in the counts too. Workspaces inside an operator and the allocator's rounding are not counted.
"""

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mlm.models.backbone import Transformer
from mlm.plan.dry_run_memory import EMBEDDING, VOCABULARY, Allocation, Log
from mlm.plan.trace import Message, Trace, tensors_of

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"
OPTIMIZER, BETWEEN = "optimizer", "between passes"
"""Phases of a step: `recomputed` runs within backward; transfers and reductions run between passes."""
IN_ATTENTION = "extra in attention"
"""Products of fused kernels beyond the model's: q k^T again in backward, and columns that pad values."""
OUTSIDE, HEAD = "other", "head"
"""Labels of work outside modules, and of modules between the layers and the vocabulary projection."""
FIRST_LEAF = 1 << 63
"""First sequence number of the autograd nodes that accumulate gradients."""

aten = torch.ops.aten
FUSED_BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
}
OPERATIONS = {
    "alltoall_base_": "all-to-all",
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
"""Names of torch.distributed's operators in messages."""


@dataclass
class StepCounts:
    flops: Counter[str] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)


class Labels:
    """Label of the module that computes, in backward passes too.

    A forward pass records the sequence numbers of each module's autograd nodes; a backward pass looks up its
    node's number.
    """

    def __init__(self) -> None:
        self.by_module: dict[nn.Module, str] = {}
        self.stack: list[str] = []
        self.has_loss = False
        self.firsts: list[int] = [-1]
        self.names: list[str] = [OUTSIDE]

    def assign_next_nodes(self) -> None:
        """Assign the next autograd nodes to the innermost module."""
        name, number = self.stack[-1] if self.stack else OUTSIDE, torch.autograd._get_sequence_nr()
        if self.firsts[-1] == number:
            self.names[-1] = name
        elif self.names[-1] != name:
            self.firsts.append(number)
            self.names.append(name)

    def current(self) -> str:
        """Return the label of the running operation."""
        if self.stack:
            return self.stack[-1]
        node = torch._C._current_autograd_node()
        number = FIRST_LEAF if node is None else node._sequence_nr()
        return OUTSIDE if number >= FIRST_LEAF else self.names[bisect_right(self.firsts, number) - 1]


class Meter(TorchDispatchMode):
    """Dispatch mode that counts operations while it is active.

    Attributes:
        counts: FLOPs and messages so far.
        log: allocations and releases so far, on devices of type `device_type`.
        trace: work by place, if `is_traced`, which doubles the time.
        axes: name and size of the axis of each process group, by the group's name.
        padding: share of columns that pad attention's values to the width of the queries.
    """

    def __init__(self, device_type: str, *, is_traced: bool = False) -> None:
        super().__init__()
        self.device_type, self.is_traced, self.trace = device_type, is_traced, Trace()
        self.counts, self.log, self.labels = StepCounts(), Log(), Labels()
        self.axes: dict[str, tuple[str, int]] = {}
        self.padding = 0.0
        self._fixed_phase: str | None = None

    def current_phase(self) -> str:
        if self._fixed_phase is not None:
            return self._fixed_phase
        if torch._C._current_graph_task_id() != -1:
            return RECOMPUTED if self.labels.stack else BACKWARD
        return FORWARD if self.labels.stack else BETWEEN

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count all work inside as `name`'s."""
        before, self._fixed_phase = self._fixed_phase, name
        try:
            yield
        finally:
            self._fixed_phase = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to skip the compiler PyTorch would import it, in 1.6 s."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # by name: importing DTensor would import a compiler. It dispatches operations on its shards.
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula, flops = flop_registry.get(func._overloadpacket), 0
        place = self.current_phase(), self.labels.current()
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=out)
            extra = 0
            if (
                func._overloadpacket in FUSED_BACKWARD
            ):  # five products, one recomputed and two of values' width
                extra = flops // 5 + round(self.padding * flops * 2 / 5)
            elif "attention" in func._overloadpacket.__name__:
                extra = round(self.padding * flops / 2)
            self.counts.flops[place[0]] += flops - extra
            self.counts.flops[IN_ATTENTION] += extra
        if self.is_traced:
            self.trace.operator(place, func, args, kwargs, out, flops)
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name in OPERATIONS:
            operation, tensors = OPERATIONS[name], list(tensors_of(args[:2]))
            group = next(x for x in args if isinstance(x, torch.ScriptObject))
            axis, ranks = self.axes[dist.ProcessGroup.unbox(group).group_name]
            message = Message(axis, operation, ranks, max(tensor.nbytes for tensor in tensors))
            self.counts.messages[message] += 1
            self.trace.message(place, message)
            block = None if operation == "all-reduce" else self.block_of(tensors[0])
            if block is not None:  # the buffer that is filled or sent
                block.is_transported = True
        for tensor in tensors_of([out]):
            self.track_storage(tensor)
        return out

    def track_storage(self, tensor: Tensor) -> None:
        """Follow a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        if tensor.device.type == self.device_type and storage._cdata not in self.log.live:
            self._track(storage)

    def _track(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes():
            key, log = storage._cdata, self.log
            block = Allocation(storage.nbytes(), self.current_phase(), self.labels.current())
            log.allocate(key, block)
            weakref.finalize(storage, log.free, key, block).atexit = False

    def block_of(self, tensor: Tensor) -> Allocation | None:
        """Return the block of a tensor; None on other devices."""
        return self.log.live.get(tensor.untyped_storage()._cdata)

    def tag(self, tensors: Iterable[Tensor], part: str) -> None:
        """Set the purpose of tensors' blocks."""
        for tensor in tensors:
            self.track_storage(tensor)
            block = self.block_of(tensor)
            if block is not None:
                block.part = part

    @contextmanager
    def watching(self, stages: Iterable[nn.Module]) -> Iterator[None]:
        """Count while inside, and label the work of these stages' modules by their homes."""
        labels = self.labels
        labels.by_module = {
            module: home_of(name) for stage in stages for name, module in stage.named_modules()
        }

        def begin_module(module: nn.Module, args: Any) -> None:
            if module not in labels.by_module:
                return
            if labels.by_module[module] == STAGE:
                self.log.begin_pass(BACKWARD)
                self.trace.begin_pass()
                for x in tensors_of(args):  # received hidden states
                    if (block := self.block_of(x)) is not None:
                        block.is_input = True
                labels.has_loss = isinstance(module, Transformer) and module.stage.is_last
            labels.stack.append(EMBEDDING if labels.by_module[module] == STAGE else labels.by_module[module])
            labels.assign_next_nodes()

        def end_module(module: nn.Module, args: Any, out: Any) -> None:
            if module not in labels.by_module:
                return
            ended = labels.by_module[module]
            labels.stack.pop()
            if ended == STAGE:
                self.log.end_pass()
            elif labels.stack == [EMBEDDING] and ended != EMBEDDING and labels.has_loss:
                labels.stack[0] = VOCABULARY  # the last stage's own work after its layers
            labels.assign_next_nodes()

        hooks = (
            nn.modules.module.register_module_forward_pre_hook(begin_module),
            nn.modules.module.register_module_forward_hook(end_module, always_call=True),
        )
        try:
            with self._watching_resizes(), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _watching_resizes(self) -> Iterator[None]:
        """Track storages that are resized in place.

        FSDP2 frees and allocates gathered weights by `UntypedStorage.resize_`, which no dispatch mode or hook
        sees.
        """
        resize = torch.UntypedStorage.resize_

        def resize_and_track(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if storage.device.type == self.device_type:
                block = self.log.live.get(storage._cdata)
                if block is not None and block.size != storage.nbytes():
                    self.log.free(storage._cdata, block)
                if storage._cdata not in self.log.live:
                    self._track(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_track  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


STAGE = "stage"
EMBEDDINGS = ("token", "position", "token_type", "embedding_norm")


def home_of(name: str) -> str:
    """Return the home of a module by its name in a stage: a layer's number, the embedding or the head."""
    words = name.split(".")
    if words[0] == "layers":
        return words[1] if len(words) > 1 else OUTSIDE
    return (EMBEDDING if words[0] in EMBEDDINGS else HEAD) if name else STAGE
