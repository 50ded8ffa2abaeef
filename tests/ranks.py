"""A pool of worker processes that tests borrow as ranks: spawning costs seconds, so it happens once.

`run_on_ranks(check, …, tp=2, dp=2)` runs `check(ctx, …)` on four gloo ranks and returns their results; a
failing rank fails the test with its traceback. `check` must be a module-level function.
"""

import atexit
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from mlm.parallel.mesh import ParallelContext, build_mesh

TIMEOUT_S = 100.0
_pool: list[tuple[BaseProcess, Connection]] = []


def run_on_ranks(
    check: Callable[..., Any], *args: Any, tp: int = 1, dp: int = 1, pp: int = 1, **kwargs: Any
) -> list[Any]:
    """Run `check(ctx, *args, **kwargs)` on tp * pp * dp ranks; the results in rank order."""
    size = tp * pp * dp
    while len(_pool) < size:
        parent, child = mp.get_context("spawn").Pipe()
        process = mp.get_context("spawn").Process(target=_serve, args=(child,), daemon=True)
        process.start()
        _pool.append((process, parent))
    with tempfile.TemporaryDirectory() as folder:
        layout = {"tp": tp, "pp": pp, "dp": dp}
        for rank, (_, pipe) in enumerate(_pool[:size]):
            pipe.send((os.path.join(folder, "store"), rank, layout, check, args, kwargs))
        answers = [pipe.recv() if pipe.poll(TIMEOUT_S) else ("hung", None) for _, pipe in _pool[:size]]
    faults = [f"--- rank {rank} of {layout} ---\n{why}" for rank, (why, _) in enumerate(answers) if why]
    if faults:
        close()  # ranks may be stuck in a collective: the next test starts fresh ones
        raise AssertionError("\n".join(faults))
    return [value for _, value in answers]


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            store, rank, layout, check, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            value, why = _run(store, rank, layout, check, args, kwargs), ""
        except BaseException:
            value, why = None, traceback.format_exc()
        pipe.send((why, value))


def _run(
    store: str, rank: int, layout: dict[str, int], check: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    size = layout["tp"] * layout["pp"] * layout["dp"]
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        ctx: ParallelContext = build_mesh(**layout, device=torch.device("cpu"), timeout_s=60)
        return check(ctx, *args, **kwargs)
    finally:
        dist.destroy_process_group()


@atexit.register
def close() -> None:
    """End the workers."""
    while _pool:
        process, pipe = _pool.pop()
        pipe.close()
        process.kill()
        process.join()
