"""Times of steps: slow ranks and profiles. Both are observers.

`Watch` measures waiting: on a CPU (gloo) all of it, on a GPU the waits of the host.
"""

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from mlm.checkpoint.native.exchange import Ranks
from mlm.parallel.pipeline.engine import NOTHING
from mlm.tracking.reporter import Reporter
from mlm.training.observer import Observer, StepOutcome
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError

BUSY = ("computing", "reading data", "saving")
PHASES = {"data": "reading data", "saving": "saving", "validation": "validation"}
"""Phases that are not computing, and their names in reports."""
PROFILED_RANKS = 8
"""Ranks that write a profile, the first ones."""
MARK = "mlm: "
"""Prefix of a phase's name in a trace."""


class SlowRanks(Observer):
    """Compares the time of all ranks every check.ranks_every steps, and names the slowest.

    `report(kind, line, record)` reports an incident: a rank far slower than the others.
    """

    def __init__(self, trainer: Trainer, report: Callable[[str, str, dict[str, Any]], object]) -> None:
        self.ctx, self.checks, self.report = trainer.ctx, trainer.config.check, report
        self.slow: int | None = None
        """The rank that was slow at the last comparison."""
        self.start(trainer.step)

    def on_run_start(self, trainer: Trainer, reporter: Reporter) -> None:
        self.reporter, self.trainer = reporter, trainer
        self.start(trainer.step)

    def start(self, step: int) -> None:
        self.since, self.step = time.monotonic(), step
        self.waited = dict(self.ctx.watch.spent)
        self.spent = dict.fromkeys(PHASES.values(), 0.0)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.timed(PHASES[name]) if name in PHASES else NOTHING

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Measure an activity other than computing, without its waits."""
        begin, waited = time.monotonic(), sum(self.ctx.watch.spent.values())
        try:
            yield
        finally:
            waits = sum(self.ctx.watch.spent.values()) - waited
            self.spent[activity] += time.monotonic() - begin - waits

    def after_step(self, outcome: StepOutcome) -> None:
        step = self.trainer.step
        if self.checks.ranks_every and step % self.checks.ranks_every == 0:
            self.compare(self.gather(step))

    def gather(self, step: int) -> "RankTimes":
        """Return the shares of all ranks and restart the measurement. Collective."""
        shares = {activity: round(seconds, 6) for activity, seconds in self.shares(step).items()}
        ranks = Ranks.of(self.ctx).all_gather([socket.gethostname(), shares])
        self.start(step)
        return RankTimes([host for host, _ in ranks], [times for _, times in ranks])

    def shares(self, step: int) -> dict[str, float]:
        """Return this rank's seconds a step: computing, reading data, saving, waiting by axis."""
        steps, total = max(1, step - self.step), time.monotonic() - self.since
        parts = dict(self.spent)
        for axis, seconds in self.ctx.watch.spent.items():
            name = "waiting for all" if axis == "world" else f"waiting over {axis}"
            parts[name] = seconds - self.waited.get(axis, 0.0)
        parts["computing"] = max(0.0, total - sum(parts.values()))
        return {activity: seconds / steps for activity, seconds in parts.items()}

    def compare(self, times: "RankTimes") -> None:
        """Name the slowest rank; one that was not slow before is an incident. Collective."""
        self.reporter.note(times.line())
        self.reporter.event("ranks", {"step": self.trainer.step, **times.encode()})
        is_slow = times.factor >= self.checks.slow_factor
        if is_slow and times.slowest != self.slow:
            self.report("slow_rank", times.line(), {"times": times.encode()})
        self.slow = times.slowest if is_slow else None


class RankTimes:
    """Seconds a step of every rank, by activity.

    Attributes:
        slowest: the rank that is busy longest.
        factor: how many times as long as the median of the others it is.
        cause: the part of its time that exceeds the others' most.
    """

    def __init__(self, hosts: Sequence[str], shares: Sequence[Mapping[str, float]]) -> None:
        self.hosts, self.shares = hosts, shares
        self.busy = [sum(times.get(activity, 0.0) for activity in BUSY) for times in shares]
        self.slowest = slowest = max(range(len(shares)), key=lambda rank: self.busy[rank])
        other_ranks = [rank for rank in range(len(shares)) if rank != slowest]
        self.median = statistics.median(self.busy[rank] for rank in other_ranks)
        self.factor = self.busy[slowest] / max(self.median, 1e-9)

        def excess(activity: str) -> float:
            usual = statistics.median(shares[rank].get(activity, 0.0) for rank in other_ranks)
            return shares[slowest].get(activity, 0.0) - usual

        self.cause = max(BUSY, key=excess)

    def line(self) -> str:
        """Describe the slowest rank, its activity, and the median of the others."""
        rank = self.slowest
        waits = {name: s for name, s in self.shares[rank].items() if name.startswith("waiting")}
        longest = max(waits, key=lambda name: waits[name], default=None)
        waiting = f", {waits[longest]:.3g} s {longest}" if longest else ""
        return (
            f"slowest rank {rank} (host {self.hosts[rank]}): busy {self.busy[rank]:.3g} s a step, the "
            f"median of the others {self.median:.3g} s; most of the difference is {self.cause}{waiting}"
        )

    def encode(self) -> dict[str, Any]:
        ranks = [{"host": host, **times} for host, times in zip(self.hosts, self.shares, strict=True)]
        return {
            "slowest": self.slowest,
            "factor": round(self.factor, 3),
            "cause": self.cause,
            "ranks": ranks,
        }


class Profiler(Observer):
    """Traces some steps of a trainer into out/profile/rank-00000.json."""

    def __init__(self, trainer: Trainer, out: Path, reporter: Reporter) -> None:
        self.path, self.reporter = out / "profile" / f"rank-{trainer.ctx.rank:05d}.json", reporter
        activities = [ProfilerActivity.CPU]
        if trainer.ctx.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # The first two steps compile and fill caches.
        steps = schedule(wait=1, warmup=1, active=3, repeat=1)
        self.tracer = profile(activities=activities, schedule=steps, on_trace_ready=self.write)
        self.tracer.start()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return record_function(MARK + name)

    def after_step(self, outcome: StepOutcome) -> None:
        self.tracer.step()

    def on_run_end(self) -> None:
        """Write the trace if the run ends early. An open tracer would end the process with SIGSEGV."""
        self.tracer.stop()

    def write(self, tracer: profile) -> None:
        steps = tracer.step_num - 2
        if not steps:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            tracer.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"profile=true: cannot write {self.path} ({error}); free some space") from error
        count = f"{steps} steps" if steps > 1 else "1 step"
        self.reporter.note(f"profile of {count}: {self.path} (open it at https://ui.perfetto.dev)")
        # milliseconds a step on the host
        averages = [event for event in tracer.key_averages() if event.key.startswith(MARK)]
        # annotations of the GPU are separate rows
        events = [event for event in averages if event.device_type == DeviceType.CPU]
        for event in sorted(events, key=lambda event: -event.cpu_time_total):
            milliseconds = event.cpu_time_total / 1000 / steps
            self.reporter.note(f"  {event.key.removeprefix(MARK):<12} {milliseconds:10.2f} ms a step")
