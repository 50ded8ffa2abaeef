"""Actions of a pipeline rank in a step, as data shared by schedules, plans and the engine.

A pipeline of p ranks with v chunks each has p * v stages; stage s is chunk s // p of rank s % p
(arXiv:2104.04473, section 2.2). A micro-batch goes forward through stages 0, 1, … and backward in reverse.
"""

from dataclasses import dataclass
from enum import Enum

SENDS_KEPT = 8
"""Sends in flight before the oldest is awaited. Any number is safe: plans complete even if every transfer
blocks both its ranks (lower.py)."""


class ScheduleError(ValueError):
    """An invalid schedule or plan: an action is missing or doubled, or ranks deadlock."""


class Op(Enum):
    """A piece of computation."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the stage's input, and of its weights too unless the schedule has WEIGHT actions."""
    WEIGHT = "W"
    """Gradients of the stage's weights, deferred by a zero-bubble schedule (arXiv:2401.10241)."""


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One computation of a rank: `op` of micro-batch `micro_batch` on its chunk number `chunk`."""

    op: Op
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


Schedule = tuple[tuple[Action, ...], ...]
"""Each rank's actions in the order it computes them."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send the output of this rank's `action` (activations of F, input gradients of B) to `peer`."""

    action: Action
    peer: int

    def __str__(self) -> str:
        return f"send of {self.action} to {self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of the input of this rank's `action`, from `peer`. The action waits for it."""

    action: Action
    peer: int

    def __str__(self) -> str:
        return f"receive for {self.action} from {self.peer}"


Instruction = Action | Send | Receive


@dataclass(frozen=True, slots=True)
class Cost:
    """Duration of each op, in any one unit. BACKWARD counts both gradients where nothing is deferred."""

    forward: float = 1.0
    backward: float = 2.0
    input_gradient: float = 1.0
    """BACKWARD of a schedule with WEIGHT actions."""
    weight_gradient: float = 1.0
    transfer: float = 0.0


@dataclass(frozen=True, slots=True)
class TimedAction:
    """Start and end of an action on its rank in the simulation."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Plan:
    """A schedule lowered to each rank's instructions, with the results of its simulation."""

    num_stages: int
    """p * v."""
    instructions: tuple[tuple[Instruction, ...], ...]
    """Each rank's computations, sends and receives, in the order it issues them."""
    timeline: tuple[tuple[TimedAction, ...], ...]
    """Each rank's computations in the simulation."""
    makespan: float
    """Time from the first start to the last end."""
    bubble: float
    """Idle time over ideal time of the busiest rank: makespan / busy - 1 (arXiv:2104.04473, section 2.2)."""
    peak_in_flight: tuple[int, ...]
    """Most (chunk, micro-batch) pairs a rank holds activations of at once."""
