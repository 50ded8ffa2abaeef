"""Hosts that are network namespaces of this machine, joined by a bridge: each has an address and a name.

Everything lies in namespaces, /etc/hosts too: the machine's own network and files stay as they are.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HEAD, NODES = "head", ("n1", "n2")
SUBNET = "10.97.0"
ADDRESSES = {HEAD: f"{SUBNET}.1", "n1": f"{SUBNET}.11", "n2": f"{SUBNET}.12"}
END_S = 10.0


def sh(*words: str, check: bool = True) -> str:
    """Run a command; its output. Raises CalledProcessError."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class Network:
    """Three namespaces: `head` with the bridge, and the nodes."""

    folder: Path
    """For what each host finds in /etc/hosts."""

    words = "each node in a network namespace, with an address and a host name"

    def up(self) -> None:
        """Make the hosts. Raises RuntimeError, or OSError without `ip`."""
        self.down()
        for host in ADDRESSES:
            lines = [f"{address} {name}" for name, address in ADDRESSES.items()]
            self.hosts(host).write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            sh("ip", "netns", "add", _space(host))
            sh(*_in(_space(host)), "ip", "link", "set", "lo", "up")
        head = _in(_space(HEAD))
        sh(*head, "ip", "link", "add", "bridge", "type", "bridge")
        sh(*head, "ip", "addr", "add", f"{ADDRESSES[HEAD]}/24", "dev", "bridge")
        sh(*head, "ip", "link", "set", "bridge", "up")
        for node in NODES:
            inside, peer = _in(_space(node)), ("peer", "name", "eth0", "netns", _space(node))
            sh(*head, "ip", "link", "add", node, "type", "veth", *peer)
            sh(*head, "ip", "link", "set", node, "master", "bridge", "up")
            sh(*inside, "ip", "addr", "add", f"{ADDRESSES[node]}/24", "dev", "eth0")
            sh(*inside, "ip", "link", "set", "eth0", "up")

    def hosts(self, host: str) -> Path:
        """A host's /etc/hosts."""
        return self.folder / f"hosts-{host}"

    def on(self, host: str, *words: str) -> list[str]:
        # Not `ip netns exec`: it mounts another /sys, without the control groups that slurmd looks for.
        prepare = f'mount --bind {self.hosts(host)} /etc/hosts && hostname {host} && exec "$@"'
        inside = ("nsenter", f"--net=/run/netns/{_space(host)}", "unshare", "--uts", "--mount")
        return [*inside, "sh", "-c", prepare, "-", *words]

    def cable(self, node: str, state: str) -> None:
        sh(*_in(_space(HEAD)), "ip", "link", "set", node, state)

    def narrow(self, node: str, rate: str) -> None:
        limit = ("tbf", "rate", rate, "burst", "16kb", "latency", "1s")
        sh(*_in(_space(node)), "tc", "qdisc", "replace", "dev", "eth0", "root", *limit)

    def processes(self, host: str) -> list[int]:
        return [int(pid) for pid in sh("ip", "netns", "pids", _space(host), check=False).split()]

    def down(self) -> None:
        for host in ADDRESSES:
            end(partial(self.processes, host))
            sh("ip", "netns", "del", _space(host), check=False)


def kill(pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes of ours, where they are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def end(processes: Callable[[], list[int]]) -> None:
    limit = time.monotonic() + END_S
    while (left := processes()) and time.monotonic() < limit:
        kill(left)
        time.sleep(0.1)


def _space(host: str) -> str:
    return f"mlm-{host}"


def _in(space: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", space)
