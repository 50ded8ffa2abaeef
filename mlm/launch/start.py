"""Starting a job on all its ranks: in this process, on this host, or as a rank of torchrun or SLURM.

Ranks on this host start each in its own session: Ctrl-C reaches this process only, and `Relay` passes the
request on. They start with these signals blocked (the mask is inherited) and unblock them inside
`StopRequest`: no request is lost, and none kills a rank before that. This process imports no torch, which
takes as long as all else before the ranks start: they do, mlm/launch/process.py with them.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from mlm.config.build import to_dict
from mlm.config.command import resolve
from mlm.launch.config import DistConfig
from mlm.launch.devices import count_gpus, device_kind
from mlm.launch.environment import (
    LISTENER,
    RankPlace,
    num_threads,
    place_variables,
    read_rank_place,
    worker_environment,
)
from mlm.launch.failure import (
    INTACT,
    INTERRUPTED,
    REPORT_S,
    Failure,
    ProcessEnd,
    flight_recorder,
    load_failures,
    noted_exit_code,
    report,
)
from mlm.launch.network import LOOPBACK, check_interface
from mlm.launch.stop import CARRIED_SIGNALS, SIGNAL_NAMES, Relay, is_noting
from mlm.parallel.config import ParallelConfig
from mlm.parallel.layout_checks import Launch, num_replicas
from mlm.util.errors import UserError
from mlm.util.lock import held_folder, remove_abandoned
from mlm.util.system import available_cores

POLL_S = 0.1
CLOSE_S = 30.0
"""Seconds that ranks get to end after SIGTERM, and again after SIGKILL."""
RANK = "mlm.launch.process"
PREFIX = "mlm-job-"
"""Name of a launch's folder in the temporary directory."""


def launch_facts(dist: DistConfig) -> Launch:
    """Read the environment. Raises UserError for invalid variables, or CUDA without a GPU."""
    place = read_rank_place(os.environ)
    return Launch(
        world_size=None if place is None else place.world_size,
        local_devices=count_gpus() if device_kind(dist) == "cuda" else None,
    )


def run_job(target: str, config: Any, *, out: Path | None) -> int:
    """Run `module:function` as `run(config, ctx: ParallelContext)` on every rank; return the exit code.

    `config` is a dataclass with `parallel` and `dist`. 0: the function returned on all ranks. 2: a user's
    mistake on a rank, 1: any other failure, both already reported. 128 + n: stopped by signal n (130:
    Ctrl-C), also after a save; but 0 where a save before a time limit was requested (SIGUSR1), and for a
    rank of torchrun or SLURM that saved.

    With one rank, the function runs in this process and its exceptions pass through. The layout is checked
    before (mlm/parallel/layout_checks.py). Raises UserError for a port in use, or an `out` that cannot be
    written.
    """
    place = read_rank_place(os.environ)
    if place is not None:
        return int(resolve(f"{RANK}:run_joined")(target, config, place=place, out=out))
    world_size = choose_world_size(config.parallel, launch_facts(config.dist))
    try:
        if world_size > 1:
            return launch_ranks(target, config, out=out, world_size=world_size)
        return int(resolve(f"{RANK}:run_rank")(target, config))
    except KeyboardInterrupt:
        return INTERRUPTED


def choose_world_size(parallel: ParallelConfig, launch: Launch) -> int:
    """Return the ranks of a checked layout: tp * cp * pp * dp, where dp=null takes what is available."""
    return launch.world_size or parallel.replica * num_replicas(parallel.replica, parallel.dp, launch)


def launch_ranks(target: str, config: Any, *, out: Path | None, world_size: int) -> int:
    """Start `world_size` ranks of the job on this host, wait, and return the command's exit code.

    Rank 0 has the terminal; the others write to out/logs, or to a temporary folder for a command without
    checkpoints (`out` is None). A failure is reported once, on stderr.
    Raises UserError if the port is in use, or the log folder cannot be made.
    """
    dist = config.dist
    check_interface(os.environ)
    listener = listen(dist.master_port)
    remove_abandoned(Path(tempfile.gettempdir()), f"{PREFIX}*")
    with listener, held_folder(Path(tempfile.mkdtemp(prefix=PREFIX))) as folder:
        logs = _make_logs(folder if out is None else out)
        job = _write_job(folder, _job(target, config, logs))
        cores = available_cores()
        threads = num_threads(dist.threads_per_rank, os.environ, cores=cores, local_ranks=world_size)
        variables = worker_environment(os.environ, threads=threads) | flight_recorder(os.environ, logs)
        relay = Relay(saves=is_noting())
        with relay.receiving():
            ranks = _start_ranks(job, world_size, listener, variables)
            ends = _watch_ranks(ranks, relay, folder)
        if relay.killed:
            word = SIGNAL_NAMES.get(relay.killed, relay.killed.name)
            print(f"mlm: {word}: stopped at once{INTACT if out else ''}", file=sys.stderr)
            return 128 + relay.killed
        if not any(end.exit_code for end in ends):
            return noted_exit_code(folder)
        failures, saves = load_failures(folder), out is not None
        text, code = report(failures, ends, world_size=world_size, logs=logs, saves=saves)
        print(text, file=sys.stderr, flush=True)
        return code


