"""Which attempt of a restarted job a rank belongs to.

torchrun restarts all ranks when one fails, and its store lives on: what the dead ranks left there (addresses,
counts) would be taken for that of the living. Counting restarts does not tell attempts apart, because agents
count for themselves: a node that only heard of the failure has counted one less. So the ranks agree.
"""

import time
import uuid

from torch.distributed import PrefixStore, Store

POLL_S = 0.02


def own_store(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """The part of `store` that belongs to this attempt alone. Every rank of it calls this.

    Rank 0 names the attempt; each other rank leaves a token nobody had before and waits for the answer to it,
    which only a living rank 0 gives. Raises RuntimeError if a rank is missing after `timeout_s`.
    """
    if world_size == 1:
        return store
    if rank:
        token = uuid.uuid4().hex
        store.set(f"mlm/token/{rank}", token)
        attempt = store.get(f"mlm/attempt/{token}").decode()
        store.add(f"{attempt}/here", 1)
    else:
        attempt = _welcome(store, world_size, time.monotonic() + timeout_s)
    return PrefixStore(attempt, store)


def _welcome(store: Store, world_size: int, end: float) -> str:
    """Answer every token, also one that replaces a dead rank's, until all ranks are here."""
    attempt = f"mlm-{uuid.uuid4().hex}"
    answered: dict[int, bytes] = {}
    while store.add(f"{attempt}/here", 0) < world_size - 1:
        for rank in range(1, world_size):
            if not store.check([f"mlm/token/{rank}"]):
                continue
            token = store.get(f"mlm/token/{rank}")
            if answered.get(rank) != token:
                store.set(f"mlm/attempt/{token.decode()}", attempt)
                answered[rank] = token
        if time.monotonic() > end:
            here = store.add(f"{attempt}/here", 0) + 1
            raise RuntimeError(f"timed out: {here} of {world_size} gloo ranks came")
        time.sleep(POLL_S)
    return attempt
