"""Addresses of ranks, checked before torch and gloo retry for minutes or hang."""

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress

from mlm.launch.environment import RankPosition
from mlm.util.errors import UserError
from mlm.util.system import poll

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
RESOLVE_S = 15.0
"""Seconds to resolve another host's name: a cluster may register it after the job has started."""


def check_interface(environ: Mapping[str, str]) -> None:
    """Raise UserError if GLOO_SOCKET_IFNAME names no network interface of this host."""
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in filter(None, environ.get(INTERFACE, "").split(",")):
        if name not in interfaces:
            raise UserError(
                f"{INTERFACE}={environ[INTERFACE]}: host {socket.gethostname()} has no network interface "
                f"{name}; use one of {', '.join(interfaces)}"
            )


def check_addresses(position: RankPosition, environ: Mapping[str, str], *, wait_s: float = RESOLVE_S) -> None:
    """Raise UserError if MASTER_ADDR does not resolve, or other hosts cannot find this one over gloo.

    Without GLOO_SOCKET_IFNAME, gloo offers the address that this host's own name resolves to, and falls back
    to loopback, where ranks of other hosts wait for it until they time out.
    """
    check_interface(environ)
    host = socket.gethostname()
    master = position.master_addr
    setting = f"SLURM_JOB_NODELIST={position.nodes}" if position.nodes else f"MASTER_ADDR={master}"

    addresses = _addresses(master, 0.0 if master in (host, socket.getfqdn()) else wait_s)
    if not addresses:
        name = f"its first host, {master}" if position.nodes else "this name"
        raise UserError(
            f"{setting}: host {host} cannot resolve {name}; add it to /etc/hosts or DNS, or set "
            "MASTER_ADDR to an IP address (torchrun: --local-addr, 127.0.0.1 if there is one host)"
        )
    one_host = position.local_world_size == position.world_size or all(map(_is_loopback, addresses))
    if one_host or environ.get(INTERFACE):
        return
    addresses_here = _addresses(host, 0.0)
    if all(map(_is_loopback, addresses_here)):
        problem = f"resolves to {addresses_here[0]} only" if addresses_here else "does not resolve"
        names = [name for _, name in socket.if_nameindex() if name != "lo"]
        raise UserError(
            f"the name of this host, {host}, {problem}: ranks of other hosts cannot connect to it over gloo; "
            f"set {INTERFACE} to its network interface ({', '.join(names) or 'none is up'}), or add the name "
            "with its address to /etc/hosts or DNS"
        )


def _addresses(name: str, wait_s: float) -> list[str]:
    """Return the IP addresses of a name, trying for `wait_s`; empty if it has none."""
    for _ in poll(wait_s):
        with suppress(socket.gaierror, UnicodeError):
            return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return []


def no_connection(address: str, port: int, timeout_s: float) -> str:
    """Return why nothing accepts a connection at a port within `timeout_s`; "" once something does.

    Call it before torch's client, which outlives its timeout and prints C++ stacks.
    """
    reason = ""
    for remaining in poll(timeout_s):
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(5.0, remaining))).close()
            return ""
        except OSError as error:
            reason = error.strerror or "no answer"
    return reason


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
