"""A log of allocations and releases, and what lay in memory when it was fullest."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

WEIGHTS, CASTS, GRADIENTS, STATE = "weights", "weights in the compute dtype", "gradients", "optimizer state"
ACTIVATIONS, AGAIN, VOCABULARY = "activations", "recomputed activations", "vocabulary projection"
EMBEDDING = "embedding"
"""Label of what the first stage computes before its layers."""
TABLES = "tables of modules"
BUFFERS, TEMPORARIES = "communication buffers", "temporaries"


@dataclass(eq=False, slots=True)
class Allocation:
    """A block of memory, with the phase and the part of the model that allocated it."""

    size: int
    """Bytes."""
    phase: str
    label: str
    part: str | None = None
    """Its purpose where that is known for sure: weights, gradients, optimizer state."""
    is_kept: bool = False
    """True if it outlived the forward pass that made it, waiting for backward."""
    is_input: bool = False
    """True for hidden states that were received, once they are used."""
    is_transported: bool = False
    """True if it was sent, received, gathered or scattered."""

    @property
    def purpose(self) -> str:
        """The part of memory that it belongs to."""
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
        return ACTIVATIONS if self.is_kept else TEMPORARIES


@dataclass
class MemoryPeak:
    bytes: int
    phase: str
    """The phase that ran then."""
    parts: dict[str, int]
    """Bytes by purpose, most first; sums to `bytes`."""


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
        """Begin a forward pass: what backward passes left until now are gradients that are added up."""
        self.pass_begins.append(len(self.events))
        self.tag_remaining(backward, GRADIENTS)

    def tag_remaining(self, phase: str, part: str) -> None:
        """Name the purpose of what `phase`, which is over, allocated and did not free."""
        for block in self.live.values():
            if block.part is None and block.phase == phase and not block.is_transported:
                block.part = part

    def end_pass(self) -> None:
        """End a forward pass: what it allocated and did not free waits for backward."""
        live = {id(block) for block in self.live.values()}
        for block, change in self.events[self.pass_begins[-1] :]:
            if change > 0 and block.phase == "forward" and id(block) in live:
                block.is_kept = True

    def peak(self) -> MemoryPeak:
        """Memory when it was fullest."""
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
