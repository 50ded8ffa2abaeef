"""A build on Ray: the bytes of a local one, whatever is lost on the way, and errors that name the node."""

import errno
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlm.corpus.build import run_build
from mlm.corpus.config import DataBuildConfig, ExecutorConfig
from mlm.corpus.stages import ray_executor
from mlm.corpus.stages.plan import BuildPlan, BuildStage
from mlm.corpus.stages.ray_executor import RayExecutor, executor_problems, run_on_node
from mlm.data.receipt import MARKER, versions
from mlm.util.errors import UserError
from mlm.util.terminal import Advance, Screen
from tests.corpus.stages.test_build_stages import STAGES, source
from tests.corpus.texts import keep_work, output, thorough

__all__ = ["source"]  # a fixture
ROOT = Path(__file__).resolve().parents[3]
NODE = socket.gethostname()
SYSTEM = {
    "enable_worker_prestart": False,
    # a node that hangs is given up after 3 checks of 10 s, not 5
    "health_check_failure_threshold": 3,
}


# ---- without Ray


def node_error(plan: Any, token: bytes = b"t", **expected: str) -> str:
    """Run a task as a worker does; its error."""
    here = os.getcwd()
    try:
        with pytest.raises(UserError) as caught:
            run_on_node(here, token, versions() | expected, plan, "clean", 0)
    finally:
        os.chdir(here)
    return str(caught.value)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a worker reads of a plan."""
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    (tmp_path / MARKER).write_bytes(b"t")
    return SimpleNamespace(work=tmp_path / "work", shards={})


def test_a_node_without_the_commands_folder_is_named(plan: SimpleNamespace) -> None:
    fix = "choose folders that all nodes share"
    problem = f"executor=ray: node {NODE} does not see {plan.work.parent}; {fix}"
    assert node_error(plan, token=b"of another folder") == problem
    (plan.work.parent / MARKER).unlink()
    assert node_error(plan) == problem


def test_a_node_without_an_input_is_named(plan: SimpleNamespace) -> None:
    paths = ("s3://bucket/a.txt", "/nowhere/b.txt")
    plan.shards[0] = [SimpleNamespace(path=path, kind="txt") for path in paths]
    assert f"node {NODE} does not see /nowhere/b.txt;" in node_error(plan)


def test_a_node_with_other_versions_is_named(plan: SimpleNamespace) -> None:
    here = versions()["tokenizers"]
    assert f"node {NODE} has tokenizers {here}, unlike the command's" in node_error(plan, tokenizers="0.0.1")


@pytest.mark.parametrize(
    "raised, words",
    [
        (OSError(errno.ENOSPC, "No space left on device", "f.bin"), "No space left"),
        (MemoryError(), "out of memory"),
    ],
)
def test_a_node_without_room_is_named(
    plan: SimpleNamespace, raised: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_task(*_: object) -> None:
        raise raised

    monkeypatch.setattr(ray_executor, "run_task", run_task)
    error = node_error(plan)
    assert error.startswith(f"executor=ray: node {NODE} in stage clean: ")
    assert words in error


def test_ray_that_is_not_installed_is_said_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    [problem] = executor_problems(ExecutorConfig(kind="ray"))
    assert problem == "executor=ray needs the package ray: pip install 'mlm[ray]'"


def test_a_task_that_told_no_node_is_started_again_once_a_node_is_dead() -> None:
    executor: Any = RayExecutor(None, None, Screen())
    node = {"NodeManagerHostname": "host", "Resources": {"CPU": 1.0}}
    nodes = [node | {"NodeID": "a", "Alive": True}, node | {"NodeID": "b", "Alive": False}]
    executor._ray, stage = SimpleNamespace(nodes=lambda: nodes), SimpleNamespace(name="clean")
    executor._running = {"silent": (0, ""), "alive": (1, "a")}
    assert executor._on_dead_node(stage) == "silent"
    executor._running = {"again": (0, ""), "alive": (1, "a")}  # the node is known to be dead
    assert executor._on_dead_node(stage) is None
    executor._running["late"] = (2, "b")
    assert executor._on_dead_node(stage) == "late"


# ---- with Ray


@pytest.fixture
def with_ray() -> Any:
    return pytest.importorskip("ray", reason="executor=ray is not tried: pip install ray")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "head"])
def test_an_address_where_nothing_answers_is_a_problem(with_ray: Any, address: str) -> None:
    [problem] = executor_problems(ExecutorConfig(kind="ray", address=address))
    assert problem.startswith(f"executor.address={address}: no Ray cluster answers")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, and two nodes of two CPUs."""
    pytest.importorskip("ray", reason="executor=ray is not tried: pip install ray")
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)  # workers import this file
    nodes = Cluster()
    try:
        add_node(nodes, 0, _system_config=SYSTEM)
        add_nodes(nodes)
        yield nodes
    finally:
        nodes.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def add_nodes(cluster: Any) -> None:
    """Replace the nodes that are lost."""
    for node in list(cluster.worker_nodes):
        if not node.live_processes():
            cluster.worker_nodes.remove(node)
    while len(cluster.worker_nodes) < 2:
        add_node(cluster, 2)


