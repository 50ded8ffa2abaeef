"""The lines that a training run prints: names and values, one line per report."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mlm.tracking.metrics import NO_PARTS, Eta, Parts, Sink, StepMetrics, name_parts

LOSS_UNIT = "nats per token"
UNITS = (
    "grad_norm L2 norm before clipping; tokens/s of all ranks; TFLOP/s and MFU of the model per device; "
    "memory of rank 0; ETA time left, h:mm:ss"
)
SLOW_S = 10.0  # seconds until the first step shows its micro-batches


def duration(seconds: float | None) -> str:
    """Return seconds as h:mm:ss, with days in front if any: 0:01:40, 2d03:00:00; -:--:-- for none."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--:--"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}d{h:02}:{m:02}:{s:02}" if days else f"{h}:{m:02}:{s:02}"


def format_significant(value: float) -> str:
    """Return a positive number with about four digits: 0.0712, 3.142, 412.7, 12345."""
    if not math.isfinite(value) or value <= 0:
        return f"{value:g}"
    return f"{value:.{max(0, min(6, 3 - math.floor(math.log10(value))))}f}"


def format_count(value: float) -> str:
    """Return a number in its largest unit: 2M, 1.5B."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


class Display(Sink):
    """One line per report, of names and values that `split()` parses. Their units follow the header."""

    next_sign = SLOW_S
    """Seconds after which the progress of the first step is shown."""
    is_logged = False
    """True after the first logged step."""

    def __init__(
        self,
        console: Console,
        *,
        header: Sequence[tuple[str, str]],
        start_step: int,
        total_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.header = console, header
        self.done, self.total_steps = start_step, total_steps
        self.clock, self.begin = clock, clock()
        self.eta = Eta(total_steps, clock)

    def start(self, run: dict[str, object]) -> None:
        if not self.header:
            return
        width = max(len(label) for label, _ in self.header)
        resumed = [("resumed", f"after step {self.done}")] if self.done > 0 else []
        units = ("units", f"loss {run.get('loss_unit', LOSS_UNIT)}; {UNITS}")
        for label, value in (*self.header, *resumed, units):
            self.note(f"{label:<{width}}  {value}")

    def note(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def problem(self, text: str) -> None:
        with suppress(OSError, ValueError):  # closed stderr
            print(f"mlm: {text}", file=sys.stderr, flush=True)

    def saved(self, step: int, path: Path, seconds: float, waited: float, digest: str | None = None) -> None:
        shown = "" if digest is None else f", {digest}"
        self.note(f"saved {path} ({seconds:.1f} s, training waited {waited:.1f} s){shown}")

    def save_failed(self, step: int, error: str) -> None:
        more = ". Training continues; the next save is due as planned" if step < self.total_steps else ""
        self.problem(f"SAVING FAILED at step {step}: {error}{more}")

    def micro_batch(self, number: int, count: int) -> None:
        """Show the progress of the first step, at doubling intervals."""
        elapsed = self.clock() - self.begin
        if not self.is_logged and elapsed >= self.next_sign:
            self.next_sign = 2 * elapsed
            now = f"micro_batch {number}/{count}  elapsed {duration(elapsed)}"
            self.note(f"{self.counter(self.done + 1)}  {now}")

    def step(self, metrics: StepMetrics) -> None:
        m = metrics
        self.done, self.is_logged = m.step, True
        self.eta.update(m.step, m.step_time_s)
        pairs = [
            self.counter(m.step),
            f"loss {m.loss:8.4f}",
            *(f"{name} {part:.4f}" for name, part in m.parts.items()),
            f"lr {m.lr:.3e}",
            f"grad_norm {format_significant(m.grad_norm):>7}",
        ]
        if m.loads is not None:
            pairs.append(f"imbalance {max(m.loads.imbalance.values()):5.2f}")
            pairs.append(f"dropped {m.loads.dropped_share:6.2%}")
        if m.loss_scale is not None:
            pairs += [f"loss_scale {m.loss_scale:<10.0f}", f"skipped {m.skipped_steps:>3}"]
        pairs += [
            f"tokens/s {m.tokens_per_s:>9.0f}",
            f"TFLOP/s {format_significant(m.tflops):>7}",
            f"MFU {f'{m.mfu:6.1%}' if m.mfu is not None else '   n/a'}",
            f"memory {m.memory_bytes / 2**30:7.2f}GiB",
            f"ETA {duration(self.eta.seconds())}",
        ]
        self.note("  ".join(pairs))

    def validation(self, step: int, loss: float, perplexity: float, parts: Parts = NO_PARTS) -> None:
        pairs = [f"validation_loss {loss:.4f}", f"validation_ppl {perplexity:.2f}"]
        pairs += [f"{name} {part:.4f}" for name, part in name_parts(parts).items()]
        self.note("  ".join([self.counter(step), *pairs]))

    def scores(self, step: int, split: str, metrics: Parts, *, is_best: bool) -> None:
        pairs = [f"{name} {value:.4f}" for name, value in metrics.items()]
        best = ["best yes"] if is_best else []
        self.note("  ".join([self.counter(step), f"scored {split}", *pairs, *best]))

    def counter(self, step: int) -> str:
        total = str(self.total_steps)
        return f"step {f'{step}/{total}':>{2 * len(total) + 1}}"
