"""A network that cannot serve the ranks is one line before they rendezvous; one rank needs none."""

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm.launch import network
from mlm.launch.environment import RankPosition
from mlm.launch.network import check_addresses, check_interface
from mlm.util.errors import UserError
from tests.launch.conftest import ROOT

HOSTS = {"node1": "10.0.0.1", "debian": "127.0.1.1", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}


@pytest.fixture(autouse=True)
def resolver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names resolve by HOSTS; returns the names that were looked up."""
    asked: list[str] = []

    def getaddrinfo(name: str, port: int | None, *options: object, **named: object) -> list[Any]:
        asked.append(name)
        if name not in HOSTS:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (HOSTS[name], port or 0))]

    monkeypatch.setattr(network.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(network.socket, "getfqdn", socket.gethostname)
    return asked


def named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(network.socket, "gethostname", lambda: name)
    monkeypatch.setattr(network.socket, "getfqdn", lambda: name)


def place(master: str, *, hosts: int = 2) -> RankPosition:
    return RankPosition(0, 2 * hosts, 0, 2, master_addr=master, master_port=1)


def test_unknown_gloo_interface_is_named_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    check_interface({})
    check_interface({"GLOO_SOCKET_IFNAME": "eth0,lo"})
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME=eth0,eth9.*interface eth9; use one of lo, eth0"):
        check_interface({"GLOO_SOCKET_IFNAME": "eth0,eth9"})


def test_master_that_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "node1")
    nodes = replace(place("node[7-8]"), master_addr="node7", nodes="node[7-8]")
    for master, problem in (
        (place("nosuch"), r"MASTER_ADDR=nosuch: host node1 cannot resolve.*/etc/hosts"),
        (nodes, r"SLURM_JOB_NODELIST=node\[7-8\]: host node1 .* node7.*set MASTER_ADDR"),
    ):
        with pytest.raises(UserError, match=problem):
            check_addresses(master, {}, wait_s=0.0)


def test_name_that_the_cluster_registers_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, resolver: list[str]
) -> None:
    named(monkeypatch, "node1")
    monkeypatch.setattr("time.sleep", lambda seconds: monkeypatch.setitem(HOSTS, "late", "10.0.0.9"))
    check_addresses(place("late"), {}, wait_s=60.0)
    assert resolver[:2] == ["late", "late"]


@pytest.mark.parametrize(
    ("name", "why"), [("nosuch", "does not resolve"), ("debian", "resolves to 127.0.1.1 only")]
)
def test_host_that_others_cannot_find_is_told_to_name_its_interface(
    monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    named(monkeypatch, name)
    with pytest.raises(UserError, match=rf"name of this host, {name}, {why}.*set GLOO_SOCKET_IFNAME"):
        check_addresses(place("node1"), {})


@pytest.mark.parametrize(
    ("master", "hosts", "variables"),
    [
        ("node1", 1, {}),  # no other host
        ("localhost", 2, {}),  # several launchers on one host
        ("node1", 2, {"GLOO_SOCKET_IFNAME": "lo"}),
    ],
)
def test_name_of_this_host_matters_only_to_other_hosts(
    monkeypatch: pytest.MonkeyPatch, master: str, hosts: int, variables: dict[str, str]
) -> None:
    named(monkeypatch, "nosuch")
    check_addresses(place(master, hosts=hosts), variables)


@pytest.mark.slow
def test_one_rank_runs_without_any_network(tmp_path: Path) -> None:
    command = ["unshare", "-rn", sys.executable, "-m", "tests.launch.jobs", "facts", str(tmp_path), "1"]
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("unshare -rn is not permitted here")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "rank-0.json").exists()
