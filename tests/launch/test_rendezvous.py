"""Ranks of a restarted job do not read keys that dead ones left in the store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from mlm.launch.process import store_of_attempt


def meet(store: Store, world_size: int) -> list[Store]:
    """All ranks of one attempt, each in a thread."""
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: store_of_attempt(store, rank, world_size, 20.0), range(world_size)))


def test_ranks_of_an_attempt_share_a_part_of_the_store() -> None:
    first, second, third = meet(HashStore(), 3)
    first.set("address", "here")
    assert second.get("address") == third.get("address") == b"here"


def test_an_attempt_does_not_see_what_the_one_before_left() -> None:
    store = HashStore()
    meet(store, 3)[1].set("address", "of a dead rank")
    assert not any(part.check(["address"]) for part in meet(store, 3))


def test_a_token_that_a_dead_rank_left_stands_for_nobody() -> None:
    """The rank that replaces it comes later than rank 0."""
    store = HashStore()
    store.set("mlm/token/1", "dead")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(store_of_attempt, store, 0, 2, 20.0)
        while not store.check(["mlm/attempt/dead"]):
            pass
        second = pool.submit(store_of_attempt, store, 1, 2, 20.0)
        first.result().set("address", "here")
        assert second.result().get("address") == b"here"


def test_a_missing_rank_ends_the_wait() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="timed out: 1 of 2 gloo ranks came"):
        store_of_attempt(store, 0, 2, 0.05)


def test_one_rank_needs_no_other() -> None:
    store = HashStore()
    assert store_of_attempt(store, 0, 1, 0.0) is store
