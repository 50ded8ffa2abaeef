"""The reporter of a training run: rank 0 writes to metrics.jsonl, the terminal and the trackers.

TensorBoard and Weights & Biases are optional extras, imported only when asked for.
"""

import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

import torch
from rich.console import Console

import mlm
from mlm.tracking.config import LogConfig, missing_extras
from mlm.tracking.history import FILE_NAME, History
from mlm.tracking.metrics import NO_PARTS, Parts, Sink, StepMetrics, flatten_metrics, name_parts
from mlm.tracking.panel import Display, LivePanel, PlainLines
from mlm.util.errors import UserError
from mlm.util.system import LastingStream
from mlm.util.terminal import Screen

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Reporter:
    """Reports a run to metrics.jsonl, the terminal and the trackers, between `with` and its end.

    On ranks other than the main one every method returns at once. However the block ends, the terminal is
    left as it was and every file is closed.

    `header` holds rows for the terminal (run, model, layout, …); `run` the JSON values of the record of kind
    "run" (config digest, layout, …). `start_step` steps are done already.
    Raises UserError if a tracker's extra is not installed, or, at `with`, if `out` cannot be written.
    """

    def __init__(
        self,
        out: Path,
        *,
        total_steps: int,
        start_step: int,
        config: LogConfig,
        is_main: bool,
        header: Sequence[tuple[str, str]],
        run: Mapping[str, object] | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sinks: list[Sink] = []
        self.stack = ExitStack()
        self.done = start_step
        if not is_main:
            return
        versions = {"mlm": mlm.__version__, "torch": torch.__version__, "python": platform.python_version()}
        self.run = {"start_step": start_step, "total_steps": total_steps, "versions": versions, **(run or {})}
        trackers = build_trackers(out, config, start_step)
        display = make_display(
            console or training_console(config.live, out / FILE_NAME),
            live=config.live,
            title=dict(header).get("run", out.name),
            header=header,
            start_step=start_step,
            total_steps=total_steps,
            clock=clock,
        )
        # The display starts last and stops first: a tracker that fails to start finds a plain terminal.
        self.sinks = [History(out / FILE_NAME, start_step, warn=display.problem), *trackers, display]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close)
                sink.start(self.run)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.event("failed", {"step": self.done, "error": f"{name}{error}".partition("\n")[0]})
        self.stack.close()

    def step(self, metrics: StepMetrics) -> None:
        """Report a logged step."""
        for sink in self.sinks:
            sink.step(metrics)

    def validation(self, step: int, loss: float, perplexity: float, parts: Parts = NO_PARTS) -> None:
        """Report a validation after `step`; `loss` in nats per token, `parts` that of a blend's corpora."""
        for sink in self.sinks:
            sink.validation(step, loss, perplexity, parts)

    def scores(self, step: int, split: str, metrics: Parts, *, is_best: bool) -> None:
        """Report the metrics of a split of a task after `step`, and whether they are the best so far."""
        for sink in self.sinks:
            sink.scores(step, split, metrics, is_best=is_best)

    def saved(self, step: int, path: Path, seconds: float, waited: float) -> None:
        """Report a checkpoint of `step` written to `path` in `seconds`, for which training `waited`."""
        for sink in self.sinks:
            sink.saved(step, path, seconds, waited)

    def save_failed(self, step: int, error: str) -> None:
        """Report that the checkpoint of `step` could not be written."""
        for sink in self.sinks:
            sink.save_failed(step, error)

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Record what else happened, such as an incident; `fields` has its step."""
        for sink in self.sinks:
            sink.event(kind, fields)

    def rewound(self, step: int) -> None:
        """Report that training returned to the checkpoint of `step`."""
        for sink in self.sinks:
            sink.rewound(step)

    def announce(self, text: str) -> bool:
        """Show that a stop was requested; False if no display can. Safe inside a signal handler."""
        return sum(sink.announce(text) for sink in self.sinks) > 0

    def note(self, text: str) -> None:
        """Show the user a line."""
        for sink in self.sinks:
            sink.note(text)

    def problem(self, text: str) -> None:
        """Show the user a problem that does not end the run."""
        for sink in self.sinks:
            sink.problem(text)

    def advance(self, step: int) -> None:
        """Move the progress bar to `step` issued steps; reads nothing from the device."""
        self.done = step
        for sink in self.sinks:
            sink.advance(step)

    def micro_batch(self, number: int, count: int) -> None:
        """Note progress within a step; reads nothing from the device."""
        for sink in self.sinks:
            sink.micro_batch(number, count)


def training_console(live: str, metrics: Path) -> Console:
    """Return a console on standard output whose loss does not end the run."""
    stream = LastingStream(sys.stdout, f"training continues, its numbers are in {metrics}")
    options = {"force_terminal": True} if live == "on" else {}
    return Screen(file=cast(TextIO, stream), **options)


def make_display(
    console: Console,
    *,
    live: str,
    title: str,
    header: Sequence[tuple[str, str]],
    start_step: int,
    total_steps: int,
    clock: Callable[[], float],
) -> Display:
    """Return the live panel if log.live and the terminal allow it, plain lines otherwise."""
    can = console.is_terminal and not console.is_dumb_terminal
    kind = LivePanel if live == "on" or (live == "auto" and can) else PlainLines
    return kind(
        console, title=title, header=header, start_step=start_step, total_steps=total_steps, clock=clock
    )


def build_trackers(out: Path, config: LogConfig, start_step: int) -> list[Sink]:
    """Return the requested trackers. Raises UserError if one is not installed."""
    if missing := missing_extras(config):
        raise UserError("; ".join(missing))
    trackers: list[Sink] = []
    if config.tensorboard:
        trackers.append(TensorBoard(out / "tensorboard", start_step))
    if config.wandb_project:
        trackers.append(WeightsAndBiases(out, config.wandb_project))
    return trackers


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """Return the single numbers of a step as tracker tags, without null values."""
    numbers = flatten_metrics(metrics)
    del numbers["step"]
    return {f"train/{name}": value for name, value in numbers.items() if isinstance(value, int | float)}


class Tracker(Sink, ABC):
    """A destination that takes numbers by tag and step."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue values; the tracker's own thread writes them."""

    def step(self, metrics: StepMetrics) -> None:
        """Take a logged step."""
        self.log(metrics.step, scalars(metrics))

    def validation(self, step: int, loss: float, perplexity: float, parts: Parts = NO_PARTS) -> None:
        """Take a validation."""
        self.log(step, {"validation/loss": loss, "validation/perplexity": perplexity, **name_parts(parts)})

    def scores(self, step: int, split: str, metrics: Parts, *, is_best: bool) -> None:
        """Take the metrics of a split."""
        self.log(step, {f"{split}/{name}": value for name, value in metrics.items()})


