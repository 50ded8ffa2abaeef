"""Places of ranks in environments of torchrun and SLURM, and GPUs of a host, with torch or without."""

import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from mlm.launch.config import DistConfig
from mlm.launch.devices import count_gpus, device_kind
from mlm.launch.environment import (
    RankPosition,
    first_host,
    num_threads,
    position_variables,
    read_rank_position,
    worker_environment,
)
from mlm.util.errors import UserError

ALLOCATION = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[01-64]", "SLURM_NTASKS": "512"}
STEP = {
    **ALLOCATION,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "512",
    "SLURM_STEP_NODELIST": "n[01-64]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x64)",
    "SLURM_PROCID": "17",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}


def test_srun_task_has_its_place() -> None:
    place = read_rank_position({**STEP, "SLURM_CPUS_PER_TASK": "12"})
    assert place == RankPosition(
        rank=17,
        world_size=512,
        local_rank=1,
        local_world_size=8,
        master_addr="n01",
        master_port=12_077,
        cores=12,
        nodes="n[01-64]",
        job="77.0",
    )
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "8(x2),4,8(x61)", "SLURM_STEP_ID": "1"}
    other = read_rank_position({**STEP, **uneven})
    assert other is not None
    assert other.local_world_size == 4
    assert other.master_port != place.master_port  # steps of a job may share a host


def test_torchrun_wins_over_slurm() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "9", "LOCAL_RANK": "1"}
    place = read_rank_position({**STEP, **torchrun, "LOCAL_WORLD_SIZE": "4"})
    assert place == RankPosition(
        rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="h", master_port=9
    )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**ALLOCATION, "SLURM_PROCID": "0"},  # the batch script
        {**STEP, "SLURM_STEP_ID": "4294967291"},  # the batch script, numbered
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash
    ],
)
def test_shell_in_an_allocation_is_no_rank(environ: dict[str, str]) -> None:
    assert read_rank_position(environ) is None


def test_a_shell_of_srun_pty_starts_plainly_and_ranks_started_from_it_are_ranks() -> None:
    """The variables are those of `srun --pty --ntasks=512 bash` of SLURM; that shell alone has a terminal."""
    environ = repr({**STEP, "SLURM_PTY_PORT": "34889", "SLURM_JOB_NAME": "bash"})
    imports = "from mlm.launch.environment import read_rank_position"
    look = f"{imports}; print(read_rank_position({environ}) is None)"
    assert "True" in in_terminal([sys.executable, "-c", look])
    assert subprocess.check_output([sys.executable, "-c", look], start_new_session=True) == b"False\n"


def in_terminal(words: list[str]) -> str:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(words[0], words)
    said = b""
    with suppress(OSError), open(terminal, "rb", buffering=0) as reader:  # EIO at its end
        while part := reader.read(1000):
            said += part
    os.waitpid(pid, 0)
    return said.decode()


@pytest.mark.parametrize(
    "nodelist, first",
    [
        ("node1", "node1"),
        ("node[007-009,12],gpu3", "node007"),
        ("rack[2-3]-n[10-12].x", "rack2-n10.x"),
    ],
)
def test_first_host_of_a_node_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "9"}


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, r"MASTER_ADDR is not set.*unset RANK and WORLD_SIZE"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "RANK=0 in the environment is not below WORLD_SIZE=0"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "0"}, "SLURM_TASKS_PER_NODE=0"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
    ],
)
def test_impossible_position_is_a_user_error(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        read_rank_position(environ)


@pytest.mark.parametrize(
    "wanted, typed, expected",
    [(None, "16", 4), (3, "2", 3), (None, "2", 2), (None, "9" * 5000, 4)],
)
def test_threads_are_shared_unless_set(wanted: int | None, typed: str, expected: int) -> None:
    by_torchrun = {"RANK": "0", "WORLD_SIZE": "2"} if typed == "16" else {}  # which sets the variable itself
    environ = {"OMP_NUM_THREADS": typed, **by_torchrun}
    assert num_threads(wanted, environ, cores=8, local_ranks=2) == expected
    assert num_threads(None, {}, cores=2, local_ranks=4) == 1


def test_settings_and_imports_of_the_command_reach_a_launched_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/lib/a", "", "/lib/b"])
    ours = worker_environment({"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "64"}, threads=3)
    assert "GLOO_SOCKET_IFNAME" not in ours
    place = position_variables(RankPosition(0, 2, 0, 2, "localhost", 1))
    assert num_threads(None, {**place, **ours}, cores=8, local_ranks=2) == 3
    expected = [os.path.realpath("/lib/a"), os.getcwd(), os.path.realpath("/lib/b")]
    assert ours["PYTHONPATH"].split(":") == expected


FOUND = """
import sys
from mlm.launch import devices
devices.DRIVER = sys.argv[1]
print(devices._may_have_gpus(), "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("version", "driver", "expected"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None", "libc.so.6", False),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'", "none.so", True),  # ROCm: torch is asked
        ("cuda = '13.0'\nhip = None", "none.so", False),  # a host without the driver
    ],
)
def test_torch_is_asked_where_its_build_and_the_host_may_have_gpus(
    tmp_path: Path, version: str, driver: str, expected: bool
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text(f"from typing import Optional\n\n{version}\n")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", FOUND, driver], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(expected), "False"]


@pytest.mark.parametrize("gpus", [0, 4])
def test_auto_is_cuda_where_torch_sees_a_gpu(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    assert device_kind(DistConfig(device="cpu")) == "cpu"
    assert device_kind(DistConfig()) == ("cuda" if gpus else "cpu")
    assert count_gpus() == gpus
    if not gpus:
        with pytest.raises(UserError, match=r"dist\.device=cuda"):
            device_kind(DistConfig(device="cuda"))
