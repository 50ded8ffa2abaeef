"""The reporter of a training run: rank 0 writes to metrics.jsonl, the terminal and the trackers.

TensorBoard and Weights & Biases are optional extras, imported on request.
"""

import platform
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

import torch
from rich.console import Console

import mlm
from mlm.tracking.config import LogConfig, missing_extras
from mlm.tracking.display import Display
from mlm.tracking.history import FILE_NAME, MetricsFile
from mlm.tracking.metrics import NO_PARTS, Parts, Sink, StepMetrics, flatten_metrics, name_parts
from mlm.util.errors import UserError
from mlm.util.system import LastingStream
from mlm.util.terminal import Screen

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Reporter(Sink):
    """Reports a run to metrics.jsonl, the terminal and the trackers, between `with` and its end.

    On other ranks than the main one every method returns at once. The end of the block closes every file.

    `header`: rows for the terminal (run, model, layout, …); `run`: JSON values of the record of kind "run"
    (config digest, layout, …); `start_step`: steps done before.
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
        """Completed steps, set by the training loop."""
        for name in FORWARDED:
            setattr(self, name, partial(self._call_each, name))
        if not is_main:
            return
        versions = {"mlm": mlm.__version__, "torch": torch.__version__, "python": platform.python_version()}
        self.run = {"start_step": start_step, "total_steps": total_steps, "versions": versions, **(run or {})}
        if missing := missing_extras(config):
            raise UserError("; ".join(missing))
        trackers: list[Sink] = [TensorBoard(out / "tensorboard", start_step)] if config.tensorboard else []
        if config.wandb_project:
            trackers.append(WeightsAndBiases(out, config.wandb_project))
        console = console or training_console(out / FILE_NAME)
        display = Display(console, header=header, start_step=start_step, total_steps=total_steps, clock=clock)
        self.sinks = [MetricsFile(out / FILE_NAME, start_step, warn=display.problem), *trackers, display]

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

    def _call_each(self, name: str, *arguments: Any, **keywords: Any) -> None:
        for sink in self.sinks:
            getattr(sink, name)(*arguments, **keywords)

    def measured(self, step: int, values: Mapping[str, float | torch.Tensor]) -> None:
        """Report numbers by name; waits for the device where they are tensors of one element."""
        if self.sinks:
            numbers = {name: float(value) for name, value in values.items()}
            self._call_each("measured", step, numbers)


FORWARDED = {name for name in vars(Sink) if name[0] != "_"} - {"start", "measured", "close"}
"""Methods that the reporter forwards to each sink unchanged."""


def training_console(metrics: Path) -> Console:
    """Return a console on standard output; a closed one does not end the run."""
    stream = LastingStream(sys.stdout, f"training continues, its numbers are in {metrics}")
    return Screen(file=cast(TextIO, stream))


class Tracker(Sink, ABC):
    """A destination that takes numbers by tag and step."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue values, which the tracker's thread writes."""

    def step(self, metrics: StepMetrics) -> None:
        numbers = flatten_metrics(metrics)
        del numbers["step"]
        scalars = {f"train/{key}": value for key, value in numbers.items() if isinstance(value, int | float)}
        self.log(metrics.step, scalars)

    def measured(self, step: int, values: Parts) -> None:
        self.log(step, values)

    def validation(self, step: int, loss: float, perplexity: float, parts: Parts = NO_PARTS) -> None:
        self.log(step, {"validation/loss": loss, "validation/perplexity": perplexity, **name_parts(parts)})

    def scores(self, step: int, split: str, metrics: Parts, *, is_best: bool) -> None:
        self.log(step, {f"{split}/{name}": value for name, value in metrics.items()})


class TensorBoard(Tracker):
    """Writes events to `folder`; events of an earlier attempt after `start_step` are hidden."""

    def __init__(self, folder: Path, start_step: int) -> None:
        self.folder = folder
        self.start_step = start_step
        self.writer: SummaryWriter | None = None

    def start(self, run: dict[str, object]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir=str(self.folder), purge_step=self.start_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self.writer is not None, "TensorBoard.start() comes first"
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)

    def close(self) -> None:
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
        # A separate step axis: W&B's counter must not decrease, as steps do when a run resumes.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
