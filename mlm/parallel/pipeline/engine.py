"""Executes one rank's part of a pipeline plan with point-to-point transfers.

The plan (lower.py) fixes the order of computations, sends and receives, the same at both ends of every pair
of ranks, so transfers need no tags and cannot deadlock. Receives use new buffers; sends are awaited a few
sends later, which bounds the memory they keep. One rank alone runs the same plan.

Shapes: a tensor at a stage boundary has a shape that both sides derive from the micro-batch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mlm.parallel.collectives import Pending, start_receive, start_send
from mlm.parallel.compute_state import DeferredWeightGrads
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm.parallel.mesh import Axis
from mlm.parallel.pipeline.actions import SENDS_KEPT, Action, Instruction, Op, Receive, Send

T = TypeVar("T")
NOTHING = nullcontext()


class PlanObserver:
    """Watches the actions of a plan. All methods do nothing by default."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a phase of a step, such as the actions `forward`, `backward` and `weight`."""
        return NOTHING

    def on_receive(self) -> None:
        """The input of the current action has arrived from another rank."""

    def on_micro_batch(self, number: int, count: int) -> None:
        """The backward pass of micro-batch `number` of `count` begins in the first chunk."""


class Reducer(Protocol):
    """Sums the gradients of one model (a pipeline chunk) over the data-parallel axis.

    Use: `start_step()`; set `sync` before each backward pass, to True for the last one of the step; if weight
    gradients are computed outside backward passes, set `sync_late` before each batch of them in the same way,
    and call `settle()` after it; then `finish()`. After `finish` the `grad` of every ParameterShard's
    parameter holds the sum over dp (this rank's rows, if sharded over dp).
    """

    sync: bool
    sync_late: bool

    def start_step(self) -> None:
        """Clear the gradients."""

    def drop_gathered(self) -> None:
        """Drop full weights that were gathered from shards before these changed."""

    def settle(self) -> None:
        """Add gradients that were computed outside a backward pass; call after each batch of them.

        Until then half-precision gradients accumulate in half precision. `finish` settles, too.
        """

    def finish(self) -> None:
        """Start missing reductions and wait for all."""


@dataclass
class ChunkGradients:
    """Reducer, fused layers and deferred gradients of a chunk.

    A product and a pass that adds it to the gradient sum move 16 bytes a weight and micro-batch and need a
    second matrix; a fused product that adds moves 8. The first micro-batch has no sum if gradients start as
    None.
    """

    reducer: Reducer | None = None
    """Sums them over dp in the last micro-batch."""
    fused_layers: Sequence[ColumnParallelLinear | RowParallelLinear] = ()
    """Layers that add their weight gradients inside their products."""
    deferred: DeferredWeightGrads = field(default_factory=DeferredWeightGrads)
    """Weight gradients for WEIGHT actions."""

    def finish(self) -> None:
        """Finish all reductions."""
        for layer in self.fused_layers:
            layer.compute.fused_grad = None
        if self.reducer is not None:
            self.reducer.finish()


@dataclass(frozen=True)
class Stages(Generic[T]):
    """Stages that the engine runs; T is the caller's type of a micro-batch."""

    pp: Axis
    num_stages: int
    """p * v."""
    forward: Callable[[int, T, Tensor | None], Tensor]
    """forward(chunk, micro-batch, input) -> output for the next stage, or the last one's result."""
    boundary_shape: Callable[[T], tuple[int, ...]]
    """Shape of a micro-batch's hidden states between stages."""
    dtype: torch.dtype
    """Dtype of tensors at stage boundaries."""
    device: torch.device
    gradients: Sequence[ChunkGradients] = ()
    """One for each chunk of this rank; empty uses autograd alone."""
    observer: PlanObserver = field(default_factory=PlanObserver)


@dataclass
class _SavedForBackward:
    """Tensors and graph edge that a forward pass saves for its backward pass."""

    x: Tensor | None
    edge: GradientEdge | None
    """Graph node of the output, or of its sum for a result, which receives no gradient from a stage."""
    is_result: bool


