"""Place of a rank in a layout."""

import time
from typing import Any

import pytest

from mlm.parallel import mesh
from mlm.parallel.mesh import ParallelContext, shape_context
from tests.ranks import run_on_ranks


def test_shape_context_knows_any_rank_without_process_groups() -> None:
    ctx = shape_context(11, tp=2, pp=2, dp=3)
    assert (ctx.tp.rank, ctx.pp.rank, ctx.dp.rank, ctx.tp.group) == (1, 1, 2, None)


def test_context_ranks_lie_between_tensor_and_data_ranks() -> None:
    """rank = ((stage * d + data) * c + context) * t + tensor; replicas of weights are all of dp and cp."""
    found = run_on_ranks(members_of_context, tp=2, cp=2, dp=2)
    assert found[0] == ([0, 1], [0, 2], [0, 4], [0, 2, 4, 6])
    assert found[7] == ([6, 7], [5, 7], [3, 7], [1, 3, 5, 7])
    ctx = shape_context(7, tp=2, cp=2, dp=2)
    assert [(axis.rank, axis.size) for axis in (ctx.cp, ctx.dp, ctx.replicas)] == [(1, 2), (1, 2), (3, 4)]


def members_of_context(ctx: ParallelContext) -> tuple[list[int], ...]:
    axes = (ctx.tp, ctx.cp, ctx.dp, ctx.replicas)
    assert [axis.ranks[axis.rank] for axis in axes] == [ctx.rank] * 4
    return tuple(list(axis.ranks) for axis in axes)


def test_no_rank_returns_before_all_are_connected() -> None:
    """A rank whose program ends at once closes the connections that a slower one still waits for."""
    connected, returned = run_on_ranks(a_slow_connection, tp=2)
    assert returned >= connected


def a_slow_connection(ctx: ParallelContext) -> float:
    """When rank 0 is connected, and when rank 1 has its mesh: seconds of one clock."""
    connect, connected = mesh.host_group, 0.0

    def slowly(*args: Any) -> Any:
        nonlocal connected
        group = connect(*args)
        time.sleep(0.5)
        connected = time.monotonic()
        return group

    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 0:
            patch.setattr(mesh, "host_group", slowly)
        mesh.build_mesh(tp=2, pp=1, dp=1, device=ctx.device, timeout_s=60)
    return connected or time.monotonic()