Ranks = dict[int, "subprocess.Popen[bytes]"]


def _start_ranks(job: Path, world_size: int, listener: socket.socket, variables: Mapping[str, str]) -> Ranks:
    """Start the ranks. Rank 0 serves the rendezvous on `listener`; connections wait there until it does."""
    port, ranks = listener.getsockname()[1], Ranks()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CARRIED_SIGNALS)
    try:
        for rank in range(world_size):
            place = RankPlace(rank, world_size, rank, world_size, LOOPBACK, port)
            served = {} if rank else {LISTENER: str(listener.fileno())}
            ranks[rank] = subprocess.Popen(  # rank 0 keeps the terminal, others redirect themselves
                [sys.executable, "-P", "-m", "mlm.launch.rank", str(job)],
                env={**os.environ, **variables, **place_variables(place), **served},
                pass_fds=() if rank else (listener.fileno(),),
                start_new_session=True,
            )
    except BaseException:
        _close_ranks(ranks.values())
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    listener.close()  # else peers of a dead rank 0 could connect to nobody
    return ranks


def _close_ranks(ranks: "Iterable[subprocess.Popen[bytes]]") -> None:
    """End the ranks that run, with what they started, and collect them.

    One that SIGKILL does not end waits inside the kernel for a device: it is left.
    """
    for numbers in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):  # a suspended rank wakes and dies
        left = [process for process in ranks if process.poll() is None]
        for process, number in product(left, numbers):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        end = time.monotonic() + CLOSE_S
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))


def _watch_ranks(ranks: Ranks, relay: Relay, folder: Path) -> list[ProcessEnd]:
    """Relay requests to stop until all ranks have ended; once one has failed, end the others.

    Return how ranks ended that were not ended here.
    """
    pids = {rank: process.pid for rank, process in ranks.items()}
    try:
        while len(ends := _process_ends(pids)) < len(pids) and not any(end.exit_code for end in ends):
            relay.act(pids)
            time.sleep(POLL_S)
        if any(end.exit_code for end in ends):
            limit = time.monotonic() + REPORT_S
            while time.monotonic() < limit and not _is_explained(load_failures(folder), ends, pids):
                time.sleep(POLL_S / 2)
                ends = _process_ends(pids)
        return ends
    finally:
        _close_ranks(ranks.values())


def _is_explained(failures: list[Failure], ends: list[ProcessEnd], pids: Mapping[int, int]) -> bool:
    """True if a failure has a cause of its own, or all ranks reported or ended: a silent one is suspected."""
    reported = {failure.rank for failure in failures} | {end.rank for end in ends}
    return not all(failure.lost_peer for failure in failures) or reported >= set(pids)


def _process_ends(pids: Mapping[int, int]) -> list[ProcessEnd]:
    """Return how the ranks' processes have ended so far; `close` collects them later."""
    ends = []
    for rank, pid in pids.items():
        if end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
            ends.append(ProcessEnd(rank, pid, code))
    return ends


def _job(target: str, config: Any, logs: Path) -> dict[str, Any]:
    kind = type(config)
    assert kind.__module__.startswith("mlm."), f"{kind} is not part of mlm"
    return {
        "target": target,
        "config_class": f"{kind.__module__}:{kind.__qualname__}",
        "config": to_dict(config),
        "parent": os.getpid(),
        "logs": str(logs),
    }


def _write_job(folder: Path, job: dict[str, Any]) -> Path:
    path = folder / "job.json"
    try:
        path.write_text(json.dumps(job))
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; free some space, or set TMPDIR to another folder"
        ) from None
    return path


def _make_logs(folder: Path) -> Path:
    logs = (folder / "logs").resolve()
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={folder}: cannot make {logs}: {error.strerror}; choose another out") from None
    return logs


def listen(port: int) -> socket.socket:
    """Return a socket that listens on this host only; port 0 picks a free one. Raises UserError if taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "is in use on this host" if in_use else f"cannot be opened ({error})"
        raise UserError(
            f"dist.master_port={port} {why}: set another port, or dist.master_port=0 to pick a free one"
        ) from None
    return listener
