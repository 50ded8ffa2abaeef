"""The rendezvous of ranks: a store that all of them reach, and the names of those that do not come.

Addresses are checked first, before torch and gloo retry for minutes or hang.
"""

import ipaddress
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from datetime import timedelta
from threading import Thread

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from mlm.launch.environment import RankPlace
from mlm.launch.stop import LAUNCHED
from mlm.parallel.watch import LostPeer, is_transport_error, name_ranks
from mlm.util.errors import UserError

START_S = 120.0  # ranks import torch and read the disk at different speeds, whatever dist.timeout_s is
STORE_POLL_S, LONGEST_POLL_S = 0.02, 0.25
GRACE_S = 10.0
"""Seconds that other ranks wait longer than rank 0, so that they learn whom it missed."""
ELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun: ranks may be restarted, and the store is not new then
HOSTS_SHOWN = 4
NO_STORE = "what accepts connections there is no rank 0, or hangs"
LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
CONNECT_S = 5.0
RESOLVE_S = 15.0
"""Seconds that the name of another host gets: a cluster may register it after the job has started."""
RESOLVE_POLL_S = 0.5


class MissingRanksError(UserError):
    """Some ranks did not come."""

    exit_code = 1

    def __init__(self, problem: str, *, is_reported: bool = False) -> None:
        super().__init__(problem)
        self.is_reported = is_reported
        """True if another rank reports it."""


def rendezvous_store(place: RankPlace, timeout_s: float) -> Store:
    """Return a store of the ranks of this attempt, once all have come. Collective.

    Raises UserError if the port is taken or an address cannot be used, MissingRanksError if not all ranks
    come in time, LostPeer if rank 0 cannot be reached.
    """
    check_addresses(place, os.environ)
    start_s = max(START_S, timeout_s)
    if place.rank and (reason := no_connection(place.master_addr, place.master_port, start_s)):
        raise _unreachable(place, start_s, reason)
    try:
        return call_roll(_open_in_thread(place, start_s), place, start_s)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT={place.master_port} is in use on {place.master_addr}: set it to a free port"
            ) from None
        if is_transport_error(error):
            raise _unreachable(place, start_s, NO_STORE) from error
        raise


def _unreachable(place: RankPlace, start_s: float, reason: str) -> LostPeer:
    return LostPeer(
        f"rank {place.rank} (host {socket.gethostname()}): rank 0 did not answer at {place.master_addr} port "
        f"{place.master_port} within {start_s:g} s ({reason}): is it running, and can this host reach that "
        "port (MASTER_ADDR, MASTER_PORT)?"
    )


def _open_in_thread(place: RankPlace, timeout_s: float) -> Store:
    """Connect to the store in a thread: torch waits for good for a program that accepts and never answers."""
    opened: Future[Store] = Future()

    def work() -> None:
        try:
            opened.set_result(_open(place, timeout_s))
        except Exception as error:
            opened.set_exception(error)

    Thread(target=work, daemon=True).start()
    try:
        return opened.result(timeout_s)
    except WaitTimeoutError:
        raise _unreachable(place, timeout_s, NO_STORE) from None


