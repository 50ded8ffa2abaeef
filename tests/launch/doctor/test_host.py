"""Each check of a host finds what is planted, and names a remedy."""

import re
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlm.launch import network
from mlm.launch.doctor import host
from mlm.launch.doctor.findings import CheckResult, Status, rows_of
from mlm.launch.doctor.host import GIB, MIB, environment
from mlm.launch.environment import RankPosition
from mlm.util import system


def statvfs(free: int, whole: int = 1000 * GIB, inodes: int = 10) -> Callable[[Any], Any]:
    found = SimpleNamespace(f_bavail=free, f_blocks=whole, f_frsize=1, f_files=10, f_favail=inodes)
    return lambda folder: found


def limit(soft: int) -> Callable[[Any], tuple[int, int]]:
    return lambda which: (soft, 1 << 20)


@pytest.mark.parametrize(
    ("check", "planted", "status", "remedy"),
    [
        (lambda: host.memory(100 * MIB, ranks_here=2), None, "fail", "start fewer ranks"),
        (lambda: host.disk(Path("runs")), statvfs(100 * MIB), "fail", ""),
        (lambda: host.disk(Path("runs")), statvfs(100 * GIB), "ok", ""),
        (lambda: host.disk(Path("runs")), statvfs(100 * GIB, inodes=0), "fail", ""),
        (lambda: host.disk(Path("no/where")), None, "fail", ""),
        (lambda: host.open_files(512), limit(100), "fail", "ulimit -n 2304"),
        (lambda: host.open_files(512), limit(300), "fail", "ulimit -n 2304"),
        (lambda: host.open_files(8), limit(300), "ok", ""),
        (lambda: host.locked_memory(True), limit(8192), "warn", ""),
        (lambda: host.shared_memory(False), statvfs(MIB), "fail", "--shm-size"),
        (lambda: host.shared_memory(True), statvfs(64 * MIB), "warn", "--shm-size"),
    ],
)
def test_too_little_of_a_resource_is_found(
    check: Callable[[], CheckResult], planted: Any, status: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted is not None:
        monkeypatch.setattr(host.os, "statvfs", planted)
        monkeypatch.setattr(resource, "getrlimit", planted)
    found = check()
    assert (found.status, remedy in found.remedy) == (status, True)


def test_available_memory_is_the_least_of_the_hosts_and_the_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(system, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal:  99 kB\nMemAvailable:    8 kB\n")
    assert system.available_memory() == 8 << 10
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert system.available_memory() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert system.available_memory() == 8 << 10


def test_host_names_that_do_not_resolve_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(name: str, *_: object, **__: object) -> list[Any]:
        if name != "node1":
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(network.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(network.socket, "gethostname", lambda: "node1")
    place = RankPosition(0, 4, 0, 2, master_addr="nosuch", master_port=1)
    found = host.names(place, {})
    assert (found.status, "MASTER_ADDR=nosuch" in found.result) == ("fail", True)
    assert "set MASTER_ADDR" in found.remedy
    assert host.names(None, {}).status == "ok"
    monkeypatch.setattr(network.socket, "gethostname", lambda: "node2")
    assert host.names(None, {}).status == "warn"


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("NCCL_DEBUG", "info", "warn"),
        *((name, "1", "warn") for name in ("NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING")),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warn"),
        ("OMP_NUM_THREADS", "4096", "warn"),
        ("NCCL_P2P_DISABLE", "0", "ok"),
        ("OMP_NUM_THREADS", "1", "ok"),
    ],
)
def test_variables_that_hurt_are_found(variable: str, value: str, status: str) -> None:
    (found,) = environment({variable: value}, 1)
    assert found.status == status
    assert status == "ok" or (found.check == variable and found.remedy)


def test_more_ranks_than_cores_are_not_told_to_set_the_one_thread_that_they_have() -> None:
    (found,) = environment({"OMP_NUM_THREADS": "1"}, 4096)
    assert re.fullmatch(r"start \d+ ranks or fewer on this host", found.remedy)


def test_a_row_is_the_worst_of_the_ranks_and_names_them() -> None:
    found: list[Status] = ["ok", "fail", "warn", "fail"]
    each = [[CheckResult("disk", status, f"{n}", "free it")] for n, status in enumerate(found)]
    (row,) = rows_of(each, ["a", "b", "b", "c"])
    assert (row.status, row.ranks) == ("fail", (1, 3))
    assert (row.result, row.remedy) == ("ranks 1, 3 (hosts b, c): 1", "free it")
