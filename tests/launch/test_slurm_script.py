"""scripts/slurm/pretrain.sbatch with stubs for srun and scontrol."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "pretrain.sbatch"
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > arguments.partial
trap 'sleep 0.3; exit "$LEAVES_WITH"' USR1
mv arguments.partial arguments
for _ in {1..200}; do sleep 0.1; done
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with stubs: srun waits for SIGUSR1, scontrol notes what it is told."""
    for name, text in {"srun": SRUN, "scontrol": '#!/usr/bin/env bash\necho "$@" > requeued\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run_until_time_is_out(cluster: Path, leaves_with: int) -> int:
    """Exit code of the script when SLURM signals it and the ranks then leave with `leaves_with`."""
    environ = {
        "PATH": f"{cluster}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "LEAVES_WITH": str(leaves_with),
    }
    script = subprocess.Popen(["bash", str(SCRIPT), "tp=8", "name=two words"], cwd=cluster, env=environ)
    try:
        end = time.monotonic() + 20
        while not (cluster / "arguments").exists() and time.monotonic() < end:
            time.sleep(0.02)
        script.send_signal(signal.SIGUSR1)
        return script.wait(timeout=20)
    finally:
        script.kill()


def test_job_that_saved_in_time_is_requeued(cluster: Path) -> None:
    assert run_until_time_is_out(cluster, leaves_with=0) == 0
    assert (cluster / "requeued").read_text() == "requeue 7\n"


def test_job_that_failed_to_save_is_not_requeued(cluster: Path) -> None:
    assert run_until_time_is_out(cluster, leaves_with=1) == 1
    assert not (cluster / "requeued").exists()


def test_arguments_reach_pretrain_as_given(cluster: Path) -> None:
    run_until_time_is_out(cluster, leaves_with=0)
    words = (cluster / "arguments").read_text().splitlines()
    assert words[-4:] == ["mlm", "pretrain", "tp=8", "name=two words"]
