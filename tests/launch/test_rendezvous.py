"""Ranks come together once: without keys of dead ones, and with the names of those that do not come."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
from torch.distributed import HashStore, Store

from mlm.launch import rendezvous
from mlm.launch.environment import RankPosition
from mlm.launch.rendezvous import MissingRanksError, call_roll, rendezvous_store
from mlm.parallel.watch import LostPeer
from mlm.util.errors import UserError
from tests.launch.ranks_of_jobs import free_port


def place(rank: int, world_size: int, port: int = 1) -> RankPosition:
    return RankPosition(rank, world_size, rank, world_size, master_addr="127.0.0.1", master_port=port)


def meet(store: Store, world_size: int) -> list[Store]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: call_roll(store, place(rank, world_size), 20.0), range(world_size)))


def test_ranks_of_an_attempt_share_a_part_of_the_store_that_the_next_one_does_not_see() -> None:
    store = HashStore()
    first, second, third = meet(store, 3)
    first.set("address", "of a dead rank")
    assert second.get("address") == third.get("address") == b"of a dead rank"
    assert not any(part.check(["address"]) for part in meet(store, 3))


def test_a_token_that_a_dead_rank_left_stands_for_nobody() -> None:
    """The rank that replaces it comes later than rank 0."""
    store = HashStore()
    store.set("mlm/token/1", "dead")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(call_roll, store, place(0, 2), 20.0)
        while not store.check(["mlm/attempt/dead"]):
            pass
        second = pool.submit(call_roll, store, place(1, 2), 20.0)
        first.result().set("address", "here")
        assert second.result().get("address") == b"here"


def failed(store: Store, rank: int, world_size: int, timeout_s: float = 0.3) -> MissingRanksError:
    with pytest.raises(MissingRanksError) as raised:
        call_roll(store, place(rank, world_size), timeout_s)
    return raised.value


def test_ranks_that_do_not_come_are_named_once_with_the_hosts_of_those_that_do() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, third = pool.map(lambda rank: failed(store, rank, 4), (0, 2))
    assert str(first) == str(third)
    assert str(first).startswith("ranks 1, 3 of 4 did not come to 127.0.0.1 port 1 within 0.3 s")
    assert f"(came: {socket.gethostname()} (2))" in str(first)
    assert [error.is_reported for error in (first, third)] == [False, True]


def test_a_rank_0_that_does_not_come_is_named_by_the_first_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.0)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: failed(store, rank, 3), (1, 2)))
    assert str(found[0]).startswith("rank 0 of 3 did not come")
    assert [error.is_reported for error in found] == [False, True]


def test_a_port_in_use_is_a_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rendezvous.ELASTIC, raising=False)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen(1)
        port, begin = other.getsockname()[1], time.monotonic()
        with pytest.raises(UserError, match=rf"MASTER_PORT={port} is in use on 127.0.0.1: set it to"):
            rendezvous_store(place(0, 2, port), 60.0)
    assert time.monotonic() - begin < 10


def test_a_rank_0_that_nobody_reaches_is_named_in_time_and_torch_is_silent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(rendezvous.ELASTIC, raising=False)
    monkeypatch.setattr(rendezvous, "START_S", 0.2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        port, begin = free.getsockname()[1], time.monotonic()
        with pytest.raises(LostPeer, match=r"rank 1 \(host .*\): rank 0 did not answer") as raised:
            rendezvous_store(place(1, 2, port), 0.2)
    assert time.monotonic() - begin < 2
    assert f"at 127.0.0.1 port {port} within 0.2 s (Connection refused): is it running" in str(raised.value)
    assert capfd.readouterr().err == ""


def test_a_port_that_accepts_and_never_answers_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    over = Event()
    monkeypatch.setattr(rendezvous, "START_S", 0.2)
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *_, **__: over.wait(60.0))  # as torch's client
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        with pytest.raises(LostPeer, match=f"within 0.2 s.*{rendezvous.NO_STORE}"):
            rendezvous_store(place(1, 2, other.getsockname()[1]), 0.2)
    over.set()


def test_ranks_of_another_job_on_the_port_are_not_taken_for_this_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SLURM's jobs and steps have their own part of the store."""
    monkeypatch.delenv(rendezvous.ELASTIC, raising=False)
    monkeypatch.setattr(rendezvous, "START_S", 0.5)
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.5)
    port = free_port()
    ours, theirs = (replace(place(rank, 2, port), job=job) for rank, job in ((0, "1.0"), (1, "2.0")))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous_store, ours, 0.5)
        second = pool.submit(rendezvous_store, theirs, 0.5)
        with pytest.raises(MissingRanksError, match="rank 1 of 2 did not come"):
            first.result()
        with pytest.raises((MissingRanksError, LostPeer)):
            second.result()


def test_a_long_wait_names_who_is_awaited_and_what_made_this_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "ANNOUNCE_S", 0.0)
    monkeypatch.delenv("MLM_LAUNCHED", raising=False)
    port = free_port()
    monkeypatch.setattr(rendezvous, "START_S", 1.0)
    with pytest.raises(MissingRanksError):
        rendezvous_store(place(0, 3, port), 1.0)
    said = capsys.readouterr().err
    assert said == (
        f"mlm: rank 0 of 3 waits for ranks 1, 2 at 127.0.0.1 port {port}; RANK=0 and WORLD_SIZE=3 in the "
        "environment made this process a rank: unset RANK for a plain start\n"
    )
