"""One rank: device, threads, process groups, then the job's function."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch
import torch.distributed as distributed
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mlm.config.path_errors import streams_for
from mlm.errors import UserError
from mlm.launch.attempt import own_store
from mlm.launch.config import DistConfig
from mlm.launch.environment import Place, num_threads, place_variables
from mlm.launch.failure import INTERRUPTED, LAST_WORDS_S, MAX_LINES, Failure, LastWords, leave
from mlm.launch.watchdog import Watchdog, flight_recorder
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, build_mesh
from mlm.parallel.watch import LostPeer, Watch, is_transport_error

START_S = 120.0  # ranks import torch and see the disk at their own pace, whatever dist.timeout_s is
Target = Callable[[Any, ParallelContext], None]
ELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun: ranks may be restarted, and the store is not new then
ALONE = Place(rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="localhost", master_port=0)


def device_kind(dist: DistConfig) -> Literal["cpu", "cuda"]:
    """dist.device with auto resolved. Raises UserError if CUDA is asked for and absent."""
    if dist.device == "cuda" and not torch.cuda.is_available():
        raise UserError("dist.device=cuda, but torch sees no GPU here: set dist.device=cpu or auto")
    if dist.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return dist.device


def run_alone(target: str, config: Any, *, parallel: ParallelConfig, dist: DistConfig) -> None:
    """Run the job in this process as the only rank. Exceptions pass through."""
    try:
        run_rank(target, config, parallel=parallel, dist=dist, place=ALONE, store=HashStore())
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def run_joined(
    target: str, config: Any, *, parallel: ParallelConfig, dist: DistConfig, place: Place, out: Path | None
) -> int:
    """Run the job as one of the ranks that torchrun or SLURM started; 0 if it ends well.

    After an exception it reports, unless another rank has said the same, and ends the process at once: a
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
        store = meet(place, dist.timeout_s)
        run_rank(target, config, parallel=parallel, dist=dist, place=place, store=store, words=words)
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except Exception as error:
        leave(words.say(error).exit_code)
    return 0


def run_rank(
    target: str,
    config: Any,
    *,
    parallel: ParallelConfig,
    dist: DistConfig,
    place: Place,
    store: Store,
    words: LastWords | None = None,
) -> None:
    """Set up this process as a rank, run `target`, and take the process groups down if it ends well.

    parallel.dp is resolved by now. After an exception the groups stay: taking them down could hang.
    With `words`, a watchdog ends the process if a communication hangs. Raises LostPeer where gloo tells.
    """
    assert parallel.dp is not None
    threads = dist.threads_per_rank or place.cores
    available = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads(threads, cores=available, local_ranks=place.local_world_size))
    device = rank_device(dist, place)
    backend = {"cuda": "nccl", "cpu": "gloo"}[device.type] if dist.backend == "auto" else dist.backend
    watch, everyone = Watch(place.rank, dist.timeout_s), tuple(range(place.world_size))
    start_s = max(START_S, dist.timeout_s)
    with nullcontext() if words is None else Watchdog(watch, words):
        with watch.waiting("start of the process groups", "world", everyone, start_s):
            distributed.init_process_group(
                backend,
                store=PrefixStore("mlm", store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=start_s),
            )
            ctx = build_mesh(
                tp=parallel.tp,
                pp=parallel.pp,
                dp=parallel.dp,
                device=device,
                timeout_s=dist.timeout_s,
                watch=watch,
            )
        with streams_for(config):
            find_target(target)(config, ctx)
        with watch.waiting("end of the process groups", "world", everyone):
            distributed.destroy_process_group()


def rank_device(dist: DistConfig, place: Place) -> torch.device:
    """This rank's device, made current. Raises UserError if the host shows too few GPUs."""
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


def meet(place: Place, timeout_s: float) -> Store:
    """The store through which all ranks find each other, by the variables of the environment.

    Raises UserError if the port is taken, LostPeer if the ranks do not find each other in time.
    """
    start_s = max(START_S, timeout_s)
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=start_s)))
        if ELASTIC in os.environ:
            store = own_store(store, place.rank, place.world_size, start_s)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT={place.master_port} is in use on {place.master_addr}: set it to a free port"
            ) from None
        if is_transport_error(error):
            raise LostPeer(
                f"rank {place.rank}: the {place.world_size} ranks did not meet at {place.master_addr} port "
                f"{place.master_port} within {start_s:g} s: is each of them running and able to reach it?"
            ) from error
        raise
    return store


def find_target(target: str) -> Target:
    """The function that `module:function` names."""
    module, _, name = target.partition(":")
    function: Target = getattr(import_module(module), name)
    return function


def _speaks(failure: Failure, store: Store | None) -> bool:
    """Whether this rank is to report: the first with this message, or among the first unexplained lost peers.

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
            time.sleep(LAST_WORDS_S / 2)  # give the rank that caused it time to say so
            return store.add("mlm/failures", 0) == 0 and store.add("mlm/lost", 1) <= MAX_LINES
        store.add("mlm/failures", 1)
        return store.add(f"mlm/failures/{failure.type}: {failure.message}", 1) == 1
    except RuntimeError:  # the store went down with its rank, which has reported by then
        return failure.names_peer or not failure.lost_peer
