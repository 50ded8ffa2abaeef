"""Starting a job on all its ranks: in this process, on this host, or as a rank of torchrun or SLURM.

Each rank on this host starts in a new session: Ctrl-C reaches this process only, and `Relay` passes it on. A
batch system signals every process; the request counts once. Ranks that save inherit a mask that blocks these
signals, and unblock them inside `StopRequest`: no request is lost, and none kills a rank earlier. The command
ends ranks by SIGKILL. This process imports no torch, which would double the time until the ranks start.
"""

import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlm.config.build import to_dict
from mlm.launch.config import DistConfig
from mlm.launch.devices import count_gpus, device_kind
from mlm.launch.environment import (
    LISTENER,
    RankPosition,
    num_threads,
    position_variables,
    read_rank_position,
    worker_environment,
)
from mlm.launch.failure import (
    REPORT_S,
    ProcessEnd,
    flight_recorder,
    load_failures,
    noted_exit_code,
    report,
)
from mlm.launch.network import LOOPBACK, check_interface
from mlm.launch.rules.layout import Launch, num_replicas
from mlm.launch.stop import SIGNAL_NAMES, Relay, Stopped, interrupt_exit_code, is_noting, signal_exit_code
from mlm.parallel.config import ParallelConfig
from mlm.util.errors import UserError
from mlm.util.lock import held_folder, remove_abandoned
from mlm.util.system import WARNED, available_cores, resolve

POLL_S = 0.1
CLOSE_S = 30.0
"""Seconds that ranks get to end after SIGKILL."""
RANK = "mlm.launch.process"
SAVED = ("checkpoints/step-*", "*/checkpoints/step-*")
"""Checkpoints of a run, or of the seeds of a finetuning."""
PREFIX = "mlm-job-"
"""Name of a launch's folder in the temporary directory."""


def launch_facts(dist: DistConfig) -> Launch:
    """Read the environment. Raises UserError for invalid variables, or CUDA without a GPU."""
    position = read_rank_position(os.environ)
    return Launch(
        world_size=None if position is None else position.world_size,
        local_devices=count_gpus() if device_kind(dist) == "cuda" else None,
    )


def run_job(target: str, config: Any, *, out: Path | None) -> int:
    """Run `module:function` as `run(config, ctx: ParallelContext)` on every rank; return the exit code.

    0: the function returned on all ranks. 2: a user's mistake on a rank, 1: any other failure, both already
    reported. 128 + n: stopped by signal n (130: Ctrl-C), also after a save; but 0 where a save before a time
    limit was requested (SIGUSR1), and for a rank of torchrun or SLURM that saved.

    With one rank, the function runs in this process and its exceptions pass through. Raises UserError for a
    port in use, or an `out` that cannot be written.
    """
    position = read_rank_position(os.environ)
    if position is not None:
        return int(resolve(f"{RANK}:run_joined")(target, config, position=position, out=out))
    world_size = choose_world_size(config.parallel, launch_facts(config.dist))
    try:
        if world_size > 1:
            return launch_ranks(target, config, out=out, world_size=world_size)
        return int(resolve(f"{RANK}:run_rank")(target, config))
    except KeyboardInterrupt as error:
        if is_noting() and not isinstance(error, Stopped):  # Stopped has printed its line
            print(f"mlm: Ctrl-C: stopped at once{checkpoint_note(out)}", file=sys.stderr)
        return interrupt_exit_code(error)


