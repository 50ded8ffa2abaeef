"""The command `mlm report`, and the checks of its settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlm.cli.command import Command
from mlm.config.tree import out_of_range
from mlm.tracking.config import ReportConfig
from mlm.tracking.history import FILE_NAME, SWEEP_FILE
from mlm.util.errors import Absent, Problem
from mlm.util.ownership import kind_of_folder
from mlm.util.results import folder_problem, is_stream

MAX_RUNS = 20
"""Runs whose curves a reader can tell apart."""
ENDINGS = (".html", ".htm")


@dataclass(frozen=True)
class ChosenRuns:
    """Paths that a user named, by what they are."""

    runs: list[str]
    """Run folders."""
    skipped: list[Problem]
    """Others, of which a pattern of the shell names some: `mlm report runs/lr/*`."""
    problems: list[Problem]
    """Paths that are not there, and all if none is a run."""


def check_report(config: ReportConfig) -> list[Problem]:
    """Problems of `mlm report`."""
    fix = "name a run folder: mlm report runs/shakespeare"
    no_run = None if config.runs else Problem(("runs",), "runs=[]: no run", fix)
    problems = [no_run, _page_problem(config), folder_problem(config.out)]
    outside = out_of_range(config)
    return [each for each in problems if each is not None and not each.concerns(outside)]


def preflight(config: ReportConfig) -> list[Problem]:
    """Problems of the folders that are to be runs."""
    chosen = choose(config.runs)
    if len(chosen.runs) > MAX_RUNS:
        fix = "choose some, or write several pages"
        many = Problem(("runs",), f"runs: {len(chosen.runs)} runs; {MAX_RUNS} is the limit", fix)
        return [*chosen.problems, many]
    return chosen.problems


def choose(paths: Sequence[str]) -> ChosenRuns:
    """Tell runs from what else is named beside them."""
    problem_of = {path: _run_problem(path) for path in dict.fromkeys(paths)}
    runs = [path for path, problem in problem_of.items() if problem is None]
    others = [problem for problem in problem_of.values() if problem is not None]
    fatal = [problem for problem in others if not runs or isinstance(problem, Absent)]
    return ChosenRuns(runs, [problem for problem in others if problem not in fatal], fatal)


def _run_problem(path: str) -> Problem | None:
    """The problem of a folder in which no run has begun."""
    folder = Path(path)
    fix = "name a run folder (out=… of mlm pretrain or mlm finetune)"
    try:
        if not folder.exists():
            return Absent.at("runs", path, "no such folder", fix)
        if not folder.is_dir():
            return Problem.at("runs", path, "is not a folder", fix)
        if kind_of_folder(folder) == "run" or (folder / FILE_NAME).is_file():
            return None
        is_sweep = (folder / SWEEP_FILE).is_file()
    except OSError as error:
        return Problem.at("runs", path, f"cannot be read ({error.strerror})", fix)
    if is_sweep:
        return Problem.at("runs", path, "holds a sweep", f"name its runs: mlm report {folder}/*/")
    return Problem.at("runs", path, "holds no run", fix)


def _page_problem(config: ReportConfig) -> Problem | None:
    """The problem of a page that is no file, or does not end in .html; of a folder another check tells."""
    if is_stream(config.out) and config.watch:
        fix = "name a file, such as out=report.html"
        return Problem(("out", "watch"), f"out={config.out}: watch=true writes the page again", fix)
    if is_stream(config.out) or Path(config.out).is_dir() or Path(config.out).suffix in ENDINGS:
        return None
    fix = f"use a file that ends in .html, such as out={Path(config.out).stem or 'report'}.html"
    return Problem.at("out", config.out, "a page ends in .html", fix)


COMMANDS = (
    Command(
        words=("report",),
        also=("dashboard", "plot", "tensorboard"),
        spec=ReportConfig,
        target="mlm.tracking.page.report:run",
        local_check=check_report,
        preflight="mlm.cli.report:preflight",
        positional=("runs",),
        several=True,
        summary="show runs on one page for a browser: curves, settings, incidents, scores",
        about=(
            "Writes one HTML page that opens from disk and loads nothing: loss, validation, gradient norm, "
            "learning rate, throughput and memory over steps, tokens or time, runs overlaid; the settings in "
            "which they differ; samples and loads of experts; incidents, checkpoints and scores with their "
            "receipts. Reads run folders and changes nothing in them."
        ),
        examples=(
            ("One run", "mlm report runs/shakespeare"),
            ("Two runs compared", "mlm report runs/shakespeare runs/longer out=compared.html"),
            ("While a run goes on, from another terminal", "mlm report runs/shakespeare watch=true"),
        ),
    ),
)
