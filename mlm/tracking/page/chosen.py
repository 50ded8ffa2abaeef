"""Run folders among the paths that a user named."""

from collections.abc import Sequence
from pathlib import Path

from mlm.tracking.history import FILE_NAME, SWEEP_FILE
from mlm.util.errors import Absent, Problem
from mlm.util.ownership import kind_of_folder


def choose_runs(paths: Sequence[str]) -> tuple[list[str], list[Problem], list[Problem]]:
    """Return run folders, others that are skipped, and problems: absent paths, or all if none is a run.

    A pattern of the shell names other paths too: `mlm report runs/lr/*`.
    """
    problem_of = {path: _run_problem(path) for path in dict.fromkeys(paths)}
    runs = [path for path, problem in problem_of.items() if problem is None]
    others = [problem for problem in problem_of.values() if problem is not None]
    fatal = [problem for problem in others if not runs or isinstance(problem, Absent)]
    return runs, [problem for problem in others if problem not in fatal], fatal


def _run_problem(path: str) -> Problem | None:
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
