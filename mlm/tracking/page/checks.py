"""Checks of the settings of `mlm report`."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from mlm.config.tree import out_of_range
from mlm.tracking.history import FILE_NAME
from mlm.tracking.page.config import ReportConfig
from mlm.util.errors import Absent, Problem
from mlm.util.ownership import kind_of_folder
from mlm.util.results import folder_problem, is_stream

MOST_RUNS = 20
"""Runs whose curves a reader can tell apart."""
ENDINGS = (".html", ".htm")


def check_report(config: ReportConfig) -> list[Problem]:
    """Problems of `mlm report`."""
    found = [_named(config), _ending(config), folder_problem(config.out)]
    outside = out_of_range(config)
    return [each for each in found if each is not None and not each.concerns(outside)]


def preflight(config: ReportConfig) -> list[Problem]:
    """Problems of the folders that are to be runs."""
    chosen = choose(config.runs)
    if len(chosen.runs) > MOST_RUNS:
        fix = "choose some, or write several pages"
        many = Problem(("runs",), f"runs: {len(chosen.runs)} runs; {MOST_RUNS} is the limit", fix)
        return [*chosen.problems, many]
    return chosen.problems


@dataclass(frozen=True)
class Chosen:
    """Paths that a user named, by what they are."""

    runs: list[str]
    """Run folders."""
    skipped: list[Problem]
    """Others, of which a pattern of the shell names some: `mlm report runs/lr/*`."""
    problems: list[Problem]
    """Paths that are not there, and all if none is a run."""


def choose(paths: Sequence[str]) -> Chosen:
    """Tell runs from what else is named beside them."""
    found = {path: _is_run(path) for path in dict.fromkeys(paths)}
    runs = [path for path, problem in found.items() if problem is None]
    others = [problem for problem in found.values() if problem is not None]
    fatal = [problem for problem in others if not runs or isinstance(problem, Absent)]
    return Chosen(runs, [problem for problem in others if problem not in fatal], fatal)


def _named(config: ReportConfig) -> Problem | None:
    if config.runs:
        return None
    return Problem(("runs",), "runs=[]: no run", "name a run folder: mlm report runs/shakespeare")


def _is_run(path: str) -> Problem | None:
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
        is_sweep = (folder / import_module("mlm.tracking.sweep").JSON).is_file()  # late: it draws tables
    except OSError as error:
        return Problem.at("runs", path, f"cannot be read ({error.strerror})", fix)
    if is_sweep:
        return Problem.at("runs", path, "holds a sweep", f"name its runs: mlm report {folder}/*/")
    return Problem.at("runs", path, "holds no run", fix)


def _ending(config: ReportConfig) -> Problem | None:
    if is_stream(config.out) and config.watch:
        fix = "name a file, such as out=report.html"
        return Problem(("out", "watch"), f"out={config.out}: watch=true writes the page again", fix)
    if is_stream(config.out) or Path(config.out).is_dir():  # a folder is reported with all other results
        return None
    if Path(config.out).suffix in ENDINGS:
        return None
    fix = f"use a file that ends in .html, such as out={Path(config.out).stem or 'report'}.html"
    return Problem.at("out", config.out, "a page ends in .html", fix)
