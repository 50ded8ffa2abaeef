"""Running the tasks of a build on a Ray cluster: any number of nodes over one shared file system.

A task is a generator of two values: the name of its node, so that a lost node can be named, and "" at its
end. Ray repeats none: a task whose worker or node is lost is queued again here, and counted. What Ray pickles
travels between the command and its workers; nothing in the work folder is unpickled.
"""

import os
import socket
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

from rich.console import Console

from mlm.corpus.config import ExecutorConfig
from mlm.corpus.stages.plan import BuildPlan, BuildStage
from mlm.corpus.stages.run import run_task
from mlm.data.corpus_files import MARKER
from mlm.data.receipt import versions
from mlm.util.errors import UserError, attempt
from mlm.util.extras import load_extra
from mlm.util.object_store import is_stored
from mlm.util.terminal import Advance, one_line

ATTEMPTS = 4
"""Times that a task may lose its worker or node before the build ends."""
QUEUED = 64
"""Tasks given to Ray at a time, at least: they show an autoscaler what is wanted."""


def executor_problems(config: ExecutorConfig) -> list[str]:
    """Return problems of the settings: Ray is missing, or nothing answers at the address."""
    problems = list[str]()
    if config.kind == "ray" and attempt(problems, lambda: load_extra("ray", "executor=ray", "ray")):
        address = config.address or os.environ.get("RAY_ADDRESS", "")
        host, _, port = address.rpartition(":")
        if address not in ("", "auto", "local"):
            try:
                # Ray itself waits a quarter of an hour
                socket.create_connection((host.strip("[]"), int(port)), 10.0).close()
            except (OSError, ValueError) as error:
                key = "executor.address" if config.address else "RAY_ADDRESS"
                answer = f"no Ray cluster answers ({one_line(error)})"
                problems.append(f"{key}={address}: {answer}; give HOST:PORT of its head")
    return problems


class RayExecutor:
    """Tasks of Ray on all nodes of a cluster, at most `workers` at a time."""

    def __init__(self, address: str | None, workers: int | None, screen: Console) -> None:
        self.address, self.workers, self.screen = address, workers, screen
        self._running = dict[Any, tuple[int, str]]()
        """Of each generator its task and its node, "" before it has one."""
        self._lost = Counter[str]()

    def __enter__(self) -> Self:
        self._ray = ray = load_extra("ray", "executor=ray", "ray")
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            # it would print the logs of a node that is lost
            ray._private.worker.print_to_stdstream = lambda *_, **__: None
            try:
                ray.init(self.address or "auto", log_to_driver=False, logging_level="CRITICAL")
            except (ConnectionError, RuntimeError, ValueError) as error:
                fix = "start one (ray start --head), or set executor.address=HOST:PORT of its head"
                raise executor_error(one_line(error), fix) from error
        self._start = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(run_on_node).remote
        return self

    def run(self, plan: BuildPlan, stage: BuildStage, tasks: list[int], advance: Advance) -> None:
        ray, errors, waiting, losses = self._ray, self._ray.exceptions, deque(tasks), Counter[int]()
        crashes = errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError
        command = os.getcwd(), (plan.work.parent / MARKER).read_bytes(), versions()
        while waiting or self._running:
            limit = self.workers or max(QUEUED, 2 * int(ray.cluster_resources().get("CPU", 0)))
            while waiting and len(self._running) < limit:
                task = waiting.popleft()
                self._running[self._start(*command, plan.of_task(task), stage.name, task)] = task, ""
            [values], _ = ray.wait(list(self._running), num_returns=1, fetch_local=False)
            task, node = self._running.pop(values)
            try:
                value = ray.get(next(values))
            except crashes as error:
                self._lost[node] += 1
                losses[task] += 1
                if losses[task] == ATTEMPTS:
                    where = f", at last on node {node}" if node else ""  # which some did not live to tell
                    problem = f"stage {stage.name} lost a task {ATTEMPTS} times{where}"
                    fix = "perhaps for memory: set fewer workers, and run this again: finished tasks are kept"
                    raise executor_error(problem, fix) from error
                waiting.append(task)
            except errors.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                if node:
                    raise
                problem = f"a node cannot run mlm {versions()['mlm']}: {one_line(error.cause)}"
                raise executor_error(problem, "install it on all nodes") from error
            else:
                if value:
                    self._running[values] = task, value
                else:
                    advance(1)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for values in self._running:
            self._ray.cancel(values, force=True)
        if self._is_ours:
            self._ray.shutdown()
        if self._lost:
            nodes = ", ".join(f"{count} of node {node or 'unknown'}" for node, count in self._lost.items())
            self.screen.print(f"tasks started again after a loss of their worker: {nodes}")


def run_on_node(
    cwd: str, token: bytes, expected: dict[str, str], plan: BuildPlan, stage: str, task: int
) -> Iterator[str]:
    """Do a task on the node that Ray has chosen. Raises UserError, which names the node if it is at fault.

    Of the command: `cwd`, to which paths may be relative; `token`, content of the marker in `out`, which
    tells this folder from another of its name; `expected`, versions that the output depends on.
    """
    node, marker, seen = socket.gethostname(), plan.work.parent / MARKER, b""
    yield node
    os.environ["RAYON_NUM_THREADS"] = "1"  # a core for each task; read when `tokenizers` first encodes
    with suppress(OSError):
        os.chdir(cwd)
    with suppress(OSError):
        seen = marker.read_bytes()
    if here := [f"{name} {value}" for name, value in versions().items() if expected.get(name) != value]:
        problem = f"node {node} has {', '.join(here)}, unlike the command's"
        raise executor_error(problem, "install the same versions on all nodes")
    files = [s.path for s in plan.shards.get(task, ()) if s.kind != "hub" and not is_stored(s.path)]
    unseen = [file for file in files if not os.path.exists(file)]
    if seen != token or unseen:
        problem = f"node {node} does not see {marker.parent if seen != token else unseen[0]}"
        raise executor_error(problem, "choose folders that all nodes share")
    try:
        run_task(plan, stage, task)
    except (MemoryError, OSError) as error:
        reason = "out of memory" if isinstance(error, MemoryError) else one_line(error)
        fix = "make room there, or take it out of the cluster; finished tasks are kept"
        raise executor_error(f"node {node} in stage {stage}: {reason}", fix) from error
    yield ""


def executor_error(problem: str, fix: str) -> UserError:
    return UserError(f"executor=ray: {problem}", keys=("executor",), fix=fix)
