"""Execution of a build's tasks on a Ray cluster: any number of nodes with a shared file system.

A task is a generator: it yields its node, so that a lost node can be named, then "" at its end. Ray does not
retry tasks: a task whose worker or node is lost is queued again here, and counted. Tasks of a node that Ray's
head has declared dead count as lost too: Ray itself waits while their connections stay open. Pickles are only
sent between the command and its workers; nothing in the work folder is unpickled.
"""

import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Self

from rich.console import Console

from mlm.corpus.config import ExecutorConfig
from mlm.corpus.stages.plan import BuildPlan, BuildStage
from mlm.corpus.stages.run import run_task
from mlm.data.receipt import MARKER, versions
from mlm.util.errors import UserError, attempt
from mlm.util.extras import load_extra
from mlm.util.object_store import is_stored
from mlm.util.terminal import Advance, one_line

ATTEMPTS = 4
"""Times that a task may lose its worker or node before the build ends."""
QUEUED = 64
"""Least number of tasks submitted to Ray at a time: they show an autoscaler the demand."""
DOUBTED = "?"
"""Node of a task that had not reported one when a node was found dead."""
LOOK_S, NODE_S = 5.0, 300.0
"""Seconds without a finished task until nodes are checked, and to wait for a node with a core."""


def executor_problems(config: ExecutorConfig) -> list[str]:
    problems = list[str]()
    if config.kind == "ray" and attempt(problems, lambda: load_extra("ray", "executor=ray", "ray")):
        address = config.address or os.environ.get("RAY_ADDRESS", "")
        host, _, port = address.rpartition(":")
        if address not in ("", "auto", "local"):
            try:
                # Ray itself would wait a quarter of an hour.
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
        """Generator -> its task and the id of its node: "" before it is reported, or DOUBTED."""
        self._dead = set[str]()
        """Ids of nodes that were found dead."""
        self._progress = time.monotonic()
        """Time at which a task last reported, or a node had a core."""
        self._lost = Counter[str]()

    def __enter__(self) -> Self:
        self._ray = ray = load_extra("ray", "executor=ray", "ray")
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                ray.init(self.address or "auto", log_to_driver=False, logging_level="CRITICAL")
            except (ConnectionError, RuntimeError, ValueError) as error:
                fix = "start one (ray start --head), or set executor.address=HOST:PORT of its head"
                raise executor_error(one_line(error), fix) from error
        self._start = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(with_node).remote
        return self

    def run(self, plan: BuildPlan, stage: BuildStage, tasks: list[int], advance: Advance) -> None:
        ray, errors, waiting, losses = self._ray, self._ray.exceptions, deque(tasks), Counter[int]()
        crashes = errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError
        command = os.getcwd(), (plan.work.parent / MARKER).read_bytes(), versions()
        while waiting or self._running:
            limit = self.workers or max(QUEUED, 2 * int(ray.cluster_resources().get("CPU", 0)))
            while waiting and len(self._running) < limit:
                task = waiting.popleft()
                arguments = (run_on_node, *command, plan.of_task(task), stage.name, task)
                self._running[self._start(*arguments)] = task, ""
            ready, _ = ray.wait(list(self._running), num_returns=1, timeout=LOOK_S, fetch_local=False)
            values = ready[0] if ready else self._on_dead_node(stage)
            if values is None:
                continue
            task, node_id = self._running.pop(values)
            try:
                if not ready:
                    ray.cancel(values, force=True)
                    if node_id == DOUBTED:
                        waiting.append(task)
                        continue
                    raise errors.NodeDiedError(node_id)
                value, self._progress = ray.get(next(values)), time.monotonic()
            except crashes as error:
                node = {n["NodeID"]: n["NodeManagerHostname"] for n in ray.nodes()}.get(node_id, "unknown")
                self._lost[node] += 1
                losses[task] += 1
                if losses[task] == ATTEMPTS:
                    problem = f"stage {stage.name} lost a task {ATTEMPTS} times, at last on node {node}"
                    fix = "perhaps for memory: set fewer workers, and run this again: finished tasks are kept"
                    raise executor_error(problem, fix) from error
                waiting.append(task)
            except errors.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise error.cause from None
                if node_id:
                    raise
                problem = f"a node cannot run mlm {versions()['mlm']}: {one_line(error.cause)}"
                raise executor_error(problem, "install it on all nodes") from error
            else:
                if value:
                    self._running[values] = task, value
                else:
                    advance(1)

    def _on_dead_node(self, stage: BuildStage) -> Any:
        """Return a running task whose node is dead, or None. Raises UserError if no node is left for long."""
        nodes = self._ray.nodes()
        dead = {node["NodeID"]: node["NodeManagerHostname"] for node in nodes if not node["Alive"]}
        if any(node["Alive"] and node["Resources"].get("CPU") for node in nodes):
            self._progress = time.monotonic()
        elif time.monotonic() - self._progress > NODE_S:
            lost = ", ".join(sorted(set(dead.values()))) or "none"
            problem = f"no node with a core for {NODE_S:.0f} s in stage {stage.name}, lost: {lost}"
            raise executor_error(problem, "start one, and run this again: finished tasks are kept")
        if dead.keys() - self._dead:
            # Ray waits for a frozen node with the tasks that it had not started
            self._dead |= dead.keys()
            self._running = {v: (task, node or DOUBTED) for v, (task, node) in self._running.items()}
        return next((v for v, (_, node) in self._running.items() if node in dead or node == DOUBTED), None)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for values in self._running:
            self._ray.cancel(values, force=True)
        if self._is_ours:
            self._ray.shutdown()
        if self._lost:
            nodes = ", ".join(f"{count} of node {node}" for node, count in self._lost.items())
            self.screen.print(f"tasks started again after a loss of their worker: {nodes}")


