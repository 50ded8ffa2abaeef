"""Workers of a build on one machine: what becomes of the others, and of the command, when one is killed."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from mlm.corpus.stages import run
from mlm.corpus.stages.plan import BuildPlan, BuildStage
from mlm.corpus.stages.run import LocalExecutor
from mlm.util.errors import UserError
from tests.slow import slow_but


class FolderAsPlan:
    def __init__(self, path: Path) -> None:
        self.path = path

    def of_task(self, task: int) -> Path:
        return self.path


def long(path: Any, stage: str, task: int) -> None:
    (path / str(os.getpid())).touch()
    time.sleep(600)


def killed_or_long(path: Any, stage: str, task: int) -> None:
    """Task 1 is killed once the other is under way, which takes long."""
    if task == 0:
        long(path, stage, task)
    (path / str(os.getpid())).touch()
    while len(list(path.iterdir())) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_until_gone(pids: list[int]) -> None:
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.02)


def pids_in(path: Path) -> list[int]:
    return [int(file.name) for file in path.iterdir()]


def test_a_signal_waits_until_the_workers_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came in between left a worker that the pool had not noted yet, without its locks."""
    started: list[int] = []

    class Pool(ProcessPoolExecutor):
        def submit(self, *_: Any, **__: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            started.append(len(started))

    monkeypatch.setattr(run, "ProcessPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt), LocalExecutor(2) as workers:
        workers.run(cast(BuildPlan, FolderAsPlan(tmp_path)), BuildStage("clean", 2, tmp_path), [0, 1], int)
    assert started == [0, 1, 2]


@pytest.mark.timeout(60)
def test_a_killed_worker_is_reported_in_a_line_and_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run_task", killed_or_long)
    said = r"workers=2: a worker was killed in stage clean"
    with pytest.raises(UserError, match=said), LocalExecutor(2) as workers:
        workers.run(cast(BuildPlan, FolderAsPlan(tmp_path)), BuildStage("clean", 2, tmp_path), [0, 1], int)
    assert len(pids_in(tmp_path)) == 2
    wait_until_gone(pids_in(tmp_path))


COMMAND = """
import signal
import sys
from pathlib import Path
from mlm.corpus.stages import run
from mlm.corpus.stages.plan import BuildStage
from tests.corpus.stages.test_run import FolderAsPlan, long
run.run_task = long
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
path = Path(sys.argv[1])
with run.LocalExecutor(2) as workers:
    workers.run(FolderAsPlan(path), BuildStage("clean", 2, path), [0, 1], int)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", slow_but({1}, [signal.SIGKILL, signal.SIGINT]), ids=str)
def test_no_worker_outlives_the_command(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path)], stderr=subprocess.DEVNULL
    ) as command:
        while len(pids_in(tmp_path)) < 2:
            time.sleep(0.02)
        command.send_signal(number)
    wait_until_gone(pids_in(tmp_path))
