"""One task of a build: all it is told is the path of the plan, the name of its stage and its number."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlm.corpus.stages import clean as clean_stage
from mlm.corpus.stages import match as match_stage
from mlm.corpus.stages import merge as merge_stage
from mlm.corpus.stages import tokenise as tokenise_stage
from mlm.corpus.stages.markers import is_done
from mlm.corpus.stages.plan import Plan, Stage
from mlm.errors import UserError
from mlm.files.atomic import write_atomic

WORK: dict[str, Callable[[Plan, int], None]] = {
    "clean": clean_stage.run,
    "match": match_stage.match,
    "group": match_stage.group,
    "verify": match_stage.verify,
    "gather": match_stage.gather,
    "tokenise": tokenise_stage.run,
    "merge": merge_stage.run,
}


def run_task(path: Path, stage: str, task: int, *, all_cores: bool = False) -> None:
    """Do one task of the plan at `path`, unless it is done. Raises UserError for bad input.

    What is wrong is left in a file as well: a command that submitted the task to a cluster looks there.
    """
    plan = Plan.load(path)
    folder = plan.stages[stage].folder
    if is_done(folder, task):
        return
    try:
        with library_threads(all_cores=all_cores):
            WORK[stage](plan, task)
    except UserError as error:
        write_atomic(fault_path(folder, task), str(error).encode(errors="surrogateescape"))
        raise
    fault_path(folder, task).unlink(missing_ok=True)


def fault_path(folder: Path, task: int) -> Path:
    """Where a task leaves what was wrong with its input."""
    return folder / f"{task:05d}.fault.txt"


def first_fault(stage: Stage) -> str | None:
    """What the first task that failed left, None where none did."""
    for task in range(stage.tasks):
        try:
            return fault_path(stage.folder, task).read_text(errors="surrogateescape")
        except OSError:
            continue
    return None


@contextmanager
def library_threads(*, all_cores: bool) -> Iterator[None]:
    """Tell `tokenizers` whether it may use more cores than the one this task has.

    It looks when it first encodes. Its own thread is a tenth faster than this one with TOKENIZERS_PARALLELISM
    off: measured, not understood.
    """
    wanted = {"TOKENIZERS_PARALLELISM": "true"} | ({} if all_cores else {"RAYON_NUM_THREADS": "1"})
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