def _open(place: RankPlace, timeout_s: float) -> Store:
    """Connect to the store, which rank 0 serves unless torchrun or a plain command does; wait for nobody."""
    timeout = timedelta(seconds=timeout_s)
    if ELASTIC in os.environ:
        store: Store = next(rendezvous("env://", timeout=timeout))[0]
        return store
    store = TCPStore(
        place.master_addr,
        place.master_port,
        place.world_size,
        is_master=place.rank == 0 and LAUNCHED not in os.environ,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    return PrefixStore(f"mlm-job-{place.job}", store)


def call_roll(store: Store, place: RankPlace, timeout_s: float) -> Store:
    """Return the part of `store` that belongs to this attempt of a job, once all ranks are here. Collective.

    torchrun restarts all ranks when one fails, and its store lives on: keys of the dead ranks (addresses,
    counts) would be taken for those of the living. A count of restarts does not identify an attempt, because
    each agent counts separately: a node whose own ranks did not fail has counted one less. So rank 0 names
    the attempt; each other rank leaves a new token and waits for the answer to it, which only a living rank 0
    gives. Raises MissingRanksError if a rank is missing after `timeout_s`.
    """
    rank, world_size = place.rank, place.world_size
    if world_size == 1:
        return store
    if rank == 0:
        attempt, absent = _admit_ranks(store, place, time.monotonic() + timeout_s)
        problem = "" if not absent else _missing(store, attempt, absent, place, timeout_s)
        store.set(f"{attempt}/missing", problem)
        if problem:
            raise MissingRanksError(problem)
        return PrefixStore(attempt, store)
    token = uuid.uuid4().hex
    store.set(f"mlm/token/{rank}", token)
    joined, missing = _wait_for_key(store, f"mlm/attempt/{token}", timeout_s), None
    if joined is not None:
        store.set(f"{joined}/{rank}", socket.gethostname())
        missing = _wait_for_key(store, f"{joined}/missing", timeout_s)
    if joined is None or missing is None:
        first = next((r for r in range(1, rank) if store.check([f"mlm/token/{r}"])), rank)
        raise MissingRanksError(_absence_line([0], place, timeout_s), is_reported=first != rank)
    if missing:
        raise MissingRanksError(missing, is_reported=True)
    return PrefixStore(joined, store)


def _admit_ranks(store: Store, place: RankPlace, end: float) -> tuple[str, list[int]]:
    """Answer every token, also one that replaces a dead rank's, until all ranks are here.

    Return the attempt's name and the ranks that have not come by `end`.
    """
    attempt, absent = f"mlm-{uuid.uuid4().hex}", list(range(1, place.world_size))
    answered: dict[int, bytes] = {}
    while True:
        for rank in absent:
            if not store.check([f"mlm/token/{rank}"]):
                continue
            token = store.get(f"mlm/token/{rank}")
            if answered.get(rank) != token:
                store.set(f"mlm/attempt/{token.decode()}", attempt)
                answered[rank] = token
        absent = [rank for rank in absent if not store.check([f"{attempt}/{rank}"])]
        if not absent or time.monotonic() > end:
            return attempt, absent
        time.sleep(STORE_POLL_S)


def _wait_for_key(store: Store, key: str, timeout_s: float) -> str | None:
    """Return what rank 0 wrote under a key; None if it has not after `timeout_s` and some seconds."""
    end, pause = time.monotonic() + timeout_s + GRACE_S, STORE_POLL_S
    while not store.check([key]):  # a wait inside the store would keep Python from noting signals
        if time.monotonic() > end:
            return None
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_POLL_S)
    return store.get(key).decode()


def _missing(store: Store, attempt: str, absent: list[int], place: RankPlace, timeout_s: float) -> str:
    """Return the line on ranks that did not come, with the hosts of those that did."""
    here = [rank for rank in range(1, place.world_size) if rank not in absent]
    hosts = Counter([socket.gethostname(), *(store.get(f"{attempt}/{rank}").decode() for rank in here)])
    shown = [f"{host} ({count})" for host, count in list(hosts.items())[:HOSTS_SHOWN]]
    more = f" and {len(hosts) - HOSTS_SHOWN} more hosts" if len(hosts) > HOSTS_SHOWN else ""
    return f"{_absence_line(absent, place, timeout_s)} (came: {', '.join(shown)}{more})"


def _absence_line(absent: list[int], place: RankPlace, timeout_s: float) -> str:
    return (
        f"{name_ranks(absent)} of {place.world_size} did not come to {place.master_addr} port "
        f"{place.master_port} within {timeout_s:g} s (dist.timeout_s, at least {START_S:g}); look whether "
        "each was started, and at what its host says"
    )


# ---- addresses


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


def check_addresses(place: RankPlace, environ: Mapping[str, str], *, wait_s: float = RESOLVE_S) -> None:
    """Raise UserError if MASTER_ADDR does not resolve, or other hosts cannot find this one over gloo.

    Without GLOO_SOCKET_IFNAME, gloo offers the address that this host's own name resolves to, and falls back
    to loopback, where ranks of other hosts wait for it until they time out.
    """
    check_interface(environ)
    own = socket.gethostname()
    master = place.master_addr
    setting = f"SLURM_JOB_NODELIST={place.nodes}" if place.nodes else f"MASTER_ADDR={master}"

    addresses = _addresses(master, 0.0 if master in (own, socket.getfqdn()) else wait_s)
    if not addresses:
        name = f"its first host, {master}" if place.nodes else "this name"
        raise UserError(
            f"{setting}: host {own} cannot resolve {name}; add it to /etc/hosts or DNS, or set "
            "MASTER_ADDR to an IP address (torchrun: --local-addr, 127.0.0.1 if there is one host)"
        )
    one_host = place.local_world_size == place.world_size or all(map(_is_loopback, addresses))
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
    end, pause = time.monotonic() + timeout_s, STORE_POLL_S
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
        pause = min(1.5 * pause, LONGEST_POLL_S)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
