"""The line that names a hang, and when a wait counts as one."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch.distributed import DistStoreError

from mlm.parallel import collectives
from mlm.parallel.mesh import Axis
from mlm.parallel.watch import LostPeer, Watch

TIMED_OUT = RuntimeError("[gloo/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation")
CLOSED = RuntimeError("[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:40586")


@pytest.fixture
def watch() -> Watch:
    return Watch(rank=2, timeout_s=20, step=17)


def line(watch: Watch, error: Exception, ranks: tuple[int, ...] = (2, 3)) -> str:
    """The message after a wait in which the transport raised."""
    with pytest.raises(LostPeer) as lost, watch.waiting("all_reduce", "tp", ranks):
        raise error
    return str(lost.value)


STUCK = "did not finish in 20 s (dist.timeout_s): rank 3 is stuck, gone or waiting for another"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (TIMED_OUT, STUCK),
        (DistStoreError("wait timeout after 20000ms"), STUCK),
        (CLOSED, "broke: rank 3 is gone"),
    ],
)
def test_a_lost_peer_is_named_with_rank_step_operation_and_group(
    watch: Watch, error: Exception, what: str
) -> None:
    assert line(watch, error) == f"rank 2: step 17: all_reduce over tp (ranks 2, 3) {what}"


def test_other_errors_pass_unchanged(watch: Watch) -> None:
    with pytest.raises(RuntimeError) as raised, watch.waiting("backward", "dp", (0, 2)):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert type(raised.value) is RuntimeError


def test_innermost_wait_is_named(watch: Watch) -> None:
    with watch.waiting("backward", "dp", (0, 2)):
        assert "all_reduce over tp" in line(watch, TIMED_OUT)
    inner = LostPeer("rank 2: all_reduce over tp broke")
    with pytest.raises(LostPeer, match=str(inner)), watch.waiting("backward", "dp", (0, 2)):
        raise inner


def broken(*args: object, **kwargs: object) -> None:
    """A communication that breaks when it is begun, as gloo's transfers do."""
    raise CLOSED


@pytest.mark.parametrize(
    "name, of_torch, begin",
    [
        ("all_gather", "gather_flat", collectives.all_gather),
        ("broadcast from rank 3", "dist.broadcast", partial(collectives.broadcast, source=1)),
        ("send to rank 3", "dist.isend", lambda x, tp: collectives.start_send(x, tp, 1).wait()),
        ("receive from rank 3", "dist.irecv", lambda x, tp: collectives.start_receive(x, tp, 1).wait()),
        ("barrier", "dist.barrier", lambda x, tp: collectives.barrier(tp)),
    ],
)
def test_every_communication_is_named_when_it_breaks(
    name: str, of_torch: str, begin: Callable[..., Any], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    tp = Axis("tp", 0, 2, cast(Any, "a group"), (2, 3), watch)
    monkeypatch.setattr(f"mlm.parallel.collectives.{of_torch}", broken)
    with pytest.raises(LostPeer, match=rf"{name} over tp \(ranks 2, 3\) broke"):
        begin(torch.ones(2), tp)


def test_transfer_names_its_two_ranks_only(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    pp = Axis("pp", 1, 4, cast(Any, "a group"), (0, 2, 4, 6), watch)
    monkeypatch.setattr("mlm.parallel.collectives.dist.irecv", broken)
    with pytest.raises(LostPeer, match=r"receive from rank 0 over pp \(ranks 0, 2\) broke: rank 0 is gone"):
        collectives.start_receive(torch.ones(1), pp, 0)


def test_wait_is_overdue_after_its_limit_and_grace(watch: Watch) -> None:
    watch.timeout_s = 0.02
    with watch.waiting("all_reduce", "tp", (2, 3)):
        time.sleep(0.05)
        assert watch.overdue(grace_s=60) is None
        assert str(watch.overdue(grace_s=0)).startswith(
            "rank 2: step 17: all_reduce over tp (ranks 2, 3) did"
        )


def test_region_that_computes_is_never_overdue(watch: Watch) -> None:
    watch.timeout_s = 0
    with watch.waiting("backward", "dp", (0, 2), limit_s=math.inf):
        assert watch.overdue(grace_s=0) is None


def test_wait_of_the_device_is_overdue_until_it_is_done(watch: Watch) -> None:
    watch.timeout_s = 0
    over = [True, False]
    watch.follow("all_gather", "dp", (0, 2), lambda: over[0])
    watch.follow("all_reduce", "tp", (2, 3), lambda: over[1])
    time.sleep(0.01)
    assert "all_reduce over tp (ranks 2, 3) did not finish in 0 s" in str(watch.overdue(grace_s=60))
    over[1] = True
    assert watch.overdue(grace_s=60) is None


def test_rank_that_hears_of_a_failure_says_what_it_waits_for(watch: Watch) -> None:
    with watch.waiting("barrier", "world", (0, 1, 2, 3)):
        assert str(watch.interrupted()) == (
            "rank 2: step 17: barrier over world (ranks 0, 1, 2, 3) was under way when another rank failed"
        )