class TensorBoard(Tracker):
    """Writes events to `folder`; events of an earlier attempt after `start_step` are hidden."""

    def __init__(self, folder: Path, start_step: int) -> None:
        self.folder = folder
        self.start_step = start_step
        self.writer: SummaryWriter | None = None

    def start(self, run: dict[str, object]) -> None:
        """Begin."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir=str(self.folder), purge_step=self.start_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue values."""
        assert self.writer is not None, "TensorBoard.start() comes first"
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """End."""
        if self.writer is not None:
            self.writer.close()


class WeightsAndBiases(Tracker):
    """Logs to a project; each attempt is a separate W&B run, grouped by the run directory's name."""

    def __init__(self, out: Path, project: str) -> None:
        self.out = out
        self.project = project
        self.run: Any = None  # wandb.Run

    def start(self, run: dict[str, object]) -> None:
        """Open the W&B run. Raises UserError if W&B rejects it (no login, no network)."""
        import wandb

        name = self.out.resolve().name
        try:
            self.run = wandb.init(project=self.project, name=name, group=name, dir=str(self.out), config=run)
        except wandb.errors.Error as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise UserError(
                f"log.wandb_project={self.project}: {reason}. Run `wandb login`, or set WANDB_MODE=offline, "
                "or log.wandb_project=null"
            ) from error
        # Our own step axis: W&B's counter must never fall, ours does when a run resumes.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send values."""
        self.run.log({"step": step, **values})

    def close(self) -> None:
        """End."""
        if self.run is not None:
            self.run.finish()
