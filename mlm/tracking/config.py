"""Settings of what a run reports, and of `mlm report`."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from mlm.config.fields import POSITIVE, Aliases, Bound, InputPath, OnlyIf, ResultFile
from mlm.tracking.history import FILE_NAME
from mlm.util.errors import Absent, Problem
from mlm.util.ownership import kind_of_folder

WAIT = Bound(lambda x: 0 < x <= 86_400, "above 0 and at most 86400, a day")
"""Longer waits overflow a browser's timer, which then reloads at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Reports during training. metrics.jsonl is always written."""

    every: Annotated[int, POSITIVE, Aliases("log_interval", "logging_steps")] = 10
    """Steps between logged lines; numbers leave the device only then."""
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
    """Return a line per requested tracker that is not installed, without importing any."""
    project = config.wandb_project
    trackers = (
        ("tensorboard", config.tensorboard, "log.tensorboard=true", "log.tensorboard=false"),
        ("wandb", bool(project), f"log.wandb_project={project}", "log.wandb_project=null"),
    )
    return [
        f"{setting} needs {package}, which is not installed: pip install 'mlm[{package}]', or set {off}"
        for package, is_on, setting, off in trackers
        if is_on and find_spec(package) is None
    ]


def choose_runs(paths: Sequence[str]) -> tuple[list[str], list[Problem], list[Problem]]:
    """Return run folders, skipped paths, and problems: missing paths, or all if none is a run.

    Shell patterns match other paths too: `mlm report runs/lr/*`.
    """
    runs, rejected = list[str](), list[Problem]()
    fix = "name a run folder (out=… of mlm pretrain or mlm finetune)"
    for path in dict.fromkeys(paths):
        folder = Path(path)
        try:
            if not folder.exists():
                rejected.append(Absent.at("runs", path, "no such folder", fix))
            elif not folder.is_dir():
                rejected.append(Problem.at("runs", path, "is not a folder", fix))
            elif kind_of_folder(folder) == "run" or (folder / FILE_NAME).is_file():
                runs.append(path)
            else:
                rejected.append(Problem.at("runs", path, "holds no run", fix))
        except OSError as error:
            rejected.append(Problem.at("runs", path, f"cannot be read ({error.strerror})", fix))
    fatal = [problem for problem in rejected if not runs or isinstance(problem, Absent)]
    return runs, [problem for problem in rejected if problem not in fatal], fatal
