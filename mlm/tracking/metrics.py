"""Numbers of a training run: steps, rates, time left, and the interface that takes them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

Parts = Mapping[str, float]
"""Numbers by name: parts of the loss, and in a validation the loss on each corpus of a blend."""
NO_PARTS: Parts = MappingProxyType({})


@dataclass(frozen=True)
class ExpertLoads:
    """Loads of the experts in a step: tokens of the global batch that chose each."""

    counts: Mapping[int, Sequence[int]]
    """[E] by layer with experts."""
    dropped: Mapping[int, Sequence[int]]
    """[E] by layer: tokens beyond an expert's capacity."""

    @property
    def imbalance(self) -> dict[int, float]:
        """Largest over mean load, by layer: from 1 (even) to E over experts per token."""
        return {
            layer: max(counts) * len(counts) / max(1, sum(counts))
            for layer, counts in sorted(self.counts.items())
        }

    @property
    def dropped_share(self) -> float:
        counts, dropped = (sum(map(sum, by_layer.values())) for by_layer in (self.counts, self.dropped))
        return dropped / max(1, counts)

    def summary(self) -> dict[str, Any]:
        by_layer = {str(layer): round(value, 4) for layer, value in self.imbalance.items()}
        largest, dropped = max(by_layer.values()), round(self.dropped_share, 6)
        return {"imbalance": largest, "imbalance_by_layer": by_layer, "dropped": dropped}


@dataclass(frozen=True)
class StepMetrics:
    """Numbers of one logged step, already on the host. Rates cover the steps since the last logged one."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    """Mean loss of the global batch, in nats per token; for a BERT the sum of both heads' losses."""
    lr: float
    """Learning rate this step used."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    loss_scale: float | None
    """fp16: factor on the loss before backward; None in other formats."""
    skipped_steps: int
    """Steps skipped so far: not finite, or in fp16 an overflow."""
    tokens: int
    """Tokens consumed so far, over all ranks and attempts."""
    tokens_per_s: float
    """Tokens per second of the whole job."""
    step_time_s: float
    """Seconds per step, without validation and saving."""
    tflops: float
    """Model TFLOP/s of one device, recomputation not counted."""
    mfu: float | None
    """Model FLOP/s as a fraction of the device's peak; None if no peak is known."""
    memory_bytes: int
    """Peak memory of this rank's device; resident set of the process on CPU."""
    parts: Parts = field(default_factory=dict)
    """Parts of the loss, and accuracies: mlm_loss, sop_loss, mlm_accuracy, sop_accuracy."""
    loads: ExpertLoads | None = None
    """Loads of this step; None without experts, or if they are frozen."""


def flatten_metrics(metrics: StepMetrics) -> dict[str, Any]:
    named = {field.name: getattr(metrics, field.name) for field in fields(metrics)}
    del named["parts"], named["loads"]
    return {**named, **metrics.parts, **(metrics.loads.summary() if metrics.loads else {})}


class Sink:
    """A destination of reports. Subclasses override the methods they need."""

    def start(self, run: dict[str, object]) -> None:
        """Begin; `run` is the record of the configuration."""

    def step(self, metrics: StepMetrics) -> None:
        """Take a logged step."""

    def validation(self, step: int, loss: float, perplexity: float, parts: Parts = NO_PARTS) -> None:
        """Take a validation after `step`: loss in nats per token; `parts` has each blended corpus's."""

    def scores(self, step: int, split: str, metrics: Parts, *, is_best: bool) -> None:
        """Take the metrics of a task's split after `step`; `is_best` if they are the best so far."""

    def saved(self, step: int, path: Path, seconds: float, waited: float, digest: str | None = None) -> None:
        """Take a checkpoint written in `seconds`, of which training waited `waited`.

        `digest`: of its tensors, in a run with exact=N.
        """

    def save_failed(self, step: int, error: str) -> None:
        """Take the error of a failed save."""

    def measured(self, step: int, values: Parts) -> None:
        """Take an observer's numbers of a step, by name."""

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Take an event of another kind."""

    def rewound(self, step: int) -> None:
        """Forget the steps after `step`: they are trained again."""

    def note(self, text: str) -> None:
        """Take a line for the user."""

    def problem(self, text: str) -> None:
        """Take a line about a problem."""

    def micro_batch(self, number: int, count: int) -> None:
        """Take the progress of a step: micro-batch `number` of `count` is at its backward pass."""

    def close(self) -> None:
        """End, however the run ends."""


def name_parts(parts: Parts) -> dict[str, float]:
    """Name the losses of a blend's corpora as records and trackers do."""
    return {f"validation/{name}": loss for name, loss in parts.items()}


@dataclass(frozen=True)
class Rates:
    """Speed over a window of steps, as in StepMetrics."""

    step_time_s: float
    tokens_per_s: float
    tflops: float
    mfu: float | None
    steps: int


class Throughput:
    """Stopwatch of training steps. Validation and saving are left out: pause() before, start() after.

    `tokens_per_step`: the global batch if all steps are equal; otherwise pass tokens to `count`.
    `flops_per_token`: from `mlm.models.shape`; `devices`: the world size; `peak`: FLOP/s of a device or None.
    Synchronise the device before lap() and pause(), or they miss steps in flight.
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
        if self.since is None:
            self.since = self.clock()

    def pause(self) -> None:
        if self.since is not None:
            self.seconds += self.clock() - self.since
            self.since = None

    def count(self, tokens: int | None = None) -> None:
        """Count a step of `tokens` tokens; None means tokens_per_step."""
        self.steps += 1
        self.tokens += self.tokens_per_step if tokens is None else tokens

    def lap(self) -> Rates:
        """Return the rates since the last lap, and begin the next. At least one step must be counted."""
        assert self.steps, "lap() before any count()"
        running = self.since is not None
        self.pause()
        steps = self.steps
        step_time = max(self.seconds / steps, 1e-9)
        rate = self.tokens / steps / step_time
        self.seconds, self.steps, self.tokens = 0.0, 0, 0
        if running:
            self.start()
        flops = self.flops_per_token * rate
        mfu = flops / self.peak if self.peak else None
        return Rates(step_time, rate, flops / 1e12, mfu, steps)


class Eta:
    """Seconds to the last step by the wall clock, validation and saving included.

    Rates count from the first update(), after compilation and first allocations. Until the second one the
    first `step_time_s` is used.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_steps = total_steps
        self.clock = clock
        self.anchor: tuple[int, float] | None = None
        self.last = (0, 0.0)  # step, time
        self.step_time = 0.0

    def update(self, step: int, step_time_s: float) -> None:
        self.last = (step, self.clock())
        if self.anchor is None:
            self.anchor = self.last
        steps = step - self.anchor[0]
        self.step_time = (self.last[1] - self.anchor[1]) / steps if steps > 0 else step_time_s

    def seconds(self) -> float | None:
        """Return the seconds left from now, at least 0; None before the first update()."""
        if self.anchor is None:
            return None
        step, updated = self.last
        return max(0.0, (self.total_steps - step) * self.step_time - (self.clock() - updated))
