"""Running the stages of a build on this machine, one after another, with progress.

In the standard library's process pool: datatrove's executor for one machine waits for ever for a task whose
worker was killed, and when its own process is killed leaves another behind.
"""

import multiprocessing.forkserver
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mlm.corpus.stages.markers import UnitsDone, withdraw_if_damaged
from mlm.corpus.stages.plan import Plan, Stage
from mlm.corpus.stages.sizes import units_of
from mlm.corpus.stages.task import run_task
from mlm.errors import UserError

REFRESH_S = 0.5


def run_stages(plan: Plan, path: Path, workers: int, console: Console) -> None:
    """Run what is left of every stage. Raises UserError for bad input, KeyboardInterrupt."""
    with Workers(workers) as pool:
        for stage in plan.stages.values():
            stage.folder.mkdir(parents=True, exist_ok=True)
            for partial in stage.folder.glob(".*.partial"):  # of a task that was killed
                partial.unlink(missing_ok=True)
            left = [task for task in range(stage.tasks) if not withdraw_if_damaged(stage.folder, task)]
            if left:
                units = units_of(plan, stage.name)
                left.sort(key=lambda task: -units[task])  # the last to end is then a short one
                with watched(plan, stage, units, console):
                    pool.run(path, stage, left)


class Workers:
    """Processes that do tasks; none before they are needed, and none when this process is gone."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._context = multiprocessing.get_context("forkserver")
        # Workers hold one end of a pipe and end when the other is closed, by us or by the kernel. An Event
        # would not do: to set it waits for every process that waits for it, also for one that was killed.
        self._ours, self._theirs = self._context.Pipe()
        self._pool: ProcessPoolExecutor | None = None

    def run(self, path: Path, stage: Stage, tasks: list[int]) -> None:
        """Do the given tasks of a stage, in any order."""
        if self.count == 1 or len(tasks) == 1:
            # A task that has the machine to itself lets the libraries use its cores.
            for task in tasks:
                run_task(path, stage.name, task, all_cores=self.count > 1)
            return
        pool = self._pool = self._pool or self._start()
        try:
            doing = [pool.submit(run_task, path, stage.name, task) for task in tasks]
            # the pool watches over the workers it had when it was last given something: give it a trifle
            pool.submit(os.getpid)
            for done in as_completed(doing):
                done.result()
        except BrokenProcessPool as error:
            raise UserError(
                f"executor.workers={self.count}: a worker was killed in stage {stage.name}, perhaps for "
                f"memory: set fewer, and run this again: what is done stays done"
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
        self._context.set_forkserver_preload(["mlm.corpus.stages.task"])  # imported once, not by every worker
        ignore_interrupts_in_workers()
        return ProcessPoolExecutor(
            self.count,
            mp_context=self._context,
            initializer=end_with,
            initargs=(self._theirs,),
        )


def ignore_interrupts_in_workers() -> None:
    """Have worker processes ignore Ctrl-C: this process hears it and ends them.

    They inherit what their server was started with.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


class Pipe(Protocol):
    """One end of a pipe between processes. Nothing is sent through it."""

    def recv_bytes(self) -> bytes: ...


def end_with(pipe: Pipe) -> None:
    """End this worker when the other end of the pipe is closed: the command says so, or is gone."""

    def watch() -> None:
        with suppress(EOFError, OSError):
            pipe.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def watched(plan: Plan, stage: Stage, totals: list[int], console: Console) -> Iterator[None]:
    """A bar with time left while a stage runs, where someone watches."""
    number = list(plan.stages).index(stage.name) + 1
    columns = (
        TextColumn(f"{number}/{len(plan.stages)} {stage.name}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("tasks"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    over, units_done = threading.Event(), UnitsDone(stage.folder, totals)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        row = bar.add_task(stage.name, total=max(1, sum(totals)))

        def refresh() -> None:
            while not over.wait(REFRESH_S):
                bar.update(row, completed=units_done())

        thread = threading.Thread(target=refresh, daemon=True)
        if console.is_terminal:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.is_alive():
                thread.join()
