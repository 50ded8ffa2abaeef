"""A rank is killed under torchrun: the job restarts automatically and continues from its last checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import ROOT

RUN = [
    *("model=gpt2_tiny", "data=synthetic", "data.seq_length=16", "train.steps=100000", "tp=2"),
    *("train.global_batch_size=4", "train.micro_batch_size=4", "train.validate_every=0"),
    *("checkpoint.save_every=2", "log.every=1", "dist.timeout_s=30"),
]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_killed_rank_restarts_the_job_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "wb") as log:
        job = subprocess.Popen(
            [*torchrun, "--max-restarts=1", "-m", "mlm", "pretrain", *RUN, f"out={out}"],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    try:
        wait_for_step(out, job, runs=1, after=2)
        while not (out / "checkpoints" / "latest").exists():  # written in the background
            time.sleep(0.05)
        first = wait_for_step(out, job, runs=1, after=2)
        os.kill(ranks_of(job.pid)[1], signal.SIGKILL)
        wait_for_step(out, job, runs=2, after=first)
    finally:
        if job.poll() is None:
            for pid in (*ranks_of(job.pid), job.pid):  # ranks have sessions of their own
                os.kill(pid, signal.SIGKILL)
        job.wait()
    said = (tmp_path / "log").read_text()
    runs = [record for record in records(out) if record["kind"] == "run"]
    assert [run["start_step"] > 0 for run in runs] == [False, True], said
    assert f"resuming from {out}" in said
    steps = [record["step"] for record in records(out) if record["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1))


def records(out: Path) -> list[dict[str, object]]:
    text = (out / "metrics.jsonl").read_text() if (out / "metrics.jsonl").exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for_step(out: Path, job: "subprocess.Popen[bytes]", *, runs: int, after: int) -> int:
    end = time.monotonic() + 100
    while time.monotonic() < end:
        assert job.poll() is None, (out.parent / "log").read_text()
        kinds = [record["kind"] for record in records(out)]
        last = next((r["step"] for r in reversed(records(out)) if r["kind"] == "step"), 0)
        if kinds.count("run") == runs and kinds[-1] != "run" and int(str(last)) > after:
            return int(str(last))
        time.sleep(0.1)
    raise AssertionError((out.parent / "log").read_text())


def ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = {}
    for pid in map(int, children):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(v.partition(b"=")[2]): pid for v in variables if v.startswith(b"RANK=")}
    return [found[rank] for rank in sorted(found)]
