"""Checks of communication: correct numbers over each axis of the layout, and bandwidth."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitTimeoutError
from typing import Any

import torch
from torch import Tensor

from mlm.launch.doctor.findings import Control, Finding, Status
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
REPEATS = 3
SLOW = 3.0
"""Times slower than the median of its axis from which a group of ranks is slow."""
REMEDY = (
    "look at the network or GPU of these hosts: NCCL_DEBUG=INFO, nvidia-smi topo -m, the link's error counts"
)


def numbers(axis: Axis, rank: int, device: torch.device) -> Tensor:
    """Return what a rank of the axis gives: [size * ROWS], small whole numbers, which add up exactly."""
    count = torch.arange(axis.size * ROWS, device=device, dtype=torch.float32)
    return (count + 1) * (rank + 1) % 251


def wrong_operations(axis: Axis, device: torch.device) -> list[str]:
    """Return the operations over an axis that give other numbers than they must. Collective over it."""
    each = [numbers(axis, rank, device) for rank in range(axis.size)]
    mine, total = each[axis.rank], torch.stack(each).sum(0)
    shard = slice(axis.rank * ROWS, (axis.rank + 1) * ROWS)
    trials: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "all-reduce": (lambda: all_reduce(mine.clone(), axis), total),
        "all-gather": (lambda: all_gather(mine, axis), torch.stack(each)),
        "reduce-scatter": (lambda: reduce_scatter(mine.clone(), axis), total[shard]),
        "all-to-all": (lambda: exchange(mine, axis), torch.cat([x[: axis.rank + 1] for x in each])),
        "send and receive": (lambda: send_around(mine, axis), each[axis.rank - 1]),
    }
    return [name for name, (run, right) in trials.items() if not torch.equal(run(), right)]


def exchange(x: Tensor, axis: Axis) -> Tensor:
    """Send each rank its number and one more of the first elements, as uneven as tokens to experts."""
    counts = list(range(1, axis.size + 1))
    return all_to_all(torch.cat([x[:n] for n in counts]), axis, counts, [axis.rank + 1] * axis.size)


def send_around(x: Tensor, axis: Axis) -> Tensor:
    """Send to the next rank of the axis, and return what the one before sends."""
    out, after, before = torch.empty_like(x), (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    if axis.rank % 2 or axis.rank == axis.size - 1:  # someone receives first
        received = start_receive(out, axis, before).wait()
        start_send(x, axis, after).wait()
        return received
    start_send(x, axis, after).wait()
    return start_receive(out, axis, before).wait()


def bandwidth(axis: Axis, device: torch.device) -> float:
    """Return the bytes a second over each rank's link in an all-reduce (2 (n - 1) / n passes). Collective."""
    count = BYTES[device.type]
    x, best = torch.zeros(count // 4, device=device), math.inf
    for _ in range(1 + REPEATS):  # the first connects
        all_reduce(x[:1], axis)
        _synchronise(device)
        begin = time.perf_counter()
        all_reduce(x, axis)
        _synchronise(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * (axis.size - 1) / axis.size * count / best


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(ctx: ParallelContext) -> dict[str, Any]:
    """Return for each axis its size, wrong operations and bytes a second, as JSON values. Collective."""
    if ctx.device.type == "cuda":
        torch.cuda.set_device(ctx.device)  # of this thread
    results = dict[str, Any]()
    used = (ctx.tp, ctx.cp, ctx.dp, ctx.pp, ctx.experts.ep, ctx.experts.replicas)
    # each with the device whose memory it communicates
    for axis, device in (*((axis, ctx.device) for axis in used), (ctx.world, CPU)):
        if axis is None or axis.size == 1:
            continue
        wrong = wrong_operations(axis, device)
        results[axis.name] = {"ranks": list(axis.ranks), "wrong": wrong, "rate": bandwidth(axis, device)}
    return results


def check_traffic(ctx: ParallelContext, control: Control, timeout_s: float) -> list[dict[str, Any]]:
    """Return what every rank measured, in rank order. Collective; raises CheckFailedError.

    A thread communicates, so that this one can still report when a communication hangs.
    """
    if ctx.world_size == 1:
        return [{}]
    pool = ThreadPoolExecutor(1)
    work = pool.submit(measure, ctx)
    try:
        mine: dict[str, Any] = work.result(timeout_s)
    except WaitTimeoutError:
        waits = [f"{wait.op} over {wait.axis}" for wait in ctx.watch.waits.values()]
        mine = {"stuck": waits[-1] if waits else "a communication of the device"}
    except RuntimeError as error:  # a lost peer
        mine = {"stuck": str(error).splitlines()[0]}
    pool.shutdown(wait=False)
    return control.all_gather("communication", mine)


def judge(each: Sequence[dict[str, Any]]) -> list[list[Finding]]:
    """Return each rank's findings, from what all measured."""
    of_ranks: list[list[Finding]] = [[] for _ in each]
    for mine, findings in zip(each, of_ranks, strict=True):
        if "stuck" in mine:
            findings.append(Finding("communication", "fail", f"stuck in {mine['stuck']}", REMEDY))
            continue
        for axis, seen in mine.items():
            wrong = ", ".join(seen["wrong"])
            text = f"wrong: {wrong}" if wrong else f"exact over {len(seen['ranks'])} ranks"
            status: Status = "fail" if wrong else "ok"
            findings.append(Finding(f"numbers over {axis}", status, text, REMEDY if wrong else ""))
            rate = seen["rate"]
            usual = statistics.median(other[axis]["rate"] for other in each if axis in other)
            is_slow = rate * SLOW < usual
            text = f"{usual / 1e9:.3g} GB/s"
            if is_slow:
                text = f"{rate / 1e9:.3g} GB/s, the median is {usual / 1e9:.3g}"
            status = "warn" if is_slow else "ok"
            findings.append(Finding(f"bandwidth over {axis}", status, text, REMEDY if is_slow else ""))
    return of_ranks
