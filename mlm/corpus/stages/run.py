"""Running the tasks of a build: one task, or all stages on this machine with progress.

On one machine they run in the standard library's process pool: datatrove's executor waits for ever for a task
whose worker was killed, and when its own process is killed leaves another running.
"""

import multiprocessing.forkserver
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from mlm.corpus.stages import clean as clean_stage
from mlm.corpus.stages import match as match_stage
from mlm.corpus.stages import tokenise as tokenise_stage
from mlm.corpus.stages.plan import BuildPlan, BuildStage
from mlm.corpus.stages.publish import merge
from mlm.util.errors import UserError
from mlm.util.files import write_atomic
from mlm.util.terminal import Advance, progress_bar

STAGE_FUNCTIONS: dict[str, Callable[[BuildPlan, int], None]] = {
    "clean": clean_stage.run,
    "match": match_stage.match,
    "group": match_stage.group,
    "verify": match_stage.verify,
    "gather": match_stage.gather,
    "tokenise": tokenise_stage.run,
    "merge": merge,
}


def run_task(plan: BuildPlan, stage: str, task: int) -> None:
    """Do one task, unless it is done. Raises UserError for bad input.

    The error is written to a file too: a command that submitted the task to a cluster reads it.
    """
    folder = plan.stages[stage].folder
    if plan.stages[stage].is_done(task):
        return
    try:
        STAGE_FUNCTIONS[stage](plan, task)
    except UserError as error:
        write_atomic(error_path(folder, task), str(error).encode(errors="surrogateescape"))
        raise
    error_path(folder, task).unlink(missing_ok=True)


def error_path(folder: Path, task: int) -> Path:
    """Path of a task's error."""
    return folder / f"{task:05d}.error.txt"


def first_error(stage: BuildStage) -> str | None:
    """Return the error of the first task that failed, None if none did."""
    for task in range(stage.tasks):
        try:
            return error_path(stage.folder, task).read_text(errors="surrogateescape")
        except OSError:
            continue
    return None


def run_stages(plan: BuildPlan, workers: int) -> None:
    """Run the unfinished tasks of every stage. Raises UserError for bad input, KeyboardInterrupt."""
    with Workers(workers) as pool:
        for number, stage in enumerate(plan.stages.values(), 1):
            stage.folder.mkdir(parents=True, exist_ok=True)
            for partial in stage.folder.glob(".*.partial"):  # of a task that was killed
                partial.unlink(missing_ok=True)
            stage.reopen_incomplete()
            tasks = stage.unfinished()
            if stage.tasks == len(plan.sizes):
                tasks.sort(key=lambda task: -plan.sizes[task])  # the last to finish is then a short one
            with progress_bar(f"{number}/{len(plan.stages)} {stage.name}", len(tasks)) as advance:
                pool.run(plan, stage, tasks, advance)


class Workers:
    """Worker processes, started when first needed; they end when this process does."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._context = multiprocessing.get_context("forkserver")
        # Workers hold one end of a pipe and exit when the other is closed, by us or by the kernel. An Event
        # would not do: setting it waits for every process that waits for it, also for one that was killed.
        self._ours, self._theirs = self._context.Pipe()
        self._pool: ProcessPoolExecutor | None = None

    def run(self, plan: BuildPlan, stage: BuildStage, tasks: list[int], advance: Advance) -> None:
        """Do the given tasks of a stage, in any order. `advance` receives 1 for each."""
        if self.count == 1 or len(tasks) <= 1:
            for task in tasks:  # here, where `tokenizers` may use all cores
                run_task(plan, stage.name, task)
                advance(1)
            return
        pool = self._pool = self._pool or self._start()
        try:
            doing = [pool.submit(run_task, plan, stage.name, task) for task in tasks]
            # the pool watches the workers it had at the last submission: submit a trifle
            pool.submit(os.getpid)
            for done in as_completed(doing):
                done.result()
                advance(1)
        except BrokenProcessPool as error:
            raise UserError(
                f"executor.workers={self.count}: a worker was killed in stage {stage.name}, perhaps for "
                f"memory: set fewer, and run this again: finished tasks are kept"
            ) from error

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._ours.close()  # workers in the middle of a task end too
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._ours.close()
        self._theirs.close()

    def _start(self) -> ProcessPoolExecutor:
        self._context.set_forkserver_preload(["mlm.corpus.stages.run"])  # imported once, not by every worker
        ignore_interrupts_in_workers()
        return ProcessPoolExecutor(
            self.count,
            mp_context=self._context,
            initializer=start_worker,
            initargs=(self._theirs,),
        )


def ignore_interrupts_in_workers() -> None:
    """Have worker processes ignore Ctrl-C: this process receives it and ends them.

    They inherit the settings of their server.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def start_worker(pipe: Connection) -> None:
    """Give `tokenizers` one core; end this worker when the pipe's other end is closed by us or by a kill."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # read when it first encodes

    def watch() -> None:
        with suppress(EOFError, OSError):
            pipe.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
