"""Jobs on two real ranks, started plainly: whole, broken and killed; and commands run whole in a child."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlm.launch import child_run
from mlm.launch.rules.layout import Launch
from mlm.launch.start import choose_world_size, listen
from mlm.parallel.config import ParallelConfig
from mlm.util.errors import CheckFailedError, UserError
from tests.launch import jobs as launch_jobs
from tests.launch.ranks_of_jobs import told, wait_gone


def test_ranks_of_a_plain_launch_get_place_layout_config_and_a_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch_jobs.start("facts", tmp_path, threads=None) == 0
    ranks, share = told(tmp_path), str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [rank["total"] for rank in ranks] == [3.0, 3.0]
    for number, rank in enumerate(ranks):
        assert (rank["axes"], rank["config"]) == ([2, 1, 1], ["GenerateConfig", "two\nlines", 0.25])
        assert str(rank["threads"]) == share
        keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
        assert [rank["environment"][key] for key in keys] == [str(number), str(number), "2", share]
    assert (tmp_path / "logs" / "rank-00001.log").read_text() == "spoken by rank 1\n"
    assert not (tmp_path / "logs" / "rank-00000.log").exists()


def test_one_rank_runs_in_this_process(tmp_path: Path) -> None:
    assert launch_jobs.start("facts", tmp_path, tp=1) == 0
    facts = json.loads((tmp_path / "rank-0.json").read_text())
    assert (facts["pid"], facts["world_size"], facts["total"]) == (os.getpid(), 1, 1.0)


@pytest.mark.slow
def test_user_error_on_all_ranks_names_no_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = launch_jobs.start("same_user_error", tmp_path)
    expected = "mlm: data.path=nowhere is missing: build it with `mlm data build`\n"
    assert (code, capfd.readouterr().err) == (2, expected)


@pytest.mark.slow
def test_crash_of_a_rank_shows_its_traceback_once_and_ends_the_rest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = launch_jobs.start("crash", tmp_path)
    lines = capfd.readouterr().err.splitlines()
    assert code == 1
    assert lines[:2] == ["mlm: rank 1 failed:", "Traceback (most recent call last):"]
    assert lines[-1] == "ZeroDivisionError: a bug"
    assert sum("Traceback" in line for line in lines) == 1
    wait_gone(told(tmp_path))


def test_port_in_use_is_reported_before_any_rank_starts(tmp_path: Path) -> None:
    with listen(0) as taken:
        host, port = taken.getsockname()
        assert host == "127.0.0.1"  # closed to other hosts
        with pytest.raises(UserError, match=f"dist.master_port={port} is in use"):
            launch_jobs.start("facts", tmp_path, master_port=port)


@pytest.mark.parametrize(
    "dp, started, gpus, expected",
    [
        (None, None, None, 2),  # plain on CPU: one replica
        (None, None, 8, 8),  # plain on CUDA: all GPUs
        (None, None, 7, 6),
        (None, 16, 8, 16),  # joined: all ranks that were started
    ],
)
def test_dp_takes_what_is_left(dp: int | None, started: int | None, gpus: int | None, expected: int) -> None:
    facts = Launch(world_size=started, local_devices=gpus)
    assert choose_world_size(ParallelConfig(tp=2, dp=dp), facts) == expected


def test_a_run_starts_plainly_whatever_launcher_this_command_was_under() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "MLM_LAUNCHED": "1", "HOME": "/home/u"}
    found = child_run.environment_without_launcher(environ)
    assert found.pop("PYTHONPATH")
    assert found == {"HOME": "/home/u"}


@pytest.mark.parametrize(
    "code,kind,how", [(2, UserError, "ended with 2"), (1, CheckFailedError, "ended with 1")]
)
def test_a_failing_run_is_reported_by_its_own_line_and_its_log(
    tmp_path: Path, code: int, kind: type[UserError], how: str
) -> None:
    log = tmp_path / "x.log"
    log.write_text("step 1\nmlm pretrain: out=x: disk full: free some space\nlast words of a library\n")
    process = subprocess.Popen([sys.executable, "-c", f"exit({code})"])
    process.wait()
    error = child_run.command_failure(process, "the straight run", log)
    assert type(error) is kind
    assert str(error).startswith(f"the straight run {how}: mlm pretrain: out=x: disk full: free some space")
    assert str(log) in str(error)
