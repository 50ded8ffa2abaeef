"""One rank: rendezvous, device, threads, process groups, then the job's function."""

import os
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch
import torch.distributed as distributed
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mlm.config.path_errors import streams_for
from mlm.errors import UserError
from mlm.launch.config import NO_GPU, NO_GPU_FIX, DistConfig
from mlm.launch.environment import Place, num_threads, place_variables
from mlm.launch.failure import (
    INTERRUPTED,
    LAST_WORDS_S,
    MAX_LINES,
    Failure,
    LastWords,
    Watchdog,
    flight_recorder,
    leave,
)
from mlm.launch.network import check_addresses
from mlm.parallel.mesh import ParallelContext, build_mesh
from mlm.parallel.watch import LostPeer, Watch, is_transport_error

START_S = 120.0  # ranks import torch and read the disk at different speeds, whatever dist.timeout_s is
STORE_POLL_S = 0.02
Target = Callable[[Any, ParallelContext], int | None]
"""Work of a job on each rank; returns the exit code of a command that a signal stopped after a save."""
ELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun: ranks may be restarted, and the store is not new then
ALONE = Place(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="localhost", master_port=0)


def device_kind(dist: DistConfig) -> Literal["cpu", "cuda"]:
    """Return dist.device with auto resolved. Raises UserError if CUDA is requested and absent."""
    if dist.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"dist.device=cuda, but {NO_GPU}", keys=("dist.device",), fix=NO_GPU_FIX)
    if dist.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return dist.device


def run_joined(target: str, config: Any, *, place: Place, out: Path | None) -> int:
    """Run the job as one of the ranks that torchrun or SLURM started; 0 after its end or a save.

    Launchers end all ranks when one fails, so a rank that saved must not seem to.
    After an exception it reports, unless another rank has reported the same, and ends the process at once: a
    normal exit could wait for peers that are stuck in a collective.
    """
    os.environ.update(place_variables(place) | flight_recorder(os.environ, out))
    store: Store | None = None

    def tell(failure: Failure) -> None:
        speaks = _speaks(failure, store)
        if speaks:
            print(failure.text, file=sys.stderr, flush=True)
        if speaks or place.rank == 0:  # under SLURM, rank 0 holds the store that the others ask
            time.sleep(LAST_WORDS_S)

    words = LastWords(place.rank, tell)
    try:
        store = rendezvous_store(place, config.dist.timeout_s) if place.world_size > 1 else None
        run_rank(target, config, place=place, store=store, words=words)
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except Exception as error:
        leave(words.say(error).exit_code)
    return 0


def run_rank(
    target: str,
    config: Any,
    *,
    place: Place = ALONE,
    store: Store | None = None,
    words: LastWords | None = None,
) -> int:
    """Set up this process as a rank, run `target`, and destroy the process groups if it ends well.

    Return the exit code of the job's command.

    dp is what tp * cp * pp of config.parallel leave of place.world_size. One rank alone needs no `store` and
    makes no group: it works without a network. After an exception the groups stay: destroying them could
    hang. With `words`, a watchdog ends the process if a communication hangs. Raises LostPeer if gloo reports
    one.
    """
    dist = config.dist
    threads = dist.threads_per_rank or place.cores
    available = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads(threads, cores=available, local_ranks=place.local_world_size))
    device = rank_device(dist, place)
    watch, everyone = Watch(place.rank, dist.timeout_s), tuple(range(place.world_size))
    with nullcontext() if words is None else Watchdog(watch, words):
        if store is None or place.world_size == 1:
            ctx = ParallelContext(device=device, watch=watch)
        else:
            start_s = max(START_S, dist.timeout_s)
            with watch.waiting("start of the process groups", "world", everyone, start_s):
                ctx = _make_groups(config, place, store, device, watch, start_s)
        with streams_for(config):
            code = find_target(target)(config, ctx) or 0
        if place.world_size > 1:
            with watch.waiting("end of the process groups", "world", everyone):
                distributed.destroy_process_group()
    return code


