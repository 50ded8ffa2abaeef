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
from mlm.launch.doctor.findings import Finding, Status, different_versions, rows_of
from mlm.launch.doctor.host import GIB, MIB, environment
from mlm.launch.environment import RankPlace
from mlm.util import system


def statvfs(free: int, whole: int = 1000 * GIB, inodes: int = 10) -> Callable[[Any], Any]:
    found = SimpleNamespace(f_bavail=free, f_blocks=whole, f_frsize=1, f_files=10, f_favail=inodes)
    return lambda folder: found


def limited(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, 1 << 20))


@pytest.mark.parametrize(("free", "status"), [(100 * MIB, "fail"), (3 * GIB, "warn"), (9 * GIB, "ok")])
def test_memory_is_judged_by_its_share_of_a_rank(free: int, status: str) -> None:
    found = host.memory(free, ranks_here=2)
    assert (found.status, "start fewer ranks" in found.remedy) == (status, True)


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


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (statvfs(100 * MIB), "fail"),
        (statvfs(2 * GIB), "warn"),
        (statvfs(100 * GIB), "ok"),
        (statvfs(100 * GIB, inodes=0), "fail"),
    ],
)
def test_a_full_disk_is_found(found: Any, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "statvfs", found)
    assert host.disk(Path("runs")).status == status


def test_a_folder_that_this_host_lacks_is_found(tmp_path: Path) -> None:
    assert host.disk(tmp_path / "nowhere").status == "fail"


@pytest.mark.parametrize(("soft", "status"), [(100, "fail"), (300, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_a_limit_of_open_files_is_found(soft: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, soft)
    assert host.open_files(world_size=8).status == status
    assert "ulimit -n 2304" in host.open_files(world_size=512).remedy or status == "ok"


@pytest.mark.parametrize(("soft", "on_gpu", "status"), [(8192, True, "warn"), (8192, False, "ok")])
def test_a_limit_of_locked_memory_is_found(
    soft: int, on_gpu: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, soft)
    assert host.locked_memory(on_gpu).status == status


@pytest.mark.parametrize(
    ("free", "on_gpu", "status"),
    [(MIB, False, "fail"), (64 * MIB, True, "warn"), (64 * MIB, False, "ok"), (9 * GIB, True, "ok")],
)
def test_a_small_shared_memory_is_found(
    free: int, on_gpu: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.os, "statvfs", statvfs(free))
    found = host.shared_memory(on_gpu)
    assert (found.status, "--shm-size" in found.remedy) == (status, True)


def test_host_names_that_do_not_resolve_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(name: str, *_: object, **__: object) -> list[Any]:
        if name != "node1":
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(network.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(network.socket, "gethostname", lambda: "node1")
    place = RankPlace(0, 4, 0, 2, master_addr="nosuch", master_port=1)
    found = host.names(place, {})
    assert (found.status, "MASTER_ADDR=nosuch" in found.result) == ("fail", True)
    assert "set MASTER_ADDR" in found.remedy
    assert host.names(None, {}).status == "ok"
    monkeypatch.setattr(network.socket, "gethostname", lambda: "node2")
    assert host.names(None, {}).status == "warn"


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        *((name, value, "warn") for name, value in [("NCCL_DEBUG", "info"), ("NCCL_P2P_DISABLE", "1")]),
        *((name, "1", "warn") for name in ("NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING")),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warn"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warn"),
        ("OMP_NUM_THREADS", "4096", "warn"),
        *((name, value, "ok") for name, value in [("NCCL_DEBUG", "WARN"), ("NCCL_P2P_DISABLE", "0")]),
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
    each = [[Finding("disk", status, f"{n}", "free it")] for n, status in enumerate(found)]
    (row,) = rows_of(each, ["a", "b", "b", "c"])
    assert (row.status, row.ranks) == ("fail", (1, 3))
    assert (row.result, row.remedy) == ("ranks 1, 3 (hosts b, c): 1", "free it")


def test_a_row_of_ranks_that_are_fine_needs_no_remedy() -> None:
    (row,) = rows_of([[Finding("disk", "ok", "9 GB", "free it")]] * 2, ["a", "b"])
    assert (row.result, row.remedy, row.ranks) == ("9 GB", "", ())


def test_versions_that_differ_name_both_and_the_hosts() -> None:
    ours = {"mlm": "1", "torch": "2.11", "python": "3.12"}
    assert different_versions(["a", "b"], [ours, ours]) == ""
    found = different_versions(["a", "b", "b"], [ours, {**ours, "torch": "2.12"}, {**ours, "torch": "2.12"}])
    assert found == "torch 2.12 on ranks 1, 2 (host b), 2.11 on rank 0 (host a)"
