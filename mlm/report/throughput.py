"""How fast a run goes, and how long it will take. Nothing here waits for the device."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Speed over a window of steps; the fields of StepMetrics with these names."""

    step_time_s: float
    tokens_per_s: float
    tflops: float
    mfu: float | None


class Throughput:
    """Stopwatch of training steps. Validation and saving are left out: pause() before, start() after.

    `tokens_per_step` counts the global batch where all steps are alike; else count() is told.
    `flops_per_token` is ModelConfig.flops_per_token, `devices` the world size, `peak` the FLOP/s of one
    device or None. Call lap() and pause() after the device is synchronised, or steps still in flight fall out
    of the window.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_per_token: float,
        devices: int,
        peak: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token / devices  # on one device
        self.peak = peak
        self.clock = clock
        self.since: float | None = None  # None while paused
        self.seconds = 0.0
        self.steps = self.tokens = 0

    def start(self) -> None:
        """Let the watch run; does nothing if it does."""
        if self.since is None:
            self.since = self.clock()

    def pause(self) -> None:
        """Stop the watch; does nothing if it stands."""
        if self.since is not None:
            self.seconds += self.clock() - self.since
            self.since = None

    def count(self, tokens: int | None = None) -> None:
        """One step is done, of so many tokens; None means tokens_per_step."""
        self.steps += 1
        self.tokens += self.tokens_per_step if tokens is None else tokens

    def lap(self) -> Rates:
        """Rates over the steps since the last lap, and begin the next. At least one step must be counted."""
        assert self.steps, "lap() before any count()"
        running = self.since is not None
        self.pause()
        step_time = max(self.seconds / self.steps, 1e-9)
        rate = self.tokens / self.steps / step_time
        self.seconds, self.steps, self.tokens = 0.0, 0, 0
        if running:
            self.start()
        flops = self.flops_per_token * rate
        mfu = flops / self.peak if self.peak else None
        return Rates(step_time, rate, flops / 1e12, mfu)


class Eta:
    """Seconds to the last step, by the wall clock: validation and saving count, as they will come again.

    The first call of update() is the anchor: what was slow before it (compilation, first allocations) doesn't
    come again. Until there is a second, `step_time_s` of the first must do.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = total_steps
        self.clock = clock
        self.anchor: tuple[int, float] | None = None
        self.last = (0, 0.0)  # step, time
        self.step_time = 0.0

    def update(self, step: int, step_time_s: float) -> None:
        """`step` was logged just now."""
        self.last = (step, self.clock())
        if self.anchor is None:
            self.anchor = self.last
        steps = step - self.anchor[0]
        self.step_time = (self.last[1] - self.anchor[1]) / steps if steps > 0 else step_time_s

    def seconds(self) -> float | None:
        """Seconds left from now, at least 0; None before the first update()."""
        if self.anchor is None:
            return None
        step, then = self.last
        return max(0.0, (self.total_steps - step) * self.step_time - (self.clock() - then))
