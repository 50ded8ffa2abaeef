"""`mlm doctor`: table, result and exit codes."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlm.cli import main
from mlm.launch.doctor import run as doctor
from mlm.launch.doctor.findings import CheckResult
from tests.launch.conftest import ROOT
from tests.launch.ranks_of_jobs import free_port

Said = pytest.CaptureFixture[str]
CPU = ("dist.device=cpu", "dist.threads_per_rank=1")


def test_one_rank_gets_a_table_and_a_result(tmp_path: Path, capsys: Said) -> None:
    out = tmp_path / "doctor.json"
    for _ in range(2):  # its own result is replaced
        assert main(["doctor", *CPU, f"out={out}"]) == 0
    said, found = capsys.readouterr().out, json.loads(out.read_text())
    checks = {row["check"]: row["status"] for row in found["checks"]}
    shown = ("versions", "devices", "memory", "disk", "ulimit -n", "/dev/shm", "host names", "flock")
    assert all(name in said and name in checks for name in shown)
    assert found["ok"] is True
    assert found["versions"]["mlm"]
    assert list(tmp_path.iterdir()) == [out]


def test_a_failed_check_ends_with_1_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    bad = CheckResult("ulimit -n", "fail", "12", "run `ulimit -n 260` before the start")
    monkeypatch.setattr(doctor.host, "open_files", lambda world_size: bad)
    out = tmp_path / "doctor.json"
    assert main(["doctor", *CPU, f"out={out}"]) == 1
    said = capsys.readouterr()
    assert "run `ulimit -n 260` before the start" in said.out
    assert said.err.startswith("mlm doctor: 1 of ")
    assert "checks failed: ulimit -n (see the table)" in said.err
    assert json.loads(out.read_text())["ok"] is False


def test_a_result_that_the_disk_does_not_take_ends_with_1_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mlm.util.results.write_atomic", full)
    out = tmp_path / "doctor.json"
    assert main(["doctor", *CPU, f"out={out}"]) == 1
    said = capsys.readouterr()
    assert f"out={out}: No space left on device" in said.err
    assert "versions" in said.out


def test_a_warning_ends_with_0(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["doctor", *CPU]) == 0
    assert "; warnings: " in capsys.readouterr().out


def test_ranks_with_other_versions_are_named() -> None:
    ours = {"versions": {"torch": "2.11"}, "device": "CPU"}
    found = doctor.check_equal([ours, {**ours, "versions": {"torch": "2.12"}}], ["a", "b"])
    assert (found[0].status, found[0].result) == (
        "fail",
        "torch 2.12 on rank 1 (host b), 2.11 on rank 0 (host a)",
    )
    found = doctor.check_equal([ours, {**ours, "device": "NVIDIA T4"}], ["a", "b"])
    assert (found[1].status, found[1].result) == ("warn", "CPU; NVIDIA T4")


def started(tmp_path: Path, words: list[str], **variables: str) -> Any:
    return subprocess.Popen(
        [sys.executable, "-m", "mlm", "doctor", *CPU, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_ranks_that_a_launcher_starts_are_checked_together(tmp_path: Path) -> None:
    """As under srun: one process each, which find rank 0 by its address."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [
        started(tmp_path, ["tp=2", "out=doctor.json"], RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank in range(2)
    ]
    (said, errors), _ = (job.communicate(timeout=120) for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0], errors
    assert "numbers over tp" in said
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert {"bandwidth over tp", "shared folder"} <= {row["check"] for row in found["checks"]}


@pytest.mark.slow
def test_a_reader_that_leaves_early_ends_no_rank(tmp_path: Path) -> None:
    """As `mlm doctor tp=2 | head -1`: rank 0 loses its table, and the others their rank 0."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        job = subprocess.run(
            [sys.executable, "-m", "mlm", "doctor", *CPU, "tp=2", "dist.timeout_s=5", "out=doctor.json"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=120,
        )
    finally:
        os.close(writer)
    assert job.returncode == 0, job.stderr
    assert all(line.startswith(b"mlm doctor: ") for line in job.stderr.splitlines()), job.stderr
    assert json.loads((tmp_path / "doctor.json").read_text())["ok"] is True
