"""Memory of a run's incidents, in each checkpoint, so that a resumed run decides as the first."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlm.data.sampler import Ranges
from mlm.errors import CorruptFileError
from mlm.incidents.recent import Recent
from mlm.train.state import INCIDENTS
from mlm.train.trainer import Trainer

MOST_STEPS, MOST_RANGES = 10_000, 10_000


@dataclass
class Memory:
    """Recent numbers, and what incidents have changed."""

    recent: Recent
    ranges: Ranges = ()
    """Samples left out: (first, count)."""
    steps: list[int] = field(default_factory=list)
    """Steps whose update an incident left out."""
    rewinds: int = 0
    streak: int = 0
    """Steps in a row without finite gradients."""

    def leave_out(self, first: int, count: int) -> None:
        """Leave out samples from now on."""
        self.ranges = tuple(sorted({*self.ranges, (first, count)}))[:MOST_RANGES]

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "recent": [list(pair) for pair in self.recent.pairs],
            "left_out_samples": [list(each) for each in self.ranges],
            "left_out_steps": self.steps[-MOST_STEPS:],
            "rewinds": self.rewinds,
            "streak": self.streak,
        }


def decode(saved: Any, window: int) -> Memory:
    """Return the memory that a checkpoint holds. Raises CorruptFileError."""
    if saved is None:
        return Memory(Recent(window))
    try:
        assert isinstance(saved, Mapping)
        ranges = tuple((_whole(first), _whole(count)) for first, count in saved["left_out_samples"])
        steps = [_whole(step) for step in saved["left_out_steps"]]
        if len(ranges) > MOST_RANGES or len(steps) > MOST_STEPS:
            raise ValueError("too many entries")
        recent = Recent(window, saved["recent"])
        return Memory(recent, ranges, steps, _whole(saved["rewinds"]), _whole(saved["streak"]))
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"its state of incidents is damaged ({error!r}); take another checkpoint"
        ) from error


def spare_samples(trainer: Trainer) -> int:
    """Return how many more samples a run may need than its steps read, for those that incidents leave out."""
    settings, size = trainer.config.incident, trainer.config.train.global_batch_size
    memory = decode(trainer.extra_state.get(INCIDENTS), settings.window)
    further = 2 * size * settings.rewinds if settings.action == "rewind" else 0
    return sum(count + size for _, count in memory.ranges) + further


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]} is no count")
    return value
