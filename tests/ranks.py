"""A pool of processes that tests borrow as ranks.

`run_on_ranks(check, …, tp=2, dp=2)` runs `check(ctx, …)` on four gloo ranks and returns their results; a
failing rank fails the test with its traceback. `check` must be a module-level function.

Importing torch and the trainer takes seconds of processor time, so one process does it and forks the ranks.
"""

import atexit
import gc
import math
import multiprocessing as mp
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mlm.parallel.mesh import ParallelContext, build_mesh
from mlm.tracking import curves
from tests.conftest import blank

TIMEOUT_S = 100.0
USUAL = 8
_parents: list[BaseProcess] = []
_pool: list[Connection] = []


def run_on_ranks(
    check: Callable[..., Any],
    *args: Any,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    expert_tp: int | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `check(ctx, *args, **kwargs)` on tp * cp * pp * dp ranks; the results in rank order."""
    size = tp * cp * pp * dp
    if len(_pool) < size:
        close()
        _start(max(size, USUAL))
    with tempfile.TemporaryDirectory() as folder:
        layout = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, "expert_tp": expert_tp}
        for rank, pipe in enumerate(_pool[:size]):
            pipe.send((os.path.join(folder, "store"), rank, layout, check, args, kwargs))
        answers = [_answer(pipe) for pipe in _pool[:size]]
    errors = [f"--- rank {rank} of {layout} ---\n{why}" for rank, (why, _) in enumerate(answers) if why]
    if errors:
        close()  # ranks may be stuck in a collective: the next test starts new ones
        raise AssertionError("\n".join(errors))
    return [value for _, value in answers]


def command(ctx: ParallelContext, run: Callable[[Any, ParallelContext], Any], config: Any) -> None:
    """A `check`: the work of a command on its ranks.

    It is here for tests whose own modules a rank should not import, with a second of `transformers` or more.
    """
    run(config, ctx)


def _answer(pipe: Connection) -> tuple[str, Any]:
    """A rank's error and value."""
    try:
        answer: tuple[str, Any] = pipe.recv() if pipe.poll(TIMEOUT_S) else ("hung", None)
    except EOFError:
        return "died", None
    return answer


def _start(size: int) -> None:
    spawning = mp.get_context("spawn")
    ours, theirs = zip(*(spawning.Pipe() for _ in range(size)), strict=True)
    parent = spawning.Process(target=_fork, args=(theirs,), daemon=True)
    parent.start()
    for pipe in theirs:
        pipe.close()
    _parents.append(parent)
    _pool.extend(ours)


def _fork(pipes: Sequence[Connection]) -> None:
    """Import what most checks need, fork a rank per pipe and wait for all."""
    os.setpgrp()  # to be ended together
    import_module("mlm.training.trainer")
    import_module("torch.fx.experimental.symbolic_shapes")  # a first backward pass would
    pytest.MonkeyPatch().setattr(curves, "plot_losses", blank)
    gc.collect()
    gc.freeze()  # so that ranks collect nothing but what a check leaves
    for pipe in pipes:
        if os.fork() == 0:
            for other in pipes:
                if other is not pipe:
                    other.close()
            _serve(pipe)
            os._exit(0)
    for pipe in pipes:
        pipe.close()
    for _ in pipes:
        os.wait()


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
        del value
        gc.collect()  # trainers hold process groups, each of which has a thread that polls


def _run(
    store: str, rank: int, layout: dict[str, int], check: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    size = math.prod(layout[axis] for axis in ("tp", "cp", "pp", "dp"))
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        ctx: ParallelContext = build_mesh(**layout, device=torch.device("cpu"), timeout_s=60)
        return check(ctx, *args, **kwargs)
    finally:
        dist.destroy_process_group()


@atexit.register
def close() -> None:
    """End the ranks."""
    while _pool:
        _pool.pop().close()
    while _parents:
        parent = _parents.pop()
        assert parent.pid
        with suppress(ProcessLookupError):  # it has not got as far as having a group
            os.killpg(parent.pid, signal.SIGKILL)
        parent.kill()
        parent.join()
