"""A trace of a few steps with named phases: profile=true."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mlm.tracking.reporter import Reporter
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError

FIRST, STEPS = 2, 3
"""Steps of the attempt before the trace, and in it: the first ones compile and fill caches."""
RANKS = 8
"""Ranks that write a trace, the first ones."""
MARK = "mlm: "


class Profiler:
    """Traces some steps of a trainer into out/profile/rank-00000.json."""

    def __init__(self, trainer: Trainer, out: Path, reporter: Reporter) -> None:
        self.trainer, self.folder, self.reporter = trainer, out / "profile", reporter
        self.begun = 0
        self.tracer: profile | None = None

    def begin(self) -> None:
        """Note that a step begins."""
        self.begun += 1
        if self.begun == FIRST + 1 and self.trainer.ctx.rank < RANKS:
            kinds = [ProfilerActivity.CPU]
            if self.trainer.ctx.device.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            self.trainer.phase = self.trainer.model.phase = named
            self.tracer = profile(activities=kinds)
            self.tracer.__enter__()

    def end(self) -> bool:
        """Note that a step has ended; write the trace after the last, and return True then."""
        if self.begun < FIRST + STEPS:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Write the trace of the steps so far. A tracer that is left open ends the process with SIGSEGV."""
        tracer, self.tracer = self.tracer, None
        if tracer is not None:
            if self.trainer.ctx.device.type == "cuda":
                torch.cuda.synchronize()
            tracer.__exit__(None, None, None)
            self.trainer.phase = self.trainer.model.phase = type(self.trainer).phase
            self.write(tracer)

    def write(self, tracer: profile) -> None:
        """Write the trace and show where the steps went."""
        path = self.folder / f"rank-{self.trainer.ctx.rank:05d}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tracer.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"profile=true: cannot write {path} ({error}); free some space") from error
        steps = self.begun - FIRST
        count = f"{steps} steps" if steps > 1 else "1 step"
        self.reporter.note(f"profile of {count}: {path} (open it at https://ui.perfetto.dev)")
        for line in table(tracer, steps):
            self.reporter.note(line)


@contextmanager
def named(phase: str) -> Iterator[None]:
    """Name a phase in the trace."""
    with record_function(MARK + phase):
        yield


def table(tracer: profile, steps: int) -> list[str]:
    """Return the phases with their milliseconds a step on the host, the longest first."""
    found = [event for event in tracer.key_averages() if event.key.startswith(MARK)]
    total = {event.key: event.cpu_time_total / 1000 / steps for event in found}
    longest = sorted(total, key=lambda key: -total[key])
    return [f"  {key.removeprefix(MARK):<12} {total[key]:10.2f} ms a step" for key in longest]
