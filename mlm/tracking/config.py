"""Settings of what a run reports, and of `mlm report`."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

from mlm.config.fields import POSITIVE, Aliases, Bound, InputPath, OnlyIf, ResultFile

WAIT = Bound(lambda x: 0 < x <= 86_400, "above 0 and at most 86400, a day")
"""Longer waits overflow a browser's timer, which then reloads without a pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Reports during training. metrics.jsonl is always written."""

    every: Annotated[int, POSITIVE, Aliases("log_interval", "logging_steps")] = 10
    """Steps between logged lines; numbers leave the device only then."""
    live: Literal["auto", "on", "off"] = "auto"
    """Live panel: auto shows it on a terminal, plain lines elsewhere."""
    tensorboard: bool = False
    """Write TensorBoard events below out/tensorboard (needs the extra `mlm[tensorboard]`)."""
    wandb_project: str | None = None
    """Weights & Biases project to log to (needs the extra `mlm[wandb]`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """The run spec of `mlm report`: runs on one page."""

    runs: tuple[InputPath, ...]
    """Run folders, at most 20; other paths among them are skipped."""
    out: ResultFile = "report.html"
    """Page to write, .html."""
    watch: bool = False
    """Write the page again while the runs go on, until they are finished or Ctrl-C."""
    every_s: Annotated[float, WAIT, OnlyIf("watch")] = 5.0
    """Seconds between updates with watch=true, at most a day (86400)."""


def missing_extras(config: LogConfig) -> list[str]:
    """Return a line per requested tracker that is not installed. Imports none of them."""
    project = config.wandb_project
    wanted = (
        ("tensorboard", config.tensorboard, "log.tensorboard=true", "log.tensorboard=false"),
        ("wandb", bool(project), f"log.wandb_project={project}", "log.wandb_project=null"),
    )
    return [
        f"{setting} needs {package}, which is not installed: pip install 'mlm[{package}]', or set {off}"
        for package, is_on, setting, off in wanted
        if is_on and find_spec(package) is None
    ]
