"""Checks of communication: correct numbers over each axis of the layout, and bandwidth."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mlm.launch.doctor.findings import CheckResult, check_result
from mlm.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    start_receive,
    start_send,
)
from mlm.parallel.mesh import CPU, Axis, ParallelContext

ROWS = 64
"""Numbers of each rank in a trial."""
BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Size of the all-reduce that is timed."""
SLOW = 3.0
"""Factor below the median bandwidth of its axis at which a group of ranks is slow."""
REMEDY = (
    "look at the network or GPU of these hosts: NCCL_DEBUG=INFO, nvidia-smi topo -m, the link's error counts"
)


def wrong_operations(axis: Axis, device: torch.device) -> list[str]:
    """Return the operations over an axis that give other numbers than they must. Collective over it."""
    # Small integers, whose float32 sums are exact: [size * ROWS] on each rank.
    count = torch.arange(axis.size * ROWS, device=device, dtype=torch.float32)
    numbers = [(count + 1) * (rank + 1) % 251 for rank in range(axis.size)]
    local, total = numbers[axis.rank], torch.stack(numbers).sum(0)
    shard = slice(axis.rank * ROWS, (axis.rank + 1) * ROWS)
    trials: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "all-reduce": (lambda: all_reduce(local.clone(), axis), total),
        "all-gather": (lambda: all_gather(local, axis), torch.stack(numbers)),
        "reduce-scatter": (lambda: reduce_scatter(local.clone(), axis), total[shard]),
        "all-to-all": (lambda: exchange(local, axis), torch.cat([x[: axis.rank + 1] for x in numbers])),
        "send and receive": (lambda: send_around(local, axis), numbers[axis.rank - 1]),
    }
    return [name for name, (run, expected) in trials.items() if not torch.equal(run(), expected)]


def exchange(x: Tensor, axis: Axis) -> Tensor:
    """Send n + 1 elements to rank n, as uneven as tokens to experts."""
    counts = list(range(1, axis.size + 1))
    return all_to_all(torch.cat([x[:n] for n in counts]), axis, counts, [axis.rank + 1] * axis.size)


def send_around(x: Tensor, axis: Axis) -> Tensor:
    """Send to the next rank of the axis; return the message of the previous one."""
    out, target, source = torch.empty_like(x), (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    if axis.rank % 2 or axis.rank == axis.size - 1:  # receive first, so that no ring of sends blocks
        received = start_receive(out, axis, source).wait()
        start_send(x, axis, target).wait()
        return received
    start_send(x, axis, target).wait()
    return start_receive(out, axis, source).wait()


def bandwidth(axis: Axis, device: torch.device) -> float:
    """Return the bytes a second over each rank's link in an all-reduce (2 (n - 1) / n passes). Collective."""

    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    count = BYTES[device.type]
    x, best = torch.zeros(count // 4, device=device), math.inf
    for _ in range(4):  # the first connects
        all_reduce(x[:1], axis)
        synchronise()
        begin = time.perf_counter()
        all_reduce(x, axis)
        synchronise()
        best = min(best, time.perf_counter() - begin)
    return 2 * (axis.size - 1) / axis.size * count / best


def measure(ctx: ParallelContext) -> dict[str, Any]:
    """Return for each axis its ranks, wrong operations and bytes a second, as JSON values. Collective."""
    axes = (ctx.tp, ctx.cp, ctx.dp, ctx.pp, ctx.experts.ep, ctx.experts.replicas)
    # Each axis with the device of its tensors.
    return {
        axis.name: {
            "ranks": list(axis.ranks),
            "wrong": wrong_operations(axis, device),
            "rate": bandwidth(axis, device),
        }
        for axis, device in (*((axis, ctx.device) for axis in axes), (ctx.world, CPU))
        if axis is not None and axis.size > 1
    }


def judge(measured: Sequence[dict[str, Any]]) -> list[list[CheckResult]]:
    """Return each rank's findings from the measurements of all ranks."""
    findings_of_ranks: list[list[CheckResult]] = []
    for axes in measured:
        findings = []
        for axis, result in axes.items():
            wrong = ", ".join(result["wrong"])
            text = f"wrong: {wrong}" if wrong else f"exact over {len(result['ranks'])} ranks"
            findings.append(check_result(f"numbers over {axis}", text, REMEDY, fails=bool(wrong)))
            rate = result["rate"]
            median = statistics.median(other[axis]["rate"] for other in measured if axis in other)
            is_slow = rate * SLOW < median
            rates = f"{rate / 1e9:.3g} GB/s, the median is {median / 1e9:.3g}"
            text = rates if is_slow else f"{median / 1e9:.3g} GB/s"
            findings.append(check_result(f"bandwidth over {axis}", text, REMEDY, warns=is_slow))
        findings_of_ranks.append(findings)
    return findings_of_ranks
