"""A pool of processes that tests borrow as ranks.

`run_on_ranks(check, …, tp=2, dp=2)` runs `check(ctx, …)` on four gloo ranks and returns their results; a
failing rank fails the test with its traceback. `check` must be a module-level function. `on_ranks(tp=2)`
makes such a check a test.

Importing torch, the trainer and a test file takes seconds of processor time, so a fork server does it once
and forks the ranks. They are soon renewed: what a rank keeps, threads of process groups above all, costs
processor time until its end.
"""

import atexit
import gc
import inspect
import math
import multiprocessing as mp
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial, wraps
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
import torch.distributed as dist

from mlm.parallel.mesh import ParallelContext, build_mesh

TIMEOUT_S = 200.0
RENEWED = 10
"""Calls after which new ranks are forked, as for each test file."""
SHARED = ("mlm", "torch", "transformers")
"""Packages of which the fork server imports what a rank has imported, for the ranks after it: torch loads its
compiler at the first recomputed layer, and much else at a first use."""


class RankPool:
    """A fork server, and the ranks that the tests which run now have."""

    def __init__(self) -> None:
        spawning = mp.get_context("spawn")
        self.control, theirs = spawning.Pipe()
        self.process: BaseProcess = spawning.Process(target=_fork_ranks, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.file, self.calls = "", 0
        self.imports = ["mlm.training.trainer"]
        """Modules that the fork server has not been told of yet."""
        self.ranks: list[tuple[int, Connection]] = []
        """Process id of each, and the pipe to it."""

    def pipes(self, size: int, module: str) -> list[Connection]:
        """Pipes to `size` ranks of this test file, which have imported `module`, or can."""
        file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
        if file != self.file or self.calls % RENEWED == 0:
            self.end_ranks(kill=False)
            self.file = file
        if size > len(self.ranks):
            self._fork(size - len(self.ranks), module)
        self.calls += 1
        return [pipe for _, pipe in self.ranks[:size]]

    def _fork(self, count: int, module: str) -> None:
        pairs = [mp.Pipe() for _ in range(count)]
        self.control.send(([*self.imports, module], count))
        self.imports = []
        for _, theirs in pairs:
            send_handle(self.control, theirs.fileno(), self.process.pid)
            theirs.close()
        pids = self.control.recv() if self.control.poll(TIMEOUT_S) else []
        assert len(pids) == count, f"{len(pids)} of {count} ranks were forked"
        self.ranks += zip(pids, (ours for ours, _ in pairs), strict=True)

    def end_ranks(self, *, kill: bool) -> None:
        """End the ranks, which may be stuck in a collective if they have to be killed."""
        while self.ranks:
            pid, pipe = self.ranks.pop()
            pipe.close()
            if kill:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@cache
def pool() -> RankPool:
    """The one of this process."""
    made = RankPool()
    atexit.register(_end, made)
    return made


def _end(ranks: RankPool) -> None:
    ranks.end_ranks(kill=True)
    ranks.control.close()
    ranks.process.join(10)  # it waits for the ranks, so that their processor time is counted
    with suppress(ProcessLookupError):
        os.killpg(ranks.process.pid, signal.SIGKILL)


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
    layout = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep, "expert_tp": expert_tp}
    ranks = pool()
    pipes = ranks.pipes(tp * cp * pp * dp, check.__module__)
    for rank, pipe in enumerate(pipes):
        pipe.send((ranks.store.port, ranks.calls, rank, layout, check, args, kwargs))
    answers = list[tuple[str, Any, list[str]]]()  # each rank's error, value and imports
    for pipe in pipes:
        try:
            answers.append(pipe.recv() if pipe.poll(TIMEOUT_S) else ("hung", None, []))
        except EOFError:
            answers.append(("died", None, []))
    ranks.imports += dict.fromkeys(name for _, _, imports in answers for name in imports)
    errors = [f"--- rank {rank} of {layout} ---\n{why}" for rank, (why, _, _) in enumerate(answers) if why]
    if errors:
        ranks.end_ranks(kill=True)
        raise AssertionError("\n".join(errors))
    return [value for _, value, _ in answers]


def on_ranks(**sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test of `ctx` on ranks: of these sizes, and those of its parameters tp, dp, pp and cp."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        _, *parameters = inspect.signature(check).parameters.values()
        axes = {parameter.name for parameter in parameters} & {"tp", "dp", "pp", "cp"}

        @wraps(check)
        def test(*ctx: ParallelContext, **given: Any) -> None:
            if ctx:  # on a rank, which has found this function by its name
                check(*ctx, **given, **{name: getattr(ctx[0], name).size for name in axes})
            else:
                run_on_ranks(test, **sizes, **given)

        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def command(ctx: ParallelContext, run: Callable[[Any, ParallelContext], Any], config: Any) -> None:
    """A `check`: the work of a command on its ranks.

    It is here for tests whose own modules a rank should not import, with a second of `transformers` or more.
    """
    run(config, ctx)


def _fork_ranks(control: Connection) -> None:
    """Import what ranks need and fork them, whenever told; a pipe each."""
    os.setpgrp()  # to be ended together
    living = 0
    while True:
        try:
            modules, count = control.recv()
        except EOFError:
            break
        pipes = [Connection(recv_handle(control)) for _ in range(count)]
        for name in modules:
            with suppress(Exception):  # a rank will say why
                import_module(name)
        gc.freeze()  # so that ranks collect nothing but what checks leave
        control.send([_fork(pipe, [control, *pipes]) for pipe in pipes])
        for pipe in pipes:
            pipe.close()
        living += count
        while living and os.waitpid(-1, os.WNOHANG)[0]:
            living -= 1
    for _ in range(living):
        os.wait()


def _fork(pipe: Connection, inherited: Sequence[Connection]) -> int:
    """Fork a rank that serves a pipe; its process id."""
    if pid := os.fork():
        return pid
    try:
        for other in inherited:
            if other is not pipe:
                other.close()
        _serve(pipe)
    finally:
        os._exit(0)


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    store, known = None, set(sys.modules)
    while True:
        try:
            port, call, rank, layout, check, args, kwargs = pipe.recv()
        except EOFError:
            return
        store = store or dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S)
        )
        try:
            size = math.prod(layout[axis] for axis in ("tp", "cp", "pp", "dp"))
            prefixed = dist.PrefixStore(str(call), store)
            dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size)
            # no name holds the mesh: its groups must be freed below
            mesh = partial(build_mesh, **layout, device=torch.device("cpu"), timeout_s=60)
            value, why = check(mesh(), *args, **kwargs), ""
        except BaseException:
            value, why = None, traceback.format_exc()
        imports = [name for name in sys.modules if name not in known and name.split(".")[0] in SHARED]
        pipe.send((why, value, imports))
        known.update(imports)
        del value
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # trainers hold process groups, each of which has a thread that polls
