"""Addresses of ranks, checked before torch and gloo retry for minutes or hang."""

import ipaddress
import socket
import time
from collections.abc import Mapping

from mlm.launch.environment import RankPosition
from mlm.util.errors import UserError

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
RESOLVE_S = 15.0
"""Seconds that the name of another host gets: a cluster may register it after the job has started."""
RESOLVE_POLL_S = 0.5
POLL_S, LONGEST_POLL_S = 0.02, 0.25


def check_interface(environ: Mapping[str, str]) -> None:
    """Raise UserError if GLOO_SOCKET_IFNAME names no network interface of this host."""
    here = [name for _, name in socket.if_nameindex()]
    for name in filter(None, environ.get(INTERFACE, "").split(",")):
        if name not in here:
            raise UserError(
                f"{INTERFACE}={environ[INTERFACE]}: host {socket.gethostname()} has no network interface "
                f"{name}; use one of {', '.join(here)}"
            )


def check_addresses(position: RankPosition, environ: Mapping[str, str], *, wait_s: float = RESOLVE_S) -> None:
    """Raise UserError if MASTER_ADDR does not resolve, or other hosts cannot find this one over gloo.

    Without GLOO_SOCKET_IFNAME, gloo offers the address that this host's own name resolves to, and falls back
    to loopback, where ranks of other hosts wait for it until they time out.
    """
    check_interface(environ)
    own = socket.gethostname()
    master = position.master_addr
    setting = f"SLURM_JOB_NODELIST={position.nodes}" if position.nodes else f"MASTER_ADDR={master}"

    addresses = _addresses(master, 0.0 if master in (own, socket.getfqdn()) else wait_s)
    if not addresses:
        name = f"its first host, {master}" if position.nodes else "this name"
        raise UserError(
            f"{setting}: host {own} cannot resolve {name}; add it to /etc/hosts or DNS, or set "
            "MASTER_ADDR to an IP address (torchrun: --local-addr, 127.0.0.1 if there is one host)"
        )
    one_host = position.local_world_size == position.world_size or all(map(_is_loopback, addresses))
    if one_host or environ.get(INTERFACE):
        return
    own_addresses = _addresses(own, 0.0)
    if all(map(_is_loopback, own_addresses)):
        what = f"resolves to {own_addresses[0]} only" if own_addresses else "does not resolve"
        names = [name for _, name in socket.if_nameindex() if name != "lo"]
        raise UserError(
            f"the name of this host, {own}, {what}: ranks of other hosts cannot connect to it over gloo; set "
            f"{INTERFACE} to its network interface ({', '.join(names) or 'none is up'}), or add the name "
            "with its address to /etc/hosts or DNS"
        )


def _addresses(name: str, wait_s: float) -> list[str]:
    """Return the IP addresses of a name, trying for `wait_s`; empty if it has none."""
    end = time.monotonic() + wait_s
    while True:
        try:
            return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except (socket.gaierror, UnicodeError):
            if time.monotonic() >= end:
                return []
        time.sleep(RESOLVE_POLL_S)


def no_connection(address: str, port: int, timeout_s: float) -> str:
    """Return why nothing accepts a connection at a port within `timeout_s`; empty once something does.

    Torch's client, which must not be the first to try, outlives its timeout and prints C++ stacks.
    """
    end, pause = time.monotonic() + timeout_s, POLL_S
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(5.0, left))).close()
            return ""
        except OSError as error:
            reason = error.strerror or "no answer"
        if time.monotonic() + pause >= end:
            return reason
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_POLL_S)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
