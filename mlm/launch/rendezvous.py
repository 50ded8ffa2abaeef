"""The rendezvous of ranks: a store that all of them reach, and the names of those that do not come.

Addresses are checked first, before torch and gloo retry for minutes or hang.
"""

import os
import socket
import sys
import time
import uuid
from collections import Counter
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from datetime import timedelta
from threading import Thread, Timer

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from mlm.launch.environment import LISTENER, RankPlace
from mlm.launch.network import LONGEST_POLL_S, POLL_S, check_addresses, no_connection
from mlm.launch.stop import LAUNCHED
from mlm.parallel.watch import LostPeer, is_transport_error, name_ranks
from mlm.util.errors import UserError

START_S = 120.0  # ranks import torch and read the disk at different speeds, whatever dist.timeout_s is
GRACE_S = 10.0
"""Seconds that other ranks wait longer than rank 0, so that they learn whom it missed."""
ELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun: ranks may be restarted, and the store is not new then
ANNOUNCE_S = 5.0
"""Seconds after which a rank says whom it waits for."""
NO_STORE = "what accepts connections there is no rank 0, or hangs"


class MissingRanksError(UserError):
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
    awaited = list(range(1, place.world_size)) if place.rank == 0 else [0]

    def announce() -> None:
        rank, size = place.variables
        print(
            f"mlm: rank {place.rank} of {place.world_size} waits for {name_ranks(awaited)} at "
            f"{place.master_addr} port {place.master_port}; {rank}={place.rank} and {size}={place.world_size}"
            f" in the environment made this process a rank: unset {rank} for a plain start",
            file=sys.stderr,
            flush=True,
        )

    timer = Timer(ANNOUNCE_S, announce)
    timer.daemon = True
    if LAUNCHED not in os.environ and place.local_rank in (0, place.rank):  # one per host
        timer.start()
    try:
        if place.rank and (reason := no_connection(place.master_addr, place.master_port, start_s)):
            raise _unreachable(place, start_s, reason)
        return call_roll(_open_in_thread(place, start_s), place, start_s, awaited)
    except LostPeer:
        raise
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT={place.master_port} is in use on {place.master_addr}: set it to a free port"
            ) from None
        if is_transport_error(error):
            raise _unreachable(place, start_s, NO_STORE) from error
        raise
    finally:
        timer.cancel()


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
    """Connect to the store, which rank 0 serves unless torchrun does; wait for nobody."""
    timeout = timedelta(seconds=timeout_s)
    if ELASTIC in os.environ and LAUNCHED not in os.environ:
        store: Store = next(rendezvous("env://", timeout=timeout))[0]
        return store
    listener = os.environ.pop(LISTENER, None)
    store = TCPStore(
        place.master_addr,
        place.master_port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=listener is None,
        master_listen_fd=None if listener is None else int(listener),
    )
    return PrefixStore(f"mlm-job-{place.job}", store)


def call_roll(store: Store, place: RankPlace, timeout_s: float, awaited: list[int] | None = None) -> Store:
    """Return the part of `store` that belongs to this attempt of a job, once all ranks are here. Collective.

    torchrun restarts all ranks when one fails, and its store lives on: keys of dead ranks would be taken for
    keys of the living. A count of restarts does not identify an attempt, because each agent counts
    separately. So rank 0 names the attempt; each other rank leaves a new token and waits for the answer to
    it, which only a living rank 0 gives. Ranks that are here are removed from `awaited`. Raises
    MissingRanksError if a rank is missing after `timeout_s`.
    """
    rank, world_size = place.rank, place.world_size
    if world_size == 1:
        return store
    if rank == 0:
        absent = list(range(1, world_size)) if awaited is None else awaited
        attempt = _admit_ranks(store, absent, time.monotonic() + timeout_s)
        problem = ""
        if absent:
            here = [rank for rank in range(1, world_size) if rank not in absent]
            names = [socket.gethostname(), *(store.get(f"{attempt}/{rank}").decode() for rank in here)]
            hosts = [f"{host} ({count})" for host, count in Counter(names).items()]
            more = f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else ""
            problem = f"{_absence_line(absent, place, timeout_s)} (came: {', '.join(hosts[:4])}{more})"
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


def _admit_ranks(store: Store, absent: list[int], end: float) -> str:
    """Answer every token, also one that replaces a dead rank's, until all ranks are here or it is `end`.

    Return the attempt's name.
    """
    attempt = f"mlm-{uuid.uuid4().hex}"
    answered: dict[int, bytes] = {}
    while True:
        for rank in absent:
            if not store.check([f"mlm/token/{rank}"]):
                continue
            token = store.get(f"mlm/token/{rank}")
            if answered.get(rank) != token:
                store.set(f"mlm/attempt/{token.decode()}", attempt)
                answered[rank] = token
        absent[:] = [rank for rank in absent if not store.check([f"{attempt}/{rank}"])]
        if not absent or time.monotonic() > end:
            return attempt
        time.sleep(POLL_S)


def _wait_for_key(store: Store, key: str, timeout_s: float) -> str | None:
    """Return what rank 0 wrote under a key; None if it has not after `timeout_s` and some seconds."""
    end, pause = time.monotonic() + timeout_s + GRACE_S, POLL_S
    while not store.check([key]):  # a wait inside the store would keep Python from noting signals
        if time.monotonic() > end:
            return None
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_POLL_S)
    return store.get(key).decode()


def _absence_line(absent: list[int], place: RankPlace, timeout_s: float) -> str:
    return (
        f"{name_ranks(absent)} of {place.world_size} did not come to {place.master_addr} port "
        f"{place.master_port} within {timeout_s:g} s (dist.timeout_s, at least {START_S:g}); look whether "
        "each was started, and at what its host says"
    )
