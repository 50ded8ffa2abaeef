"""Times of a pipeline's computations in a step, measured: log.timeline_every.

On a GPU they are times of the device (events on its stream), on a CPU those of the host. The zero of ranks on
one host is that of its clock; on several it is the end of a barrier before the step, which ranks leave
within the latency of their network.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mlm.checkpoint.native.exchange import Ranks
from mlm.parallel.collectives import barrier
from mlm.parallel.pipeline.actions import Action
from mlm.tracking.reporter import Reporter
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError

Mark = float | torch.cuda.Event
MOST = 200_000
"""Computations of a replica in a step that is recorded: 8 MB of JSON."""
SAME_CLOCK_S = 60.0
"""Clocks further apart are of several hosts, whatever their names are."""


class Timeline:
    """Measures a trainer's steps, where due, into records of kind `timeline`.

    A record has the computations of each stage of the first replica: op, chunk, micro-batch, and the
    milliseconds at which it began, had its input, and ended. Other steps cost nothing. Raises UserError if a
    step is too long to record.
    """

    def __init__(self, trainer: Trainer, reporter: Reporter) -> None:
        self.trainer, self.reporter = trainer, reporter
        self.every = trainer.config.log.timeline_every
        self.is_on = False
        train, parallel, dp = trainer.config.train, trainer.config.parallel, trainer.ctx.dp.size
        count = 3 * parallel.pp * parallel.vp * train.global_batch_size // (dp * train.micro_batch_size)
        if self.every and count > MOST:
            raise UserError(
                f"log.timeline_every={self.every}: a step of {count:,} computations is too long to record "
                f"({MOST:,} at most); use log.timeline_every=0",
                keys=("log.timeline_every",),
            )

    def begin(self, micro_batches: int) -> None:
        """Note that a step of this rank's micro-batches begins. Collective where it is measured."""
        self.restore()
        if not self.every or (self.trainer.step + 1) % self.every:
            return
        model, ctx = self.trainer.model, self.trainer.ctx
        self.actions = [i for i in model.instructions(micro_batches, train=True) if isinstance(i, Action)]
        self.micro_batches = micro_batches
        self.marks: list[tuple[Mark, Mark, Mark]] = []
        self.before, self.is_on = (model.phase, model.on_input), True
        model.phase, model.on_input = self.phase, self.note_input
        if ctx.device.type == "cuda":
            torch.cuda.synchronize(ctx.device)
        barrier(ctx.world)
        self.zero, self.clock = self.now(), time.monotonic()

    def now(self) -> Mark:
        """Return a mark in this rank's time."""
        if self.trainer.ctx.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure an action; a step that is repeated is measured once."""
        with self.before[0](name):
            begin = self.now()
            self.input = begin
            yield
            if len(self.marks) < len(self.actions):
                self.marks.append((begin, self.input, self.now()))

    def note_input(self) -> None:
        """Note that the input of the action in progress has arrived."""
        self.input = self.now()

    def end(self) -> None:
        """Report the step that has ended, if it was measured. Collective."""
        if not self.is_on:
            return
        self.restore()
        ctx = self.trainer.ctx
        first = ctx.tp.rank == ctx.replicas.rank == 0
        mine = [socket.gethostname(), self.clock, self.rows() if first else None]
        found = Ranks.of(ctx).gather(mine)
        if ctx.is_main:
            record, step = joined(found), self.trainer.step
            self.reporter.event("timeline", {"step": step, **record})
            planned = self.trainer.model.bubble(self.micro_batches)
            self.reporter.note(f"step {step}: {line(record['stages'], planned)}")

    def restore(self) -> None:
        """Stop measuring; a return to a checkpoint leaves a step without its end."""
        if self.is_on:
            self.is_on = False
            self.trainer.model.phase, self.trainer.model.on_input = self.before

    def rows(self) -> list[list[Any]]:
        """Return this stage's computations: op, chunk, micro-batch, milliseconds of its three marks."""
        if self.trainer.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.ctx.device)
        return [
            [action.op.value, action.chunk, action.micro_batch, *(self.milliseconds(mark) for mark in marks)]
            for action, marks in zip(self.actions, self.marks, strict=True)
        ]

    def milliseconds(self, mark: Mark) -> float:
        """Return the time of a mark since the zero."""
        if isinstance(mark, torch.cuda.Event):
            assert isinstance(self.zero, torch.cuda.Event)
            return float(self.zero.elapsed_time(mark))
        assert isinstance(self.zero, float)
        return 1000 * (mark - self.zero)


def joined(found: Sequence[Any]) -> dict[str, Any]:
    """Return the stages of all ranks' answers in one time, which begins with the first computation."""
    hosts, clocks = {host for host, _, _ in found}, [clock for _, clock, _ in found]
    one_clock = len(hosts) == 1 and max(clocks) - min(clocks) < SAME_CLOCK_S
    zeros = [1000 * (clock - min(clocks)) if one_clock else 0.0 for clock in clocks]
    stages = [(zero, rows) for zero, (_, _, rows) in zip(zeros, found, strict=True) if rows is not None]
    first = min(zero + row[3] for zero, rows in stages for row in rows)
    return {
        "aligned": "clock" if one_clock else "barrier",
        "stages": [
            [[*row[:3], *(round(zero + at - first, 3) for at in row[3:])] for row in rows]
            for zero, rows in stages
        ],
    }


def line(stages: Sequence[Sequence[Sequence[Any]]], planned: float) -> str:
    """Return the duration of a pipeline's step and its bubble, beside the planned one."""
    makespan = max(row[-1] for rows in stages for row in rows)
    busy = max(sum(row[-1] - row[-2] for row in rows) for rows in stages)
    return (
        f"pipeline {makespan:.4g} ms, bubble {makespan / busy - 1:.1%} of the busiest stage's time (planned, "
        f"with backward twice as long as forward: {planned:.1%})"
    )
