"""TensorBoard and Weights & Biases: optional extras, imported only when asked for."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm.tracking.config import LogConfig
from mlm.tracking.metrics import NO_PARTS, Parts, Sink, StepMetrics, flat, of_parts
from mlm.util.errors import UserError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def missing_extras(config: LogConfig) -> list[str]:
    """Return a line per requested tracker that is not installed. Imports none of them."""
    wanted = (
        ("tensorboard", config.tensorboard, "log.tensorboard=true", "log.tensorboard=false"),
        (
            "wandb",
            config.wandb_project,
            f"log.wandb_project={config.wandb_project}",
            "log.wandb_project=null",
        ),
    )
    return [
        f"{setting} needs {package}, which is not installed: pip install 'mlm[{package}]', or set {off}"
        for package, on, setting, off in wanted
        if on and find_spec(package) is None
    ]


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
    """Return the numbers of a step as tracker tags, without null values."""
    numbers = flat(metrics)
    del numbers["step"]
    return {f"train/{name}": value for name, value in numbers.items() if value is not None}


class TensorBoard(Sink):
    """Writes events to `folder`; events of an earlier attempt after `start_step` are hidden."""

    def __init__(self, folder: Path, start_step: int) -> None:
        self.folder = folder
        self.start_step = start_step
        self.writer: SummaryWriter | None = None

    def start(self, run: dict[str, object]) -> None:
        """Begin."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir=str(self.folder), purge_step=self.start_step + 1)

    def step(self, metrics: StepMetrics) -> None:
        """Take a logged step."""
        self.add(metrics.step, scalars(metrics))

    def validation(self, step: int, loss: float, perplexity: float, parts: Parts = NO_PARTS) -> None:
        """Take a validation."""
        self.add(step, {"validation/loss": loss, "validation/perplexity": perplexity, **of_parts(parts)})

    def scores(self, step: int, split: str, metrics: Parts, *, is_best: bool) -> None:
        """Take the metrics of a split."""
        self.add(step, {f"{split}/{name}": value for name, value in metrics.items()})

    def add(self, step: int, values: dict[str, float]) -> None:
        """Queue values; the writer's own thread writes them."""
        assert self.writer is not None, "TensorBoard.start() comes first"
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """End."""
        if self.writer is not None:
            self.writer.close()


class WeightsAndBiases(Sink):
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

    def step(self, metrics: StepMetrics) -> None:
        """Take a logged step."""
        self.run.log({"step": metrics.step, **scalars(metrics)})

    def validation(self, step: int, loss: float, perplexity: float, parts: Parts = NO_PARTS) -> None:
        """Take a validation."""
        values = {"validation/loss": loss, "validation/perplexity": perplexity, **of_parts(parts)}
        self.run.log({"step": step, **values})

    def scores(self, step: int, split: str, metrics: Parts, *, is_best: bool) -> None:
        """Take the metrics of a split."""
        self.run.log({"step": step, **{f"{split}/{name}": value for name, value in metrics.items()}})

    def close(self) -> None:
        """End."""
        if self.run is not None:
            self.run.finish()