def with_node(run: Callable[..., None], *arguments: Any) -> Iterator[str]:
    """Run a task on the node that Ray has chosen; first yield the node's id."""
    yield load_extra("ray", "executor=ray").get_runtime_context().get_node_id()
    run(*arguments)
    yield ""


def run_on_node(
    cwd: str, token: bytes, expected: dict[str, str], plan: BuildPlan, stage: str, task: int
) -> None:
    """Run a task on the node that Ray has chosen. Raises UserError, which names a node with a problem.

    From the command: `cwd`, to which paths may be relative; `token`, the content of the marker in `out`,
    which identifies the folder; `expected`, versions that the output depends on.
    """
    node, marker, marker_content = socket.gethostname(), plan.work.parent / MARKER, b""
    os.environ["RAYON_NUM_THREADS"] = "1"  # a core for each task; read when `tokenizers` first encodes
    with suppress(OSError):
        os.chdir(cwd)
    with suppress(OSError):
        marker_content = marker.read_bytes()
    if differing := [f"{name} {value}" for name, value in versions().items() if expected.get(name) != value]:
        problem = f"node {node} has {', '.join(differing)}, unlike the command's"
        raise executor_error(problem, "install the same versions on all nodes")
    files = [s.path for s in plan.shards.get(task, ()) if s.kind != "hub" and not is_stored(s.path)]
    missing = [file for file in files if not os.path.exists(file)]
    if marker_content != token or missing:
        problem = f"node {node} does not see {marker.parent if marker_content != token else missing[0]}"
        raise executor_error(problem, "choose folders that all nodes share")
    try:
        run_task(plan, stage, task)
    except (MemoryError, OSError) as error:
        reason = "out of memory" if isinstance(error, MemoryError) else one_line(error)
        fix = "make room there, or take it out of the cluster; finished tasks are kept"
        raise executor_error(f"node {node} in stage {stage}: {reason}", fix) from error


def executor_error(problem: str, fix: str) -> UserError:
    return UserError(f"executor=ray: {problem}", keys=("executor",), fix=fix)