def add_node(cluster: Any, cpus: int, **options: Any) -> None:
    """Start the head, or a node. Ray gives each half a minute, too short on a busy machine."""
    light = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    for is_last in (False, False, False, False, True):
        try:
            cluster.add_node(num_cpus=cpus, object_store_memory=80_000_000, **light, **options)
        except Exception:
            if is_last:
                raise
        else:
            return


@pytest.fixture
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlm.corpus.read.shards.SHARED_PART", 1 << 60)
    monkeypatch.setattr("mlm.corpus.build.shard_bytes", lambda total: 2000)


def on_ray(source: Path, cluster: Any, **changes: Any) -> DataBuildConfig:
    return thorough(source, executor=ExecutorConfig(kind="ray", address=cluster.address), **changes)


def screen() -> tuple[Screen, io.StringIO]:
    text = io.StringIO()
    return Screen(file=text, width=200, highlight=False, markup=False, soft_wrap=True), text


def killing(cwd: str, token: bytes, expected: dict[str, str], plan: BuildPlan, stage: str, task: int) -> None:
    """A task; the first of a stage for which there is a file kill-STAGE kills its worker or its node."""
    order = plan.work.parents[1] / f"kill-{stage}"
    try:
        victim = order.read_text()
        order.unlink()
    except FileNotFoundError:
        run_on_node(cwd, token, expected, plan, stage, task)
        return
    if victim == "frozen node":  # as of a host that hangs: its connections stay open
        order.with_name("frozen").write_text(f"{os.getppid()} {os.getpid()}")
    number = signal.SIGSTOP if victim == "frozen node" else signal.SIGKILL
    if victim != "worker":  # which is one process of its node
        os.kill(os.getppid(), number)
    os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_and_nodes_do_not_change_a_byte(source: Path, cluster: Any, many_tasks: None) -> None:
    run_build(thorough(source, out=str(source.parent / "local")), screen()[0])
    for workers in (1, 4):
        out = source.parent / f"ray-{workers}"
        run_build(on_ray(source, cluster, out=str(out), workers=workers), screen()[0])
        assert output(out) == output(source.parent / "local")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_loss_in_every_stage_changes_nothing_and_is_counted(
    source: Path, cluster: Any, many_tasks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker, in two of a whole node."""

    def run(
        self: RayExecutor, plan: BuildPlan, stage: BuildStage, tasks: list[int], advance: Advance
    ) -> None:
        add_nodes(cluster)
        run_stage(self, plan, stage, tasks, advance)

    for stage in STAGES:
        victim = "node" if stage in ("clean", "tokenise") else "worker"
        (source.parent / f"kill-{stage}").write_text(victim)
    run_stage = RayExecutor.run
    monkeypatch.setattr(RayExecutor, "run", run)
    monkeypatch.setattr(ray_executor, "run_on_node", killing)
    to, text = screen()
    run_build(on_ray(source, cluster), to)
    assert not list(source.parent.glob("kill-*"))
    [said] = re.findall("tasks started again after a loss of their worker: .*", text.getvalue())
    counts = [int(count) for count in re.findall(r"(\d+) of node", said)]
    # a node may take a second task with it, also one that has not told where it is
    assert len(STAGES) <= sum(counts) <= len(STAGES) + 2
    assert f" of node {NODE}" in said
    run_build(thorough(source, out=str(source.parent / "calm")), screen()[0])
    assert output(source.parent / "out") == output(source.parent / "calm")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tasks_of_a_node_that_hangs_run_elsewhere(
    source: Path, cluster: Any, many_tasks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_nodes(cluster)
    (source.parent / "kill-clean").write_text("frozen node")
    monkeypatch.setattr(ray_executor, "run_on_node", killing)
    to, text = screen()
    try:
        run_build(on_ray(source, cluster), to)
    finally:
        for number in (source.parent / "frozen").read_text().split():
            os.kill(int(number), signal.SIGKILL)
    # a task whose node the build had not heard of yet is started again, and not counted
    assert set(re.findall(r"[0-9] of node ([^\s,]+)", text.getvalue())) <= {NODE}
    run_build(thorough(source, out=str(source.parent / "calm")), screen()[0])
    assert output(source.parent / "out") == output(source.parent / "calm")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_without_a_node_left_ends_the_build(
    source: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)
    monkeypatch.setattr(ray_executor, "LOOK_S", 0.5)
    monkeypatch.setattr(ray_executor, "NODE_S", 1.0)
    with pytest.raises(
        UserError, match=rf"no node with a core for 1 s in stage clean, lost: {NODE}; start one"
    ):
        run_build(on_ray(source, cluster), screen()[0])


COMMAND = """
import os, signal, sys
from pathlib import Path
import mlm.corpus.build as build
import mlm.corpus.read.shards as shards
from mlm.corpus.config import ExecutorConfig
from mlm.corpus.stages.ray_executor import RayExecutor
from tests.corpus.texts import quiet, thorough
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
shards.SHARED_PART, build.shard_bytes = 1 << 60, lambda total: 2000
source, address, stage_to_end, number = Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
run = RayExecutor.run
def killed(self, plan, stage, tasks, advance):
    end = lambda _: os.kill(os.getpid(), number)
    run(self, plan, stage, tasks, end if stage.name == stage_to_end else advance)
RayExecutor.run = killed
executor = ExecutorConfig(kind="ray", address=address)
build.run_build(thorough(source, executor=executor), quiet())
"""


def tasks_in_progress() -> list[str]:
    titles = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            titles.append(path.read_text(errors="replace"))
    return [title for title in titles if title.startswith("ray::with_node")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_command_killed_in_a_stage_leaves_no_task_and_continues(
    source: Path, cluster: Any, many_tasks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_nodes(cluster)
    done = set[Path]()
    for stage, number in (("clean", signal.SIGKILL), ("group", signal.SIGINT), ("merge", signal.SIGKILL)):
        command = [sys.executable, "-c", COMMAND, str(source), cluster.address, stage, str(int(number))]
        code = subprocess.run(command, check=False, cwd=ROOT, stderr=subprocess.DEVNULL).returncode
        assert code in (-number, 130), stage
        while tasks_in_progress():
            time.sleep(0.1)
        markers = set((source.parent / "out/work").glob("*/*.done.json"))
        assert any(path.parent.name.startswith(stage) for path in markers - done), stage
        done |= markers
    times = {path: path.stat().st_mtime_ns for path in done}
    keep_work(monkeypatch)
    run_build(on_ray(source, cluster), screen()[0])
    assert {path: path.stat().st_mtime_ns for path in done} == times
    run_build(thorough(source, out=str(source.parent / "calm")), screen()[0])
    assert output(source.parent / "out") == output(source.parent / "calm")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bad_input_ends_the_build_with_its_line(source: Path, cluster: Any) -> None:
    add_nodes(cluster)
    (source / "c.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(UserError, match=r'c\.jsonl:1: no key "text".*bad_input=skip'):
        run_build(on_ray(source, cluster), screen()[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_task_that_is_always_killed_ends_the_build_with_its_node(
    source: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_nodes(cluster)
    monkeypatch.setattr(ray_executor, "run_on_node", killed_each_time)
    with pytest.raises(
        UserError, match=rf"stage clean lost a task 4 times, at last on node ({NODE}|unknown); perhaps for"
    ):
        run_build(replace(on_ray(source, cluster), workers=1), screen()[0])


def killed_each_time(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
