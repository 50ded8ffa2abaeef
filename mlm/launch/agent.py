"""A plain launch: several ranks on this host under torch's elastic agent, watched until all have left.

The agent starts each rank in its own session, so Ctrl-C reaches this process only; `Relay` passes the
request on. Ranks start with these signals blocked (the mask is inherited) and unblock them inside
`StopRequest`: no request is lost, and none kills a rank that is not ready for it.
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
from mlm.launch.environment import num_threads, read_place, worker_environment
from mlm.launch.failure import (
    INTACT,
    LAST_WORDS_S,
    Death,
    LastWords,
    end_stopped,
    flight_recorder,
    load_failures,
    report,
)
from mlm.launch.job_folder import job_folder, noted_exit_code
from mlm.launch.network import LOOPBACK, check_interface, check_loopback
from mlm.launch.process import run_rank
from mlm.launch.roll_call import rendezvous_store
from mlm.launch.stop import STANDS_FOR, WORDS, Relay, handlers_restored, is_noting
from mlm.util.errors import UserError

POLL_S = 0.1


def launch_ranks(target: str, config: Any, *, out: Path | None, world_size: int) -> int:
    """Start `world_size` ranks of the job on this host, wait, and return the command's exit code.

    Rank 0 has the terminal; the others write to out/logs, or to a temporary folder for a command without
    checkpoints (`out` is None). A failure is reported once, on stderr.
    Raises UserError if the port is in use, this host has no loopback interface, or the log folder cannot be
    made.
    """
    dist = config.dist
    check_loopback()
    check_interface(os.environ)
    listener = listen(dist.master_port)
    with listener, job_folder() as folder:
        logs = _make_logs(folder if out is None else out)
        job = _write_job(folder, _job(target, config, logs))
        threads = num_threads(
            dist.threads_per_rank, cores=len(os.sched_getaffinity(0)), local_ranks=world_size
        )
        spec = WorkerSpec(
            role="mlm",
            local_world_size=world_size,
            entrypoint=sys.executable,
            args=("-P", "-m", "mlm.launch.rank", str(job)),
            rdzv_handler=HostRendezvous(listener, dist.timeout_s),
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
            print(f"mlm: {word}: stopped at once{INTACT if out else ''}", file=sys.stderr)
            return 128 + relay.killed
        if not failed:
            return noted_exit_code(folder)
        failures, saves = load_failures(folder), out is not None
        text, code = report(
            failures, agent.deaths, world_size=world_size, logs=logs, stopped=agent.stopped, saves=saves
        )
        print(text, file=sys.stderr, flush=True)
        return code


def run_launched(job: dict[str, Any], words: LastWords) -> int:
    """Rebuild the configuration in a rank that `launch_ranks` started, and run it; return the exit code.

    The watchdog reports a hang through `words`.
    """
    place = read_place(os.environ)
    assert place is not None, "the elastic agent sets RANK and WORLD_SIZE"
    module, _, name = job["config_class"].partition(":")
    assert module.startswith("mlm."), f"{module} is not part of mlm"
    config = from_dict(getattr(import_module(module), name), job["config"])
    store = rendezvous_store(place, config.dist.timeout_s)
    return run_rank(job["target"], config, place=place, store=store, words=words)


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


class RankAgent(LocalElasticAgent):
    """Torch's agent, which starts, watches and ends the ranks.

    It also relays requests to stop, and notes how the first rank died before torch ends the others.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, relay: Relay, folder: Path) -> None:
        super().__init__(spec, logs_specs)
        self.stopped: dict[int, int] = {}
        self._dead: dict[int, Death] = {}
        self._relay, self._folder = relay, folder

    @property
    def deaths(self) -> list[Death]:
        """Ranks whose process ended with an error."""
        return list(self._dead.values())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STANDS_FOR)
        try:
            started = super()._start_workers(worker_group)
            self._relay.install()  # older versions of torch ignore AGENT_SIGNALS and set their own handlers
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pids = {worker.global_rank: worker.id for worker in worker_group.workers}
        self._relay.act(pids)
        self._note_deaths(pids)
        if self._dead:
            self._collect_reports(pids)
        return super()._monitor_workers(worker_group)

    def _note_deaths(self, pids: Mapping[int, int]) -> None:
        for rank, pid in pids.items():
            with suppress(ChildProcessError):  # ended without an error and was collected earlier
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if end and end.si_status:
                    code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
                    self._dead[rank] = Death(rank, pid, code)

    def _collect_reports(self, pids: Mapping[int, int]) -> None:
        """Let waiting ranks report: one that does not is the suspect. End those that are stopped.

        Torch ends a rank by SIGTERM, which a stopped one does not receive, and waits long for it.
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


class HostRendezvous(RendezvousHandler):
    """Rendezvous through a key-value store that this process serves on a socket it already holds.

    Torch's own handlers bind the port on all interfaces, and late.
    """

    def __init__(self, listener: socket.socket, timeout_s: float) -> None:
        port = listener.getsockname()[1]
        self._address = RendezvousStoreInfo(LOOPBACK, port)
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks use the store of this process."""
        return True

    def get_backend(self) -> str:
        """Name of the rendezvous."""
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, this node's rank and the number of nodes."""
        return RendezvousInfo(PrefixStore("agent", self._store), 0, 1, self._address)

    def is_closed(self) -> bool:
        """False: it serves one launch."""
        return False

    def set_closed(self) -> None:
        """Do nothing: it serves one launch."""
        pass

    def num_nodes_waiting(self) -> int:
        """Zero: there is one node."""
        return 0

    def get_run_id(self) -> str:
        """Name of the launch."""
        return "mlm"

    def shutdown(self) -> bool:
        """Do nothing: the store ends with the process."""
        return True


class Streams(LogsSpecs):
    """Leaves the ranks' streams alone: rank 0 keeps the terminal, the others redirect themselves.

    Also adds variables to the environment of the ranks.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(log_dir=os.devnull)
        self._environment = environment

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the ranks' environment and leave their streams as they are."""
        for variables in envs.values():
            variables.update(self._environment)
        unchanged = dict.fromkeys(envs, "")
        return LogsDest(
            stdouts=unchanged, stderrs=dict(unchanged), error_files=dict.fromkeys(envs, os.devnull)
        )

    @property
    def root_log_dir(self) -> str:
        """Folder of logs that the agent would write."""
        return os.devnull


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Silence the agent's own report of a failure, which `report` replaces."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
