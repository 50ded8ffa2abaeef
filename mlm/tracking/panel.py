"""Displays of a training run: a live panel on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from mlm.tracking.metrics import NO_PARTS, Eta, Parts, Sink, StepMetrics, name_parts

LOSS_UNIT = "nats per token"
UNITS = (
    "grad_norm L2 norm before clipping; tokens/s of all ranks; TFLOP/s and MFU of the model per device; "
    "memory of rank 0; ETA time left, h:mm:ss"
)
SLOW_S = 10.0  # a step that takes longer shows its micro-batches


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
    """Base of both displays: the header, notes, and the estimate of the time left."""

    def __init__(
        self,
        console: Console,
        *,
        title: str,
        header: Sequence[tuple[str, str]],
        start_step: int,
        total_steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.errors = sys.stderr  # of the process: a live panel replaces it while it is drawn
        self.title = title
        self.header = header
        self.total_steps = total_steps
        self.clock = clock
        self.begin = clock()
        self.done = start_step
        self.resumed = start_step > 0
        self.eta = Eta(total_steps, clock)

    def start(self, run: dict[str, object]) -> None:
        width = max((len(label) for label, _ in self.header), default=0)
        for label, value in self.header:
            self.line(f"{label:<{width}}  {value}")
        if self.resumed:
            self.line(f"{'resumed':<{width}}  after step {self.done}")

    def line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    note = line

    def problem(self, text: str) -> None:
        """Print a problem on stderr; results and progress are on standard output."""
        with suppress(OSError, ValueError):  # its reader may be gone
            print(f"mlm: {text}", file=self.errors, flush=True)

    def saved(self, step: int, path: Path, seconds: float, waited: float, digest: str | None = None) -> None:
        shown = "" if digest is None else f", {digest}"
        self.note(f"saved {path} ({seconds:.1f} s, training waited {waited:.1f} s){shown}")

    def save_failed(self, step: int, error: str) -> None:
        more = ". Training continues; the next save is due as planned" if step < self.total_steps else ""
        self.problem(f"SAVING FAILED at step {step}: {error}{more}")

    def step(self, metrics: StepMetrics) -> None:
        self.done = metrics.step
        self.eta.update(metrics.step, metrics.step_time_s)


class PlainLines(Display):
    """One line per report, of names and values that `split()` parses. Their units follow the header."""

    next_sign = SLOW_S
    """Seconds after which the first step is mentioned, if it still runs."""
    is_logged = False
    """True once a step is."""

    def start(self, run: dict[str, object]) -> None:
        super().start(run)
        if self.header:
            width = max(len(label) for label, _ in self.header)
            self.line(f"{'units':<{width}}  loss {run.get('loss_unit', LOSS_UNIT)}; {UNITS}")

    def micro_batch(self, number: int, count: int) -> None:
        """Show that the first step is in progress, ever more rarely."""
        elapsed = self.clock() - self.begin
        if not self.is_logged and elapsed >= self.next_sign:
            self.next_sign = 2 * elapsed
            now = f"micro_batch {number}/{count}  elapsed {duration(elapsed)}"
            self.line(f"{self.counter(self.done + 1)}  {now}")

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self.is_logged = True
        self.line(self.counter(metrics.step) + "  " + self.numbers(metrics))

    def validation(self, step: int, loss: float, perplexity: float, parts: Parts = NO_PARTS) -> None:
        pairs = [f"validation_loss {loss:.4f}", f"validation_ppl {perplexity:.2f}"]
        pairs += [f"{name} {part:.4f}" for name, part in name_parts(parts).items()]
        self.line("  ".join([self.counter(step), *pairs]))

    def scores(self, step: int, split: str, metrics: Parts, *, is_best: bool) -> None:
        pairs = [f"{name} {value:.4f}" for name, value in metrics.items()]
        self.line(
            "  ".join([self.counter(step), f"scored {split}", *pairs, *(["best yes"] if is_best else [])])
        )

    def counter(self, step: int) -> str:
        total = str(self.total_steps)
        return f"step {f'{step}/{total}':>{2 * len(total) + 1}}"

    def numbers(self, m: StepMetrics) -> str:
        pairs = [
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
        return "  ".join(pairs)


class LivePanel(Display):
    """A panel at the bottom of the terminal, drawn by its own thread from the last numbers reported."""

    working: tuple[int, int] | None = None
    """Micro-batch in progress, of how many."""
    end: float | None = None
    metrics: StepMetrics | None = None
    validated: tuple[int, float, float, Parts] | None = None
    scored: Mapping[str, tuple[int, Parts, bool]] = MappingProxyType({})
    """By split: step, metrics, True if they are the best so far."""
    announcement: str | None = None
    live: Live | None = None
    loss_unit = LOSS_UNIT

    def start(self, run: dict[str, object]) -> None:
        super().start(run)
        self.loss_unit = str(run.get("loss_unit", LOSS_UNIT))
        self.live = Live(
            console=self.console,
            get_renderable=self.render,
            refresh_per_second=1,  # drawing takes about 4 ms of a core that training uses
            vertical_overflow="crop",
        )
        self.live.start()
        self.console.show_cursor(True)  # kill -9 then leaves nothing to restore

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        self.metrics = metrics

    def validation(self, step: int, loss: float, perplexity: float, parts: Parts = NO_PARTS) -> None:
        self.validated = (step, loss, perplexity, parts)

    def scores(self, step: int, split: str, metrics: Parts, *, is_best: bool) -> None:
        self.scored = {**self.scored, split: (step, metrics, is_best)}

    def advance(self, step: int) -> None:
        self.done, self.working = step, None

    def micro_batch(self, number: int, count: int) -> None:
        self.working = (number, count)

    def problem(self, text: str) -> None:
        """Print a problem above the panel, and on stderr where that is not the panel's terminal."""
        self.line(f"mlm: {text}")
        if not self.errors.isatty():
            super().problem(text)

    def announce(self, text: str) -> bool:
        """Have the panel's thread draw the line, which the panel would otherwise overwrite."""
        self.announcement = text
        return self.live is not None and self.live.is_started

    def close(self) -> None:
        self.end, self.announcement, self.working = self.clock(), None, None
        if self.live is not None:
            self.live.stop()

    def render(self) -> RenderableType:
        counter = "[dim]step[/] [bold]{task.completed:,}/{task.total:,}"
        bar = Progress(TextColumn(counter), BarColumn(None), TaskProgressColumn(), expand=True)
        bar.add_task("", total=max(self.total_steps, 1), completed=self.done)
        # four columns stay free for ^C^C, which would wrap and shift the panel by a line
        width = max(20, min(110, self.console.width - 4))
        inside = width - 4  # of the border
        rows: list[RenderableType] = [bar]
        if self.metrics is not None:
            rows.append(Columns(self.cells(self.metrics), equal=True, expand=True, padding=(0, 2)))
            if self.metrics.loads is not None:
                ratios = [f"{value:.2f}" for value in self.metrics.loads.imbalance.values()]
                rows.append(flow("largest over mean expert, by layer", ratios, inside))
                if share := self.metrics.loads.dropped_share:
                    rows.append(cell("choices dropped", f"{share:.2%}", "yellow"))
        if self.validated is not None:
            step, loss, perplexity, parts = self.validated
            numbers = [f"loss {loss:.4f}", f"perplexity {perplexity:.2f}", f"step {step:,}"]
            rows.append(flow("validation", numbers, inside))
            if parts:
                corpora = [cell(name, f"{part:.4f}") for name, part in parts.items()]
                rows.append(Columns(corpora, equal=True, expand=True, padding=(0, 2)))
        for split, (step, metrics, is_best) in self.scored.items():
            values = [f"{name} {value:.4f}" for name, value in metrics.items()]
            rows.append(flow(split, [*values, f"step {step:,}", *(["best"] if is_best else [])], inside))
        if self.working and (self.metrics is None or self.metrics.step_time_s >= SLOW_S):
            number, count = self.working
            rows.append(cell("in progress", f"step {self.done + 1:,}, micro-batch {number:,} of {count:,}"))
        now = self.clock() if self.end is None else self.end
        rows.append(times := cell("elapsed", duration(now - self.begin)))
        if self.end is None:
            times.append("   ").append_text(cell("left", duration(self.eta.seconds())))
        if self.announcement is not None:
            rows.append(Text(self.announcement, style="bold yellow"))
        units = [f"loss {self.loss_unit}", "TFLOP/s and MFU per device", "memory of rank 0"]
        rows.append(flow("", units, inside, style="dim"))
        return Panel(Group(*rows), title=Text(self.title, style="bold"), border_style="dim", width=width)

    def cells(self, m: StepMetrics) -> list[Text]:
        bad = not math.isfinite(m.loss)
        cells = [
            cell("loss", f"{m.loss:.4f}", "bold red" if bad else "bold green"),
            *(cell(name.replace("_", " "), f"{part:.4f}") for name, part in m.parts.items()),
            cell("lr", f"{m.lr:.3e}"),
            cell("gradient norm", format_significant(m.grad_norm)),
        ]
        if m.loss_scale is not None:
            mantissa, exponent = math.frexp(m.loss_scale)
            scale = f"2^{exponent - 1}" if mantissa == 0.5 else f"{m.loss_scale:g}"
            cells.append(cell("loss scale", scale))
        if m.skipped_steps:
            cells.append(cell("skipped steps", f"{m.skipped_steps:,}", "yellow"))
        step_time = f"{format_significant(m.step_time_s)} s"
        if m.step_time_s < 1:
            step_time = f"{format_significant(1000 * m.step_time_s)} ms"
        return [
            *cells,
            cell("tokens seen", format_count(m.tokens)),
            cell("tokens/s", f"{m.tokens_per_s:,.0f}"),
            cell("step time", step_time),
            cell("TFLOP/s", format_significant(m.tflops)),
            cell("MFU", "n/a" if m.mfu is None else f"{m.mfu:.1%}"),
            cell("memory", f"{m.memory_bytes / 2**30:.2f} GiB"),
        ]


def cell(label: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, style), no_wrap=True, overflow="ellipsis")


def flow(label: str, items: Sequence[str], width: int, style: str = "bold") -> Text:
    """Return a dim label and items, in as many lines of `width` as they need: broken between items."""
    lines, start = [list[str]()], f"{label} " if label else ""
    for item in items:
        if lines[-1] and len(start) + len(" · ".join([*lines[-1], item])) > width:
            lines.append([])
        lines[-1].append(item)
    indent = "\n" + " " * len(start)
    shown = indent.join(" · ".join(line) for line in lines)
    return Text.assemble((start, "dim"), (shown, style), no_wrap=True, overflow="ellipsis")
