"""A log of allocations and releases, and the contents of memory at its peak."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

WEIGHTS, CASTS, GRADIENTS, STATE = "weights", "weights in the compute dtype", "gradients", "optimizer state"
ACTIVATIONS, AGAIN, VOCABULARY = "activations", "recomputed activations", "vocabulary projection"
EMBEDDING = "embedding"
"""Label of the first stage's work before its layers."""
TABLES = "tables of modules"
BUFFERS, TEMPORARIES = "communication buffers", "temporaries"


@dataclass(eq=False, slots=True)
class Allocation:
    """A block of memory, with the phase and the label of the module that allocated it."""

    size: int
    """Bytes."""
    phase: str
    label: str
    part: str | None = None
    """Its purpose if that is certain: weights, gradients, optimizer state."""
    is_saved: bool = False
    """True if it outlived its forward pass: saved for backward."""
    is_input: bool = False
    """True for received hidden states, once a stage reads them."""
    is_transported: bool = False
    """True if it was sent, received, gathered or scattered."""

    @property
    def purpose(self) -> str:
        """Name of its part of memory."""
        if self.part is not None:
            return self.part
        if self.label == VOCABULARY:
            return VOCABULARY
        if self.is_input:
            return ACTIVATIONS
        if self.is_transported:
            return BUFFERS
        if self.phase == "recomputed":
            return AGAIN
        return ACTIVATIONS if self.is_saved else TEMPORARIES


@dataclass
class MemoryPeak:
    bytes: int
    phase: str
    """Phase of the peak."""
    parts: dict[str, int]
    """Bytes by purpose, the largest first; they sum to `bytes`."""


@dataclass
class Log:
    """Allocations and releases in order."""

    live: dict[int, Allocation] = field(default_factory=dict)
    """Blocks in memory, by the storage's address."""
    events: list[tuple[Allocation, int]] = field(default_factory=list)
    """(block, change of memory in bytes)."""
    pass_begins: list[int] = field(default_factory=list)
    """Number of events before each forward pass."""

    def allocate(self, key: int, block: Allocation) -> None:
        self.live[key] = block
        self.events.append((block, block.size))

    def free(self, key: int, block: Allocation) -> None:
        if self.live.get(key) is block:
            del self.live[key]
            self.events.append((block, -block.size))

    def begin_pass(self, backward: str) -> None:
        """Begin a forward pass: blocks that backward passes left are accumulated gradients."""
        self.pass_begins.append(len(self.events))
        self.tag_remaining(backward, GRADIENTS)

    def tag_remaining(self, phase: str, part: str) -> None:
        """Set the purpose of blocks that `phase`, which is over, allocated and did not free."""
        for block in self.live.values():
            if block.part is None and block.phase == phase and not block.is_transported:
                block.part = part

    def end_pass(self) -> None:
        """End a forward pass: blocks that it allocated and did not free are saved for backward."""
        live = {id(block) for block in self.live.values()}
        for block, change in self.events[self.pass_begins[-1] :]:
            if change > 0 and block.phase == "forward" and id(block) in live:
                block.is_saved = True

    def peak(self) -> MemoryPeak:
        totals = list(accumulate(change for _, change in self.events))
        at = max(range(len(totals)), key=totals.__getitem__, default=None)
        if at is None:
            return MemoryPeak(0, "", {})
        blocks: dict[int, Allocation] = {}
        for block, change in self.events[: at + 1]:
            if change > 0:
                blocks[id(block)] = block
            else:
                blocks.pop(id(block), None)
        parts = Counter[str]()
        for block in blocks.values():
            parts[block.purpose] += block.size
        return MemoryPeak(totals[at], self.events[at][0].phase, dict(parts.most_common()))
