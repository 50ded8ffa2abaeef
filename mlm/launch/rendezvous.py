"""The rendezvous of ranks: a store that all of them reach, and the names of missing ranks.

Addresses are checked first, before torch and gloo retry for minutes or hang.
"""

import os
import socket
import sys
import uuid
from collections import Counter
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from datetime import timedelta
from threading import Thread, Timer

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from mlm.launch.environment import LISTENER, RankPosition
from mlm.launch.network import check_addresses, no_connection
from mlm.launch.stop import LAUNCHED
from mlm.parallel.watch import LostPeer, is_transport_error, name_ranks
from mlm.util.errors import UserError
from mlm.util.system import POLL_S, poll

START_S = 120.0  # least timeout: ranks import torch and read the disk at different speeds
GRACE_S = 10.0
"""Seconds that other ranks wait longer than rank 0, to receive its list of missing ranks."""
ELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun, which restarts ranks on the same store
ANNOUNCE_S = 5.0
"""Seconds after which a rank prints the ranks that it waits for."""
NO_STORE = "what accepts connections there is no rank 0, or hangs"


class MissingRanksError(UserError):
    exit_code = 1

    def __init__(self, problem: str, *, is_reported: bool = False) -> None:
        super().__init__(problem)
        self.is_reported = is_reported
        """True if another rank reports it."""


def rendezvous_store(position: RankPosition, timeout_s: float) -> Store:
    """Return a store of the ranks of this attempt, once all have joined. Collective.

    Raises UserError if the port is taken or an address cannot be used, MissingRanksError if not all ranks
    come in time, LostPeer if rank 0 cannot be reached.
    """
    check_addresses(position, os.environ)
    start_s = max(START_S, timeout_s)
    awaited = list(range(1, position.world_size)) if position.rank == 0 else [0]

    def announce() -> None:
        rank, size = position.variables
        print(
            f"mlm: rank {position.rank} of {position.world_size} waits for {name_ranks(awaited)} at "
            f"{position.master_addr} port {position.master_port}; {rank}={position.rank} and "
            f"{size}={position.world_size} in the environment made this process a rank: unset {rank} for a "
            "plain start",
            file=sys.stderr,
            flush=True,
        )

    timer = Timer(ANNOUNCE_S, announce)
    timer.daemon = True
    if LAUNCHED not in os.environ and position.local_rank in (0, position.rank):  # one per host
        timer.start()
    try:
        if position.rank and (reason := no_connection(position.master_addr, position.master_port, start_s)):
            raise _unreachable(position, start_s, reason)
        return call_roll(_open_in_thread(position, start_s), position, start_s, awaited)
    except LostPeer:
        raise
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT={position.master_port} is in use on {position.master_addr}: set it to a free "
                "port"
            ) from None
        if is_transport_error(error):
            raise _unreachable(position, start_s, NO_STORE) from error
        raise
    finally:
        timer.cancel()


def _unreachable(position: RankPosition, start_s: float, reason: str) -> LostPeer:
    return LostPeer(
        f"rank {position.rank} (host {socket.gethostname()}): rank 0 did not answer at "
        f"{position.master_addr} port {position.master_port} within {start_s:g} s ({reason}): is it running, "
        "and can this host reach that port (MASTER_ADDR, MASTER_PORT)?"
    )


def _open_in_thread(position: RankPosition, timeout_s: float) -> Store:
    """Connect to the store, which rank 0 serves unless torchrun does; wait for no other rank.

    In a thread: torch waits forever for a program that accepts and never answers.
    """
    opened: Future[Store] = Future()

    def work() -> None:
        timeout = timedelta(seconds=timeout_s)
        try:
            if ELASTIC in os.environ and LAUNCHED not in os.environ:
                opened.set_result(next(rendezvous("env://", timeout=timeout))[0])
                return
            listener = os.environ.pop(LISTENER, None)
            store = TCPStore(
                position.master_addr,
                position.master_port,
                position.world_size,
                is_master=position.rank == 0,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=listener is None,
                master_listen_fd=None if listener is None else int(listener),
            )
            opened.set_result(PrefixStore(f"mlm-job-{position.job}", store))
        except Exception as error:
            opened.set_exception(error)

    Thread(target=work, daemon=True).start()
    try:
        return opened.result(timeout_s)
    except WaitTimeoutError:
        raise _unreachable(position, timeout_s, NO_STORE) from None


