"""Communication is compared with exact numbers, and slow groups are named."""

from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.exchange import Ranks
from mlm.launch.doctor import traffic
from mlm.launch.doctor.findings import rows_of
from mlm.launch.doctor.traffic import judge, measure
from mlm.parallel.mesh import Axis, ParallelContext
from tests.ranks import run_on_ranks


def communicate(ctx: ParallelContext, fault: str = "") -> Any:
    whole = dict(vars(traffic))
    traffic.BYTES = {"cpu": 1 << 16}
    planted = {"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}
    planted |= {"send and receive": "send_around", "all-to-all": "exchange"}
    if fault in planted and ctx.rank == 1:
        name = planted[fault]

        def flipped(x: Tensor, axis: Axis) -> Tensor:
            found: Tensor = whole[name](x, axis)
            found = found.clone()
            found.view(torch.int32).view(-1)[0] ^= 1 << 20
            return found

        setattr(traffic, name, flipped)
    try:
        measured = Ranks.of(ctx).all_gather(measure(ctx))
        rows = rows_of(judge(measured), ["a"] * ctx.world_size)
        return [(row.check, row.status) for row in rows]
    finally:
        vars(traffic).update(whole)


def test_all_operations_over_all_axes_those_of_experts_and_rings_of_odd_size_are_exact() -> None:
    rows = dict(run_on_ranks(communicate, tp=2, dp=2)[0])
    names = {f"{what} over {axis}" for what in ("numbers", "bandwidth") for axis in ("tp", "dp", "world")}
    assert rows.keys() == names
    assert all(status == "ok" for name, status in rows.items() if name.startswith("numbers"))
    rows = dict(run_on_ranks(communicate, dp=4, ep=2)[0])
    assert rows["numbers over ep"] == rows["numbers over expert_replicas"] == "ok"
    assert dict(run_on_ranks(communicate, dp=3)[0])["numbers over dp"] == "ok"


def communicate_each(ctx: ParallelContext) -> dict[str, str]:
    faults = ("all-reduce", "all-gather", "reduce-scatter", "send and receive", "all-to-all")
    return {fault: dict(communicate(ctx, fault))["numbers over dp"] for fault in faults}


def test_a_flipped_bit_of_any_operation_is_found() -> None:
    assert set(run_on_ranks(communicate_each, dp=2)[0].values()) == {"fail"}


def test_a_group_far_slower_than_the_others_is_a_warning() -> None:
    seen = [{"dp": {"ranks": [0, 1], "wrong": [], "rate": rate}} for rate in (9e9, 9e9, 1e9, 8e9)]
    row = next(row for row in rows_of(judge(seen), ["a", "a", "b", "b"]) if row.check == "bandwidth over dp")
    assert (row.status, row.ranks) == ("warn", (2,))
    assert "1 GB/s, the median is 8.5" in row.result