class _Run(Generic[T]):
    def __init__(self, stages: Stages[T], instructions: Sequence[Instruction], batches: Sequence[T]) -> None:
        self.stages, self.instructions, self.batches = stages, instructions, batches
        self.results: list[Tensor] = []
        self.arriving: dict[Action, Pending] = {}
        self.local: dict[Action, Tensor] = {}
        self.outgoing: dict[Action, Tensor] = {}
        self.sends: deque[Pending] = deque()
        self.saved: dict[tuple[int, int], _SavedForBackward] = {}
        self.weight_jobs: dict[tuple[int, int], list[Callable[[], None]]] = {}
        actions = [i for i in instructions if isinstance(i, Action)]
        self.trains = any(action.op is not Op.FORWARD for action in actions)
        self.defers_weight_grads = any(action.op is Op.WEIGHT for action in actions)
        self.last_backward = {a.chunk: a for a in actions if a.op is Op.BACKWARD}
        self.last_weights = {a.chunk: a for a in actions if a.op is Op.WEIGHT}
        self.gradients = stages.gradients or [ChunkGradients() for _ in range(stages.num_stages)]
        self.backward_count = 0  # backward passes started in the first chunk

    def run(self) -> list[Tensor]:
        do = {Op.FORWARD: self.forward, Op.BACKWARD: self.backward, Op.WEIGHT: self.weight}
        with torch.set_grad_enabled(self.trains):
            for instruction in self.instructions:
                if isinstance(instruction, Send):
                    self.send(instruction)
                elif isinstance(instruction, Receive):
                    self.receive(instruction)
                else:
                    with self.stages.observer.phase(instruction.op.name.lower()):
                        do[instruction.op](instruction)
        while self.sends:
            self.sends.popleft().wait()
        leftovers = (self.arriving, self.local, self.outgoing, self.saved, self.weight_jobs)
        assert not any(leftovers), "the plan consumes all of its outputs"
        return self.results

    def send(self, instruction: Send) -> None:
        while len(self.sends) >= SENDS_KEPT:
            self.sends.popleft().wait()
        out = self.outgoing.pop(instruction.action)
        self.sends.append(start_send(out, self.stages.pp, instruction.peer))

    def receive(self, instruction: Receive) -> None:
        shape = self.stages.boundary_shape(self.batches[instruction.action.micro_batch])
        buffer = torch.empty(shape, dtype=self.stages.dtype, device=self.stages.device)
        self.arriving[instruction.action] = start_receive(buffer, self.stages.pp, instruction.peer)

    def take(self, action: Action) -> Tensor:
        """Return the input of an action, from the previous or next stage."""
        arriving = self.arriving.pop(action, None)
        if arriving is None:
            return self.local.pop(action)
        x = arriving.wait()
        self.stages.observer.on_receive()
        return x

    def hand_over(self, action: Action, step: int, x: Tensor) -> None:
        """Pass `x` to the next (step 1) or previous (step -1) stage."""
        if self.stages.pp.size > 1:
            self.outgoing[action] = x.contiguous()
        else:  # the neighbouring stage is this rank's next chunk
            self.local[Action(action.op, action.chunk + step, action.micro_batch)] = x

    def forward(self, action: Action) -> None:
        stage = action.chunk * self.stages.pp.size + self.stages.pp.rank
        x = self.take(action).requires_grad_(self.trains) if stage > 0 else None
        if self.trains:
            # with deferred gradients the last reduction waits for gradients that autograd adds
            is_last = action.micro_batch == self.last_backward[action.chunk].micro_batch
            joins = not (is_last and self.defers_weight_grads)
            for layer in self.gradients[action.chunk].fused_layers:
                layer.compute.fused_grad = layer.weight.grad if joins else None
        y = self.stages.forward(action.chunk, self.batches[action.micro_batch], x)
        is_result = stage == self.stages.num_stages - 1
        if self.trains:
            # a scalar output needs no gradient argument, whose check would import sympy for half a second
            edge = get_gradient_edge(y.sum() if is_result else y) if y.requires_grad else None
            self.saved[action.chunk, action.micro_batch] = _SavedForBackward(x, edge, is_result)
        if is_result:
            self.results.append(y.detach())
        else:
            self.hand_over(action, 1, y.detach())

    def backward(self, action: Action) -> None:
        saved = self.saved.pop((action.chunk, action.micro_batch))
        dy = None if saved.is_result else self.take(action)
        if action.chunk == 0:
            self.backward_count += 1
            self.stages.observer.on_micro_batch(self.backward_count, len(self.batches))
        gradients = self.gradients[action.chunk]
        if gradients.reducer is not None:
            gradients.reducer.sync = action == self.last_backward[action.chunk]
        deferred = gradients.deferred
        deferred.open = self.defers_weight_grads
        if saved.edge is not None:  # a first stage without adapters needs no gradient
            torch.autograd.backward(saved.edge, dy)
        if self.defers_weight_grads:
            deferred.open = False
            self.weight_jobs[action.chunk, action.micro_batch] = deferred.take()
        if saved.x is not None:
            assert saved.x.grad is not None
            self.hand_over(action, -1, saved.x.grad)

    def weight(self, action: Action) -> None:
        gradients = self.gradients[action.chunk]
        if gradients.reducer is not None:
            gradients.reducer.sync_late = action == self.last_weights[action.chunk]
        for job in self.weight_jobs.pop((action.chunk, action.micro_batch)):
            job()
        if gradients.reducer is not None:
            gradients.reducer.settle()


def run_plan(stages: Stages[T], instructions: Sequence[Instruction], batches: Sequence[T]) -> list[Tensor]:
    """Run this rank's instructions on the micro-batches of a step.

    Gradients accumulate in the parameters. Every rank passes its own view of the same micro-batches; their
    shapes may differ from each other and from step to step.

    Returns the last stage's results in the order of its forwards, detached; nothing on other ranks. Forward
    passes alone run without autograd.
    """
    return _Run(stages, instructions, batches).run()
