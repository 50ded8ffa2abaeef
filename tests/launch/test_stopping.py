"""Jobs as commands: stopped and killed, and started by torchrun and by SLURM."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Start
from tests.launch.ranks_of_jobs import DEADLINE_S, told, wait_gone


def test_ctrl_c_lets_all_ranks_save(tmp_path: Path, start: Start) -> None:
    command = start("save_on_request", tmp_path)
    told(tmp_path)
    command.send_signal(signal.SIGINT)
    _, error = command.communicate(timeout=DEADLINE_S)
    assert command.returncode == 130  # what follows in a script (&&) does not start
    assert [rank["reason"] for rank in told(tmp_path)] == ["Ctrl-C"] * 2
    assert error == "mlm: Ctrl-C: finishing the step, then saving; Ctrl-C again stops at once\n"


@pytest.mark.slow
def test_a_signal_that_reaches_the_ranks_themselves_lets_all_save(tmp_path: Path, start: Start) -> None:
    """As `systemctl stop` does."""
    command = start("save_on_request", tmp_path)
    for pid in [rank["pid"] for rank in told(tmp_path)] + [command.pid]:
        os.kill(pid, signal.SIGTERM)
    _, error = command.communicate(timeout=DEADLINE_S)
    assert [rank["reason"] for rank in told(tmp_path)] == ["SIGTERM"] * 2
    assert (command.returncode, error.count("\n")) == (143, 1)


def test_a_rank_that_dies_of_the_signal_before_a_time_limit_and_saves_nothing_fails(
    tmp_path: Path, start: Start
) -> None:
    command = start("wait", tmp_path, JOB_SAVES_NOTHING="1")
    os.kill(told(tmp_path)[1]["pid"], signal.SIGUSR1)
    _, error = command.communicate(timeout=DEADLINE_S)
    assert (command.returncode, error) == (138, "mlm: SIGUSR1: stopped at once\n")


@pytest.mark.slow
def test_second_ctrl_c_stops_at_once(tmp_path: Path, start: Start) -> None:
    command = start("never_save", tmp_path)
    told(tmp_path)
    command.send_signal(signal.SIGTERM)  # reaches the ranks as a request, too
    facts = told(tmp_path, lambda rank: rank["requested"])
    command.send_signal(signal.SIGINT)
    time.sleep(1.0)  # sooner it would be the same one
    assert command.poll() is None  # the first Ctrl-C
    command.send_signal(signal.SIGINT)
    _, error = command.communicate(timeout=DEADLINE_S)
    assert command.returncode == 130
    assert error == "mlm: Ctrl-C: stopped at once; no checkpoint was saved\n"  # and no word of torch's
    wait_gone(facts)


@pytest.mark.slow
def test_ctrl_c_stops_ranks_that_would_not_save(tmp_path: Path, start: Start) -> None:
    command = start("wait", tmp_path, JOB_SAVES_NOTHING="1")
    facts = told(tmp_path)
    command.send_signal(signal.SIGINT)
    _, error = command.communicate(timeout=DEADLINE_S)
    assert command.returncode == 130
    assert error == "mlm: Ctrl-C: stopped at once\n"  # no checkpoint is spoken of where there is none
    wait_gone(facts)


@pytest.mark.slow
def test_ranks_die_with_a_killed_command(tmp_path: Path, start: Start) -> None:
    command = start("wait", tmp_path)
    facts = told(tmp_path)
    command.kill()
    wait_gone(facts)


@pytest.mark.slow
def test_slurm_tasks_join_and_report_a_mistake_once(tmp_path: Path, start: Start) -> None:
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    tasks = [
        start("same_user_error", tmp_path, SLURM_PROCID=str(i), SLURM_LOCALID=str(i), **step)
        for i in range(2)
    ]
    errors = [task.communicate(timeout=DEADLINE_S)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [2, 2]
    line = "data.path=nowhere is missing: build it with `mlm data build`\n"
    assert "".join(errors) in (f"mlm: rank 0: {line}", f"mlm: rank 1: {line}")
