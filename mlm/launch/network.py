"""Checks of the network between ranks, before torch and gloo retry for minutes or hang."""

import ipaddress
import socket
import sys
import time
from collections.abc import Callable, Mapping

from mlm.launch.environment import Place
from mlm.util.errors import UserError

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
CONNECT_S = 5.0
RESOLVE_S = 15.0
"""Seconds that the name of another host gets: a cluster may register it after the job has started."""
SHORTEST_RETRY_S, POLL_S = 0.02, 0.5


def check_loopback() -> None:
    """Raise UserError if processes of this host cannot connect to each other."""
    try:
        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            listener.listen(1)
            socket.create_connection(listener.getsockname(), timeout=CONNECT_S).close()
    except OSError as error:
        raise UserError(
            f"no working loopback interface: cannot connect to {LOOPBACK} ({error.strerror or error}), over "
            "which the ranks of one host rendezvous; bring it up (`ip link set lo up`), or run one rank "
            "(tp=1 pp=1 dp=1), which needs no network"
        ) from None


def check_interface(environ: Mapping[str, str]) -> None:
    """Raise UserError if GLOO_SOCKET_IFNAME names no network interface of this host."""
    here = interfaces()
    for name in filter(None, environ.get(INTERFACE, "").split(",")):
        if name not in here:
            raise UserError(
                f"{INTERFACE}={environ[INTERFACE]}: host {socket.gethostname()} has no network interface "
                f"{name}; use one of {', '.join(here)}"
            )


def interfaces() -> list[str]:
    """Return the network interfaces of this host."""
    return [name for _, name in socket.if_nameindex()]


def check_addresses(place: Place, environ: Mapping[str, str], *, wait_s: float = RESOLVE_S) -> None:
    """Raise UserError if MASTER_ADDR does not resolve, or other hosts cannot find this one over gloo.

    Without GLOO_SOCKET_IFNAME, gloo offers the address that this host's own name resolves to, and falls back
    to loopback, where ranks of other hosts wait for it until they time out.
    """
    check_interface(environ)
    own = socket.gethostname()
    master = place.master_addr
    setting = f"SLURM_JOB_NODELIST={place.nodes}" if place.nodes else f"MASTER_ADDR={master}"

    def announce() -> None:
        if place.local_rank == 0:
            print(f"mlm: {setting}: {master} does not resolve yet: trying for {wait_s:g} s", file=sys.stderr)

    found = _addresses(master, 0.0 if master in (own, socket.getfqdn()) else wait_s, announce)
    if not found:
        name = f"its first host, {master}" if place.nodes else "this name"
        raise UserError(
            f"{setting}: host {own} cannot resolve {name}; add it to /etc/hosts or DNS, or set "
            "MASTER_ADDR to an IP address (torchrun: --local-addr, 127.0.0.1 if there is one host)"
        )
    one_host = place.local_world_size == place.world_size or all(map(_is_loopback, found))
    if one_host or environ.get(INTERFACE):
        return
    ours = _addresses(own, 0.0)
    if all(map(_is_loopback, ours)):
        what = f"resolves to {ours[0]} only" if ours else "does not resolve"
        names = [name for name in interfaces() if name != "lo"]
        raise UserError(
            f"the name of this host, {own}, {what}: ranks of other hosts cannot connect to it over gloo; set "
            f"{INTERFACE} to its network interface ({', '.join(names) or 'none is up'}), or add the name "
            "with its address to /etc/hosts or DNS"
        )


def _addresses(name: str, wait_s: float, announce: Callable[[], None] = lambda: None) -> list[str]:
    """Return the IP addresses of a name, trying for `wait_s`; empty if it has none.

    Calls `announce` once before it tries again.
    """
    end, is_first = time.monotonic() + wait_s, True
    while True:
        try:
            return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except (socket.gaierror, UnicodeError):
            if time.monotonic() >= end:
                return []
        if is_first:
            announce()
            is_first = False
        time.sleep(POLL_S)


def no_connection(address: str, port: int, timeout_s: float) -> str:
    """Return why nothing accepts a connection at a port within `timeout_s`; empty once something does.

    Torch's client, which must not be the first to try, outlives its timeout and prints C++ stacks.
    """
    end, pause = time.monotonic() + timeout_s, SHORTEST_RETRY_S
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(CONNECT_S, left))).close()
            return ""
        except OSError as error:
            reason = error.strerror or "no answer"
        if time.monotonic() + pause >= end:
            return reason
        time.sleep(pause)
        pause = min(1.5 * pause, POLL_S)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
