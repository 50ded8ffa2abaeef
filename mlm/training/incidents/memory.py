"""Memory of a run's incidents, in each checkpoint, so that a resumed run decides as the first."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlm.checkpoint.native.run_state import NOT_FINITE_SINCE
from mlm.data.sampler import Ranges
from mlm.training.incidents.recent import Recent
from mlm.training.state import INCIDENTS
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError

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
    returned: tuple[int, int] = (0, 0)
    """Step of the incident that training last returned from, and that of the checkpoint it returned to."""
    since: int = 0
    """First of the newest steps that are not finite, overflows of float16 too; 0 if the newest is finite."""

    def limit(self, step: int) -> int | None:
        """Return the step that an incident at `step` returns to one below of, None for any.

        Training that gets no further than the last time goes further back.
        """
        failed, target = self.returned
        return target if step <= failed else None

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
            "returned": list(self.returned),
            NOT_FINITE_SINCE: self.since,
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
        failed, target = map(_whole, saved.get("returned", (0, 0)))
        since = _whole(saved.get(NOT_FINITE_SINCE, 0))
        return Memory(
            recent, ranges, steps, _whole(saved["rewinds"]), _whole(saved["streak"]), (failed, target), since
        )
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