def choose_world_size(parallel: ParallelConfig, launch: Launch) -> int:
    """Return the ranks of a checked layout; dp=null takes all available ones."""
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
        root = folder if out is None else out
        logs = (root / "logs").resolve()
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"out={root}: cannot make {logs}: {error.strerror}; choose another out") from None
        job, kind = folder / "job.json", type(config)
        content = {
            "target": target,
            "config_class": f"{kind.__module__}:{kind.__qualname__}",
            "config": to_dict(config),
            "parent": os.getpid(),
            "logs": str(logs),
            "warned": sorted(WARNED),
        }
        try:
            job.write_text(json.dumps(content))
        except OSError as error:
            fix = "free some space, or set TMPDIR to another folder"
            raise UserError(f"cannot write {job}: {error.strerror}; {fix}") from None
        cores = available_cores()
        threads = num_threads(dist.threads_per_rank, os.environ, cores=cores, local_ranks=world_size)
        variables = worker_environment(os.environ, threads=threads) | flight_recorder(os.environ, logs)
        saves = is_noting()
        relay, blocked = Relay(saves=saves), SIGNAL_NAMES if saves else (signal.SIGINT,)
        with relay.receiving():
            ranks = _start_ranks(job, world_size, listener, variables, blocked=blocked)
            ends = _watch_ranks(ranks, relay, folder)
        codes = [end.exit_code for end in ends]
        stopped = relay.killed or next((n for n in SIGNAL_NAMES if 128 + n in codes or -n in codes), None)
        if stopped:
            word = SIGNAL_NAMES.get(stopped, stopped.name)
            print(f"mlm: {word}: stopped at once{checkpoint_note(out)}", file=sys.stderr)
            return signal_exit_code(stopped) if saves and not relay.killed else 128 + stopped
        if not any(codes):
            return noted_exit_code(folder)
        failures = load_failures(folder)
        text, code = report(failures, ends, world_size=world_size, logs=logs, note=checkpoint_note(out))
        print(text, file=sys.stderr, flush=True)
        return code


def checkpoint_note(out: Path | None) -> str:
    """Clause on the checkpoints of a run that ended early; "" for a command without a run folder."""
    if out is None:
        return ""
    is_saved = any(any(out.glob(pattern)) for pattern in SAVED)
    return "; the last checkpoint is intact" if is_saved else "; no checkpoint was saved"


Ranks = dict[int, "subprocess.Popen[bytes]"]


def _start_ranks(
    job: Path,
    world_size: int,
    listener: socket.socket,
    variables: Mapping[str, str],
    *,
    blocked: Iterable[signal.Signals],
) -> Ranks:
    """Start the ranks with these signals blocked.

    Rank 0 serves the rendezvous on `listener`, where connections wait until then.
    """
    port, ranks = listener.getsockname()[1], Ranks()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        for rank in range(world_size):
            position = RankPosition(rank, world_size, rank, world_size, LOOPBACK, port)
            listening = {} if rank else {LISTENER: str(listener.fileno())}
            ranks[rank] = subprocess.Popen(  # rank 0 keeps the terminal, others redirect themselves
                [sys.executable, "-P", "-m", "mlm.launch.rank", str(job)],
                env={**os.environ, **variables, **position_variables(position), **listening},
                pass_fds=() if rank else (listener.fileno(),),
                start_new_session=True,
            )
    except BaseException:
        _close_ranks(ranks.values())
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    listener.close()  # else peers of a dead rank 0 could connect to nobody
    return ranks


def _close_ranks(ranks: "Iterable[subprocess.Popen[bytes]]") -> None:
    """Kill running ranks with their children, and collect them.

    A rank that survives SIGKILL waits inside the kernel for a device, and is abandoned.
    """
    alive = [process for process in ranks if process.poll() is None]
    for process in alive:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + CLOSE_S
    for process in alive:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _watch_ranks(ranks: Ranks, relay: Relay, folder: Path) -> list[ProcessEnd]:
    """Relay stop requests until all ranks have ended; after a failure, kill the others.

    Return the ends of ranks that this process did not kill.
    """
    pids = {rank: process.pid for rank, process in ranks.items()}
    limit = math.inf
    try:
        while True:
            ends = []
            for rank, pid in pids.items():
                if end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                    ends.append(ProcessEnd(rank, pid, code))
            relay.act(pids)
            if any(end.exit_code for end in ends):
                limit = min(limit, time.monotonic() + REPORT_S)
                failures = load_failures(folder)
                reported = {failure.rank for failure in failures} | {end.rank for end in ends}
                # Wait for a failure that is no lost peer, or for a report or end of every rank.
                is_explained = not all(failure.lost_peer for failure in failures) or reported >= set(pids)
                is_over = is_explained or time.monotonic() >= limit
            else:
                is_over = len(ends) == len(pids)
            if is_over:
                return ends
            time.sleep(POLL_S)
    finally:
        _close_ranks(ranks.values())


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