def _make_groups(
    config: Any, place: Place, store: Store, device: torch.device, watch: Watch, start_s: float
) -> ParallelContext:
    """Initialise torch.distributed and make the groups of the layout. Collective over all ranks."""
    parallel, dist = config.parallel, config.dist
    backend = {"cuda": "nccl", "cpu": "gloo"}[device.type] if dist.backend == "auto" else dist.backend
    distributed.init_process_group(
        backend,
        store=PrefixStore("mlm", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=start_s),
    )
    return build_mesh(
        tp=parallel.tp,
        cp=parallel.cp,
        pp=parallel.pp,
        dp=place.world_size // parallel.replica,
        device=device,
        timeout_s=dist.timeout_s,
        watch=watch,
    )


def rank_device(dist: DistConfig, place: Place) -> torch.device:
    """Make this rank's device current and return it. Raises UserError if the host shows too few GPUs."""
    if device_kind(dist) == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = 0 if count == 1 else place.local_rank  # SLURM may show each task only its own GPU
    if index >= count:
        raise UserError(
            f"LOCAL_RANK={place.local_rank}, but this host shows {count} GPUs: "
            f"start at most {count} ranks on it, or check CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def rendezvous_store(place: Place, timeout_s: float) -> Store:
    """Return the store of torch's rendezvous, by the variables of the environment.

    Raises UserError if the port is taken or an address cannot be used, LostPeer if not all ranks come in
    time.
    """
    check_addresses(place, os.environ)
    start_s = max(START_S, timeout_s)
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=start_s)))
        if ELASTIC in os.environ:
            store = store_of_attempt(store, place.rank, place.world_size, start_s)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT={place.master_port} is in use on {place.master_addr}: set it to a free port"
            ) from None
        if is_transport_error(error):
            raise LostPeer(
                f"rank {place.rank}: the {place.world_size} ranks did not rendezvous at {place.master_addr} "
                f"port {place.master_port} within {start_s:g} s: is each running and able to reach it?"
            ) from error
        raise
    return store


def store_of_attempt(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """Return the part of `store` that belongs to this attempt of a restarted job. Collective.

    torchrun restarts all ranks when one fails, and its store lives on: keys of the dead ranks (addresses,
    counts) would be taken for those of the living. A count of restarts does not identify an attempt, because
    each agent counts separately: a node whose own ranks did not fail has counted one less. So rank 0 names
    the attempt; each other rank leaves a new token and waits for the answer to it, which only a living rank 0
    gives. Raises RuntimeError if a rank is missing after `timeout_s`.
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
        time.sleep(STORE_POLL_S)
    return attempt


def find_target(target: str) -> Target:
    """Return the function that `module:function` names."""
    module, _, name = target.partition(":")
    function: Target = getattr(import_module(module), name)
    return function


def _speaks(failure: Failure, store: Store | None) -> bool:
    """True if this rank must report: the first with this message, or one of the first unexplained lost peers.

    One of those alone could mislead, as it may wait for a rank that waits itself.
    """
    if store is None:
        return True
    answer: list[bool] = []
    asking = Thread(target=lambda: answer.append(_is_first(failure, store)), daemon=True)
    asking.start()
    asking.join(2 * LAST_WORDS_S)  # a store whose process is stopped never answers
    return answer[0] if answer else True


def _is_first(failure: Failure, store: Store) -> bool:
    try:
        if failure.lost_peer:
            time.sleep(LAST_WORDS_S / 2)  # give the rank that caused it time to report it
            return store.add("mlm/failures", 0) == 0 and store.add("mlm/lost", 1) <= MAX_LINES
        store.add("mlm/failures", 1)
        return store.add(f"mlm/failures/{failure.type}: {failure.message}", 1) == 1
    except RuntimeError:  # the store went down with its rank, which has reported by then
        return failure.names_peer or not failure.lost_peer
