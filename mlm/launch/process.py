"""One rank: rendezvous, device, threads, process groups, then the job's function."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed import PrefixStore, Store

from mlm.config.build import from_dict, streams_for
from mlm.launch.config import DistConfig
from mlm.launch.devices import device_kind
from mlm.launch.environment import RankPosition, num_threads, position_variables, read_rank_position
from mlm.launch.failure import (
    MAX_LINES,
    REPORT_S,
    Failure,
    FailureReporter,
    Watchdog,
    exit_now,
    flight_recorder,
)
from mlm.launch.rendezvous import START_S, MissingRanksError, rendezvous_store
from mlm.launch.stop import interrupt_exit_code, stopping_at_once
from mlm.parallel.mesh import ParallelContext, build_mesh
from mlm.parallel.watch import Watch
from mlm.util.errors import UserError
from mlm.util.system import available_cores, resolve

ALONE = RankPosition(
    rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="localhost", master_port=0
)


def run_joined(target: str, config: Any, *, position: RankPosition, out: Path | None) -> int:
    """Run the job as a rank that torchrun or SLURM started; return 0 after its end or a save.

    Launchers end all ranks when one fails, so a rank that saved must return 0. An exception is reported,
    unless another rank has reported the same, and ends the process at once.
    """
    os.environ.update(position_variables(position) | flight_recorder(os.environ, out))
    store: Store | None = None

    def publish(failure: Failure) -> None:
        must_report = _must_report(failure, store, position)
        if must_report:
            print(failure.text, file=sys.stderr, flush=True)
        if must_report or position.rank == 0:  # under SLURM, rank 0 holds the store that the others ask
            time.sleep(REPORT_S)

    reporter = FailureReporter(position.rank, publish)
    try:
        with stopping_at_once("stopped while it waited for other ranks", requeues=False):
            store = rendezvous_store(position, config.dist.timeout_s) if position.world_size > 1 else None
        run_rank(target, config, position=position, store=store, reporter=reporter)
    except KeyboardInterrupt as error:
        exit_now(interrupt_exit_code(error))
    except MissingRanksError as error:
        if error.is_reported:
            time.sleep(2 * REPORT_S)  # launchers end all ranks when one ends
            exit_now(error.exit_code)
        exit_now(reporter.report(error).exit_code)
    except Exception as error:
        exit_now(reporter.report(error).exit_code)
    return 0


def run_launched(job: dict[str, Any], reporter: FailureReporter) -> int:
    """Rebuild the configuration in a rank that `launch_ranks` started, and run it; return the exit code."""
    position = read_rank_position(os.environ)
    assert position is not None, "launch_ranks sets RANK and WORLD_SIZE"
    module, _, name = job["config_class"].partition(":")
    assert module.startswith("mlm."), f"{module} is not part of mlm"
    config = from_dict(getattr(import_module(module), name), job["config"])
    store = rendezvous_store(position, config.dist.timeout_s)
    with streams_for(config):
        return run_rank(job["target"], config, position=position, store=store, reporter=reporter)


def run_rank(
    target: str,
    config: Any,
    *,
    position: RankPosition = ALONE,
    store: Store | None = None,
    reporter: FailureReporter | None = None,
) -> int:
    """Set up this process as a rank, run `target`, and return the exit code of the job's command.

    A single rank needs no `store`, group or network. Groups are not destroyed after an exception, where that
    could hang. With `reporter`, a watchdog ends a process whose communication hangs. Raises LostPeer if gloo
    reports one.
    """
    dist = config.dist
    threads = dist.threads_per_rank or position.cores
    cores, local_ranks = available_cores(), position.local_world_size
    torch.set_num_threads(num_threads(threads, os.environ, cores=cores, local_ranks=local_ranks))
    device = rank_device(dist, position)
    watch, everyone = Watch(position.rank, dist.timeout_s), tuple(range(position.world_size))
    with (
        nullcontext() if reporter is None else Watchdog(watch, reporter, partial(set_current_device, device))
    ):
        if store is None or position.world_size == 1:
            ctx = ParallelContext(device=device, watch=watch)
        else:
            start_s, parallel = max(START_S, dist.timeout_s), config.parallel
            with watch.waiting("start of the process groups", "world", everyone, start_s):
                backend = None if dist.backend == "auto" else dist.backend
                init_world(position, store, device, start_s, backend=backend)
                ctx = build_mesh(
                    tp=parallel.tp,
                    cp=parallel.cp,
                    ep=parallel.ep,
                    expert_tp=parallel.expert_tp,
                    pp=parallel.pp,
                    dp=position.world_size // parallel.replica,
                    device=device,
                    timeout_s=dist.timeout_s,
                    watch=watch,
                )
        code = resolve(target)(config, ctx) or 0
        if position.world_size > 1:
            with watch.waiting("end of the process groups", "world", everyone):
                distributed.destroy_process_group()
    return code


def init_world(
    position: RankPosition,
    store: Store,
    device: torch.device,
    timeout_s: float,
    *,
    backend: str | None = None,
) -> None:
    """Initialise torch.distributed; `backend` None takes the device's. Collective over all ranks."""
    distributed.init_process_group(
        backend or {"cuda": "nccl", "cpu": "gloo"}[device.type],
        store=PrefixStore("mlm", store),
        rank=position.rank,
        world_size=position.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def rank_device(dist: DistConfig, position: RankPosition) -> torch.device:
    """Make this rank's device current and return it. Raises UserError if the host shows too few GPUs."""
    if device_kind(dist) == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = 0 if count == 1 else position.local_rank  # SLURM may show each task only its own GPU
    if index >= count:
        raise UserError(
            f"LOCAL_RANK={position.local_rank}, but this host shows {count} GPUs: "
            f"start at most {count} ranks on it, or check CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", index)
    set_current_device(device)
    return device


def set_current_device(device: torch.device) -> None:
    """Make a GPU current in this thread; else a query would allocate memory on the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _must_report(failure: Failure, store: Store | None, position: RankPosition) -> bool:
    """True for the first rank with a message, and for the first MAX_LINES lost peers without another cause.

    A single lost peer could mislead: the rank that it waits for may wait too.
    """
    if store is None:
        return not failure.lost_peer or position.local_rank == 0  # rank 0 did not answer: a line per host
    answer: list[bool] = []

    def ask() -> None:
        try:
            if failure.lost_peer:
                time.sleep(REPORT_S / 2)  # give the rank that caused it time to report it
                is_unexplained = store.add("mlm/failures", 0) == 0
                answer.append(is_unexplained and store.add("mlm/lost", 1) <= MAX_LINES)
            else:
                store.add("mlm/failures", 1)
                answer.append(store.add(f"mlm/failures/{failure.type}: {failure.message}", 1) == 1)
        except RuntimeError:  # the store went down with its rank, which has reported by then
            answer.append(failure.names_peer or not failure.lost_peer)

    asking = Thread(target=ask, daemon=True)
    with _quiet_stderr():  # torch prints C++ frames where the store is gone
        asking.start()
        asking.join(2 * REPORT_S)  # a store whose process is stopped never answers
    return answer[0] if answer else True


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Discard stderr, C++ output included."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
