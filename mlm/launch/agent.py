"""A plain launch: several ranks on this host under torch's elastic agent, watched until all have left.

The agent starts each rank in a session of its own, so Ctrl-C reaches this process only; `Relay` passes the
request on. Ranks start with the request signals blocked (the mask is inherited) and unblock them inside
`StopRequest`: a request is never lost, and none can kill a rank that is not ready for it.
"""

import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from mlm.config.build import from_dict, to_dict
from mlm.errors import UserError
from mlm.launch.config import DistConfig
from mlm.launch.environment import num_threads, read_place, worker_environment
from mlm.launch.failure import LAST_WORDS_S, Death, LastWords, end_stopped, load_failures, report
from mlm.launch.job_folder import job_folder
from mlm.launch.process import meet, run_rank
from mlm.launch.relay import Relay, handlers_restored
from mlm.launch.stop import STANDS_FOR, WORDS, is_noting
from mlm.launch.watchdog import flight_recorder
from mlm.parallel.config import ParallelConfig

HOST = "127.0.0.1"
POLL_S = 0.1


def launch_ranks(
    target: str, config: Any, *, parallel: ParallelConfig, dist: DistConfig, out: Path | None, world_size: int
) -> int:
    """Start `world_size` ranks of the job on this host and wait; the command's exit code.

    Rank 0 has the terminal; the others write to out/logs. Of a failure one report goes to stderr.
    Raises UserError if the port is in use or the log folder cannot be made.
    """
    listener = listen(dist.master_port)
    with listener, job_folder() as folder:
        logs = _make_logs(folder if out is None else out)
        job = _write_job(folder, _job(target, config, parallel, dist, logs))
        threads = num_threads(
            dist.threads_per_rank, cores=len(os.sched_getaffinity(0)), local_ranks=world_size
        )
        spec = WorkerSpec(
            role="mlm",
            local_world_size=world_size,
            entrypoint=sys.executable,
            args=("-P", "-m", "mlm.launch.rank", str(job)),
            rdzv_handler=Meeting(listener, dist.timeout_s),
            max_restarts=0,
            monitor_interval=POLL_S,
        )
        relay = Relay(saves=is_noting())
        variables = worker_environment(os.environ, threads=threads) | flight_recorder(os.environ, logs)
        agent = RankAgent(spec, Streams(variables), relay, folder)
        with quiet_logging(), handlers_restored():
            relay.install()
            try:
                failed = agent.run().is_failed()
            except SignalException as stopped:
                return 128 + stopped.sigval
        if relay.killed:
            word = WORDS.get(relay.killed, relay.killed.name)
            print(f"mlm: {word}: stopped at once; the last checkpoint is intact", file=sys.stderr)
            return 128 + relay.killed
        if not failed:
            return 0
        text, code = report(
            load_failures(folder), agent.deaths, world_size=world_size, logs=logs, stopped=agent.stopped
        )
        print(text, file=sys.stderr, flush=True)
        return code


def run_launched(job: dict[str, Any], words: LastWords) -> None:
    """The child's side of `launch_ranks`: rebuild the configuration and run this rank.

    `words` is how the watchdog tells of a hang.
    """
    place = read_place(os.environ)
    assert place is not None, "the elastic agent sets RANK and WORLD_SIZE"
    module, _, name = job["config_class"].partition(":")
    assert module.startswith("mlm."), f"{module} is not part of mlm"
    dist = from_dict(DistConfig, job["dist"])
    run_rank(
        job["target"],
        from_dict(getattr(import_module(module), name), job["config"]),
        parallel=from_dict(ParallelConfig, job["parallel"]),
        dist=dist,
        place=place,
        store=meet(place, dist.timeout_s),
        words=words,
    )


def _job(target: str, config: Any, parallel: ParallelConfig, dist: DistConfig, logs: Path) -> dict[str, Any]:
    kind = type(config)
    assert kind.__module__.startswith("mlm."), f"{kind} is not part of mlm"
    return {
        "target": target,
        "config_class": f"{kind.__module__}:{kind.__qualname__}",
        "config": to_dict(config),
        "parallel": asdict(parallel),
        "dist": asdict(dist),
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
    """A socket that listens on this host only; port 0 picks a free one. Raises UserError if it is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "is in use on this host" if in_use else f"cannot be opened ({error})"
        raise UserError(
            f"dist.master_port={port} {why}: set another port, or dist.master_port=0 to pick a free one"
        ) from None
    return listener


class RankAgent(LocalElasticAgent):
    """Torch's agent, which starts, watches and ends the ranks; here it also relays requests and notes
    how the first rank died, before it ends the others itself."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, relay: Relay, folder: Path) -> None:
        super().__init__(spec, logs_specs)
        self.stopped: dict[int, int] = {}
        self._dead: dict[int, Death] = {}
        self._relay, self._folder = relay, folder

    @property
    def deaths(self) -> list[Death]:
        """How ranks ended by themselves."""
        return list(self._dead.values())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STANDS_FOR)
        try:
            started = super()._start_workers(worker_group)
            self._relay.install()  # a torch that does not know the variable below has put its own in
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pids = {worker.global_rank: worker.id for worker in worker_group.workers}
        self._relay.act(pids)
        self._note_deaths(pids)
        if self._dead:
            self._hear_the_others(pids)
        return super()._monitor_workers(worker_group)

    def _note_deaths(self, pids: Mapping[int, int]) -> None:
        for rank, pid in pids.items():
            with suppress(ChildProcessError):  # left well and was collected earlier
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if end and end.si_status:
                    code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                    self._dead[rank] = Death(rank, pid, code)

    def _hear_the_others(self, pids: Mapping[int, int]) -> None:
        """Let the ranks that wait say so: the one that does not is where to look. End those that are stopped.

        Torch asks a rank to leave by SIGTERM, which a stopped one does not hear, and waits for long.
        """
        end = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < end:
            self._note_deaths(pids)
            failures = load_failures(self._folder)
            heard = {failure.rank for failure in failures} | set(self._dead)
            if not all(failure.lost_peer for failure in failures) or heard >= set(pids):
                break
            time.sleep(POLL_S / 2)
        self.stopped = end_stopped(pids)


class Meeting(RendezvousHandler):
    """The ranks' key-value store, served by this process on a socket it already holds.

    Torch's own handlers bind the port on all interfaces, and late.
    """

    def __init__(self, listener: socket.socket, timeout_s: float) -> None:
        port = listener.getsockname()[1]
        self._address = RendezvousStoreInfo(HOST, port)
        self._store = TCPStore(
            HOST,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore("agent", self._store), 0, 1, self._address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "mlm"

    def shutdown(self) -> bool:
        return True


class Streams(LogsSpecs):
    """Leaves the ranks' streams alone: rank 0 keeps the terminal, the others redirect themselves.

    This is also where the agent lets a rank's environment be completed.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(log_dir=os.devnull)
        self._environment = environment

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for variables in envs.values():
            variables.update(self._environment)
        unchanged = dict.fromkeys(envs, "")
        return LogsDest(
            stdouts=unchanged, stderrs=dict(unchanged), error_files=dict.fromkeys(envs, os.devnull)
        )

    @property
    def root_log_dir(self) -> str:
        return os.devnull


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Silence the agent's own account of a failure: the report says it once, in our words."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
