"""Execution of a build's tasks: all stages, one after the other, with progress.

An executor runs the tasks of a stage: processes of this machine here, a Ray cluster in ray_executor.py. The
processes are the standard library's pool: datatrove's executor waits forever for a task whose worker was
killed, and leaves a process running if it is killed itself.
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
from typing import Protocol, Self

from mlm.corpus.stages import clean as clean_stage
from mlm.corpus.stages import group as group_stage
from mlm.corpus.stages import match as match_stage
from mlm.corpus.stages import tokenise as tokenise_stage
from mlm.corpus.stages.plan import BuildPlan, BuildStage
from mlm.corpus.stages.publish import merge
from mlm.util.errors import UserError
from mlm.util.terminal import Advance, progress_bar


class Executor(Protocol):
    """Runner of tasks, open in a `with` block; an exception that leaves the block ends running tasks."""

    def run(self, plan: BuildPlan, stage: BuildStage, tasks: list[int], advance: Advance) -> None:
        """Run tasks of a stage, in any order. `advance` receives 1 for each.

        Raises UserError for bad input and for lost workers.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


def run_task(plan: BuildPlan, stage: str, task: int) -> None:
    functions: dict[str, Callable[[BuildPlan, int], None]] = {
        "clean": clean_stage.run,
        "match": match_stage.match,
        "link": group_stage.link,
        "group": group_stage.group,
        "verify": match_stage.verify,
        "gather": group_stage.gather,
        "tokenise": tokenise_stage.run,
        "merge": merge,
    }
    functions[stage](plan, task)


def run_stages(plan: BuildPlan, executor: Executor) -> None:
    """Run the unfinished tasks of every stage. Raises UserError for bad input, KeyboardInterrupt."""
    for number, stage in enumerate(plan.stages.values(), 1):
        stage.folder.mkdir(parents=True, exist_ok=True)
        for partial in stage.folder.glob(".*.partial"):  # files of killed tasks
            partial.unlink(missing_ok=True)
        # List the folder first: an NFS client caches the absence of each marker that is looked up.
        markers = set(os.listdir(stage.folder))
        tasks = [
            task
            for task in range(stage.tasks)
            if stage.marker(task).name not in markers or not stage.is_done(task)
        ]
        if stage.tasks == len(plan.shards):  # largest first, so that the last to finish is short
            tasks.sort(key=lambda task: -sum(shard.end - shard.begin for shard in plan.shards[task]))
        with progress_bar(f"{number}/{len(plan.stages)} {stage.name}", len(tasks)) as advance:
            executor.run(plan, stage, tasks, advance)


class LocalExecutor:
    """Worker processes of this machine, started when first needed; they end when this process does."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._context = multiprocessing.get_context("forkserver")
        # Workers hold one end of a pipe and exit when the other is closed, by us or by the kernel. An Event
        # would not do: setting it waits for every process that waits for it, also for one that was killed.
        self._ours, self._theirs = self._context.Pipe()
        self._pool: ProcessPoolExecutor | None = None

    def run(self, plan: BuildPlan, stage: BuildStage, tasks: list[int], advance: Advance) -> None:
        if self.count == 1 or len(tasks) <= 1:
            for task in tasks:  # in this process `tokenizers` may use all cores
                run_task(plan, stage.name, task)
                advance(1)
            return
        if self._pool is None:
            self._context.set_forkserver_preload(["mlm.corpus.stages.run"])  # imported once, not per worker
            # Workers inherit ignored signals from their server: on Ctrl-C this process ends them.
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                multiprocessing.forkserver.ensure_running()
            finally:
                signal.signal(signal.SIGINT, handler)
            self._pool = ProcessPoolExecutor(
                self.count, mp_context=self._context, initializer=start_worker, initargs=(self._theirs,)
            )
        pool = self._pool
        try:
            # A submission may start a worker: a signal before the pool has noted it would delete the locks
            # that the worker opens by name.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                futures = [pool.submit(run_task, plan.of_task(task), stage.name, task) for task in tasks]
                # The pool watches the workers that it had at the last submission, so submit a no-op.
                pool.submit(os.getpid)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for future in as_completed(futures):
                future.result()
                advance(1)
        except BrokenProcessPool as error:
            raise UserError(
                f"workers={self.count}: a worker was killed in stage {stage.name}, perhaps for "
                f"memory: set fewer, and run this again: finished tasks are kept"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._ours.close()  # workers in the middle of a task end too
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._ours.close()
        self._theirs.close()


def start_worker(pipe: Connection) -> None:
    """Limit `tokenizers` to one core; end this worker when the other end of the pipe is closed."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # read when it first encodes

    def watch() -> None:
        with suppress(EOFError, OSError):
            pipe.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
