"""scripts/slurm/pretrain.sbatch with stubs for srun and scontrol."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "pretrain.sbatch"
SRUN = f"""#!{sys.executable}
import os, signal, sys, time
ignored = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(0.3) or sys.exit(int(os.environ["LEAVES_WITH"])))
open("arguments.partial", "w").write("\\n".join([*sys.argv[1:], "ignored=" + str(ignored)]))
os.rename("arguments.partial", "arguments")
time.sleep(20)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with stubs: srun waits for SIGUSR1, scontrol notes what it is told."""
    for name, text in {"srun": SRUN, "scontrol": '#!/usr/bin/env bash\necho "$@" > requeued\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


BEFORE_THE_STEP = """
trap 'if [[ $BASH_COMMAND == "step=$"* && -z ${sent:-} ]]; then sent=1; kill -USR1 $$; fi' DEBUG
"""
"""Read by bash before the script: sends the signal just before the script knows the number of its step."""


def run_until_time_is_out(cluster: Path, leaves_with: int, *, early: bool = False) -> int:
    """Exit code of the script when SLURM signals it and the ranks then leave with `leaves_with`."""
    environ = {
        "PATH": f"{cluster}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "LEAVES_WITH": str(leaves_with),
        "ASK_EVERY_S": "1",
    }
    if early:
        (cluster / "early").write_text(BEFORE_THE_STEP)
        environ["BASH_ENV"] = str(cluster / "early")
    script = subprocess.Popen(["bash", str(SCRIPT), "tp=8", "name=two words"], cwd=cluster, env=environ)
    try:
        end = time.monotonic() + 20
        while not (cluster / "arguments").exists() and time.monotonic() < end:
            time.sleep(0.02)
        if not early:
            script.send_signal(signal.SIGUSR1)
        return script.wait(timeout=20)
    finally:
        script.kill()


def test_job_that_saved_in_time_is_requeued(cluster: Path) -> None:
    assert run_until_time_is_out(cluster, leaves_with=0) == 0
    assert (cluster / "requeued").read_text() == "requeue 7\n"
    words, _, ignored = (cluster / "arguments").read_text().rpartition("\n")
    assert words.splitlines()[-4:] == ["mlm", "pretrain", "tp=8", "name=two words"]
    assert ignored == "ignored=True"  # until it listens


def test_job_that_failed_to_save_is_not_requeued(cluster: Path) -> None:
    assert run_until_time_is_out(cluster, leaves_with=1) == 1
    assert not (cluster / "requeued").exists()


@pytest.mark.slow
def test_a_signal_before_the_script_knows_its_step_is_handed_on(cluster: Path) -> None:
    assert run_until_time_is_out(cluster, leaves_with=3, early=True) == 3


AT_ITS_END = f"""#!{sys.executable}
import os, signal
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
os.kill(int(os.environ["SCRIPT"]), signal.SIGUSR1)
os._exit(7)
"""


def test_a_signal_as_the_ranks_leave_does_not_lose_their_exit_code(cluster: Path) -> None:
    (cluster / "srun").write_text(AT_ITS_END)
    environ = {"PATH": f"{cluster}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "ASK_EVERY_S": "1"}
    command = ["bash", "-c", 'export SCRIPT=$$; . "$0"', str(SCRIPT)]
    codes = [subprocess.run(command, cwd=cluster, env=environ, timeout=20).returncode for _ in range(3)]
    assert codes == [7] * 3


def test_no_process_outlives_the_script(cluster: Path) -> None:
    """Of a script that is signalled before it has noted its step, and ends at once."""
    (cluster / "srun").write_text("#!/usr/bin/env bash\nexit 3\n")
    (cluster / "early").write_text(
        "trap 'if [[ $BASH_COMMAND == status=* ]]; then rm -f $state/process; kill -USR1 $$; fi' DEBUG"
    )
    environ = {
        "PATH": f"{cluster}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "BASH_ENV": str(cluster / "early"),
    }
    assert subprocess.run(["bash", str(SCRIPT)], cwd=cluster, env=environ, timeout=20).returncode == 3
    end = time.monotonic() + 10
    while (left := processes_in(cluster)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


def processes_in(folder: Path) -> list[str]:
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (each / "cwd").resolve() == folder:
                found.append(each.name)
    return found
