"""A pipeline's step as a run measured it (log.timeline_every), for drawings beside the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from mlm.parallel.pipeline.actions import Action, Cost, Op, Span
from mlm.tracking.html.rows import number

LONGEST_MS = 1e9
"""Of a step; a longer one is damage."""


@dataclass(frozen=True)
class Measured:
    """Computations of each stage in a step, from the arrival of their input to their end, in ms."""

    step: int
    lines: tuple[tuple[Span, ...], ...]
    one_clock: bool
    """False if ranks of several hosts were aligned by a barrier."""

    @classmethod
    def of(cls, record: Mapping[str, Any], actions: Sequence[Sequence[Action]]) -> "Measured | None":
        """Read a record; None if it is not of these actions of each stage, in any order."""
        found = record.get("stages")
        stages = found if isinstance(found, list) else []
        lines = [tuple(map(span_of, rows)) if isinstance(rows, list) else () for rows in stages]
        spans = tuple(tuple(span for span in line if span is not None) for line in lines)
        kinds = [sorted(map(key, (span.action for span in line))) for line in spans]
        if kinds != [sorted(map(key, line)) for line in actions]:
            return None
        return cls(record["step"], spans, record.get("aligned") == "clock")

    @cached_property
    def makespan(self) -> float:
        """Time to the last end."""
        return max(span.end for line in self.lines for span in line)

    @cached_property
    def busy(self) -> list[float]:
        """Time that each stage computes."""
        return [sum(span.end - span.start for span in line) for line in self.lines]

    @property
    def bubble(self) -> float:
        """Idle over busy time of the busiest stage, as `Plan.bubble`."""
        return self.makespan / max(self.busy) - 1

    @cached_property
    def means(self) -> dict[Op, float]:
        """Mean duration of each op over stages and micro-batches."""
        spans = [span for line in self.lines for span in line]
        used = [op for op in Op if any(span.action.op is op for span in spans)]
        return {op: fmean(span.end - span.start for span in spans if span.action.op is op) for op in used}

    @property
    def cost(self) -> Cost:
        """The means as costs of a plan."""
        means = self.means
        backward = means[Op.BACKWARD]
        return Cost(
            forward=means[Op.FORWARD],
            backward=backward,
            input_gradient=backward,
            weight_gradient=means.get(Op.WEIGHT, 0.0),
        )


def span_of(row: object) -> Span | None:
    """Read a row of a record; None if it is damaged."""
    if not isinstance(row, list) or len(row) != 6:
        return None
    op, chunk, micro_batch, *times = row
    begin, arrived, end = map(number, times)
    sound = 0 <= begin <= arrived < end < LONGEST_MS  # false of a NaN
    if op not in [each.value for each in Op] or type(chunk) is not int or type(micro_batch) is not int:
        return None
    return Span(Action(Op(op), chunk, micro_batch), arrived, end) if sound else None


def key(action: Action) -> tuple[str, int, int]:
    """Return an action as a key to sort by."""
    return action.op.value, action.chunk, action.micro_batch