def call_roll(
    store: Store, position: RankPosition, timeout_s: float, awaited: list[int] | None = None
) -> Store:
    """Return the part of `store` for this attempt of a job, once all ranks have joined. Collective.

    torchrun restarts all ranks when one fails and keeps its store, with the keys of dead ranks. Restart
    counts do not identify an attempt, as each agent counts separately. So rank 0 names the attempt; each
    other rank writes a new token and waits for rank 0's answer to it. Ranks that join are removed from
    `awaited`. Raises MissingRanksError if a rank is missing after `timeout_s`.
    """
    rank, world_size = position.rank, position.world_size
    if world_size == 1:
        return store
    if rank == 0:
        absent = list(range(1, world_size)) if awaited is None else awaited
        attempt = _admit_ranks(store, absent, timeout_s)
        problem = ""
        if absent:
            present = [rank for rank in range(1, world_size) if rank not in absent]
            names = [socket.gethostname(), *(store.get(f"{attempt}/{rank}").decode() for rank in present)]
            hosts = [f"{host} ({count})" for host, count in Counter(names).items()]
            more = f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else ""
            problem = f"{_absence_line(absent, position, timeout_s)} (came: {', '.join(hosts[:4])}{more})"
        store.set(f"{attempt}/missing", problem)
        if problem:
            raise MissingRanksError(problem)
        return PrefixStore(attempt, store)
    token = uuid.uuid4().hex
    store.set(f"mlm/token/{rank}", token)
    prefix, missing = _wait_for_key(store, f"mlm/attempt/{token}", timeout_s), None
    if prefix is not None:
        store.set(f"{prefix}/{rank}", socket.gethostname())
        missing = _wait_for_key(store, f"{prefix}/missing", timeout_s)
    if prefix is None or missing is None:
        reporter = next((r for r in range(1, rank) if store.check([f"mlm/token/{r}"])), rank)
        raise MissingRanksError(_absence_line([0], position, timeout_s), is_reported=reporter != rank)
    if missing:
        raise MissingRanksError(missing, is_reported=True)
    return PrefixStore(prefix, store)


def _admit_ranks(store: Store, absent: list[int], timeout_s: float) -> str:
    """Answer every token, also of restarted ranks, until all ranks have joined or `timeout_s` has passed.

    Return the attempt's name.
    """
    attempt = f"mlm-{uuid.uuid4().hex}"
    answered: dict[int, bytes] = {}
    for _ in poll(timeout_s, longest_s=POLL_S):
        for rank in absent:
            if not store.check([f"mlm/token/{rank}"]):
                continue
            token = store.get(f"mlm/token/{rank}")
            if answered.get(rank) != token:
                store.set(f"mlm/attempt/{token.decode()}", attempt)
                answered[rank] = token
        absent[:] = [rank for rank in absent if not store.check([f"{attempt}/{rank}"])]
        if not absent:
            break
    return attempt


def _wait_for_key(store: Store, key: str, timeout_s: float) -> str | None:
    """Return rank 0's value of a key; None without one after `timeout_s` and GRACE_S."""
    for _ in poll(timeout_s + GRACE_S):  # a wait inside the store would block Python's signal handlers
        if store.check([key]):
            return store.get(key).decode()
    return None


def _absence_line(absent: list[int], position: RankPosition, timeout_s: float) -> str:
    return (
        f"{name_ranks(absent)} of {position.world_size} did not come to {position.master_addr} port "
        f"{position.master_port} within {timeout_s:g} s (dist.timeout_s, at least {START_S:g}); look whether "
        "each was started, and at what its host says"
    )
