"""Signals by every road to real commands, in every phase: what they leave, and whether they go on."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mlm.checkpoint.native.folders import checkpoints
from mlm.config.cli import main
from mlm.launch.environment import import_path

HUNG_S = 90.0
PAUSE = Path(__file__).parent / "pause"
MLM = (sys.executable, "-m", "mlm")
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--standalone",
    "-m",
    "mlm",
)
TYPED_TWICE_S = 0.7
SEVERAL_S = 0.8
"""Seconds within which all ranks have reached a phase that one has."""


@dataclass(frozen=True)
class Work:
    """A command, and what it leaves."""

    words: tuple[str, ...]
    ranks: int = 1
    steps: int = 0
    """Steps that it trains; 0 if it saves nothing."""
    before: tuple[str, ...] = MLM


@dataclass
class Started:
    """A command that runs in a session and a terminal's group of its own."""

    process: "subprocess.Popen[bytes]"
    marks: Path
    terminal: int | None = None

    def pids(self) -> list[int]:
        """All its living processes, by the folder of marks in their environment."""
        wanted, found = f"TORTURE_MARKS={self.marks}\0".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and wanted in (path / "environ").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def ranks(self) -> list[int]:
        """Those that have marked the phase."""
        return [int(path.name) for path in self.marks.iterdir()]

    def send(self, number: int, pids: Sequence[int]) -> None:
        """Send a signal to each."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def group(self, number: int) -> None:
        """Send a signal to the group, as a terminal does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


Road = Callable[[Started], None]
TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


def twice(number: int) -> Road:
    """As a user types twice."""

    def send(job: Started) -> None:
        job.group(number)
        time.sleep(TYPED_TWICE_S)
        job.group(number)

    return send


def closed(job: Started) -> None:
    """Hang up: the last reader of the terminal is gone."""
    assert job.terminal is not None
    os.close(job.terminal)


ROADS: dict[str, tuple[int, Road]] = {
    "launcher TERM": (143, lambda job: job.send(TERM, [job.process.pid])),
    "launcher INT": (130, lambda job: job.send(INT, [job.process.pid])),
    "launcher USR1": (0, lambda job: job.send(USR1, [job.process.pid])),
    "one rank TERM": (143, lambda job: job.send(TERM, job.ranks()[-1:])),
    "one rank INT": (130, lambda job: job.send(INT, job.ranks()[-1:])),
    "ranks TERM": (143, lambda job: job.send(TERM, job.ranks())),
    "all TERM": (143, lambda job: job.send(TERM, job.pids())),
    "all INT": (130, lambda job: job.send(INT, job.pids())),
    "all USR1": (0, lambda job: job.send(USR1, job.pids())),
    "all TERM then KILL": (143, lambda job: job.send(TERM, job.pids())),
    "group TERM": (143, lambda job: job.group(TERM)),
    "group INT": (130, lambda job: job.group(INT)),
    "twice TERM": (143, twice(TERM)),
    "twice INT": (130, twice(INT)),
    "twice USR1": (0, twice(USR1)),
    "timeout INT": (130, lambda job: job.send(INT, [job.process.pid])),
    "timeout TERM": (143, lambda job: job.send(TERM, [job.process.pid])),
    "terminal": (129, closed),
}
"""How a signal comes → the exit code of a run that saved, and what sends it."""


@dataclass
class Outcome:
    """What one signal did."""

    code: int = 0
    met: bool = False
    seconds: float = 0.0
    saved: int = 0
    said: str = ""
    found: list[str] = field(default_factory=list)


def start(work: Work, out: Path, folder: Path, at: str, road: str) -> Started:
    """Start a command that pauses in a phase."""
    marks = folder / "marks"
    marks.mkdir(parents=True)
    (folder / "tmp").mkdir()
    environ = {
        **os.environ,
        "PYTHONPATH": f"{PAUSE}:{import_path()}",
        "TORTURE_AT": at,
        "TORTURE_MARKS": str(marks),
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
    }
    words = [*work.before, *(word.format(out=out) for word in work.words)]
    if road.startswith("timeout"):
        words = ["timeout", "--preserve-status", "-s", road.split()[1], str(HUNG_S), *words]
    terminal, theirs = os.openpty() if road == "terminal" else (None, os.open(os.devnull, os.O_RDONLY))
    if terminal is not None:
        words = ["setsid", "--ctty", *words]
    with open(folder / "said", "wb") as said:
        process = subprocess.Popen(
            words,
            env=environ,
            stdin=theirs,
            stdout=said,
            stderr=said,
            process_group=None if terminal is not None else 0,  # setsid leads a group of its own
        )
    os.close(theirs)
    return Started(process, marks, terminal)


def run(work: Work, out: Path, folder: Path, at: str, road: str) -> Outcome:
    """Start a command, send the signal in the phase, look at what it left, and start it again."""
    wanted, send = ROADS[road]
    job, outcome = start(work, out, folder, at, road), Outcome()
    end = time.monotonic() + HUNG_S
    while not job.ranks() and job.process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    sent = time.monotonic()
    while len(job.ranks()) < work.ranks and time.monotonic() < sent + SEVERAL_S:
        time.sleep(0.02)
    outcome.met = job.process.poll() is None and bool(job.ranks())
    if outcome.met:
        send(job)
    sent = time.monotonic()
    try:
        outcome.code = job.process.wait(30 if road.endswith("KILL") else HUNG_S)
    except subprocess.TimeoutExpired:
        job.send(signal.SIGKILL, job.pids())
        outcome.found.append("had to be killed")
        outcome.code = job.process.wait()
    outcome.seconds = time.monotonic() - sent
    time.sleep(0.5)
    if left := job.pids():
        outcome.found.append(f"{len(left)} processes left")
        job.send(signal.SIGKILL, left)
    judge(work, out, folder, outcome, wanted)
    return outcome


def steps_in(out: Path) -> int:
    """Newest step that a run, or a run's only seed, has saved."""
    return max(checkpoints(out / "checkpoints"), default=0)


def judge(work: Work, out: Path, folder: Path, outcome: Outcome, wanted: int) -> None:
    """Compare with what is promised, then start the command again."""
    said = (folder / "said").read_text(errors="replace")
    logs = "".join(path.read_text(errors="replace") for path in out.glob("logs/*") if path.is_file())
    outcome.saved, found = steps_in(out), outcome.found
    lines = [line for line in said.splitlines() if line.strip()]
    outcome.said = " | ".join(
        [line for line in lines if "mlm: " in line or "stopped" in line][-3:] or lines[-1:]
    )
    if "Traceback" in said + logs and work.before != TORCHRUN:
        found.append("traceback")
    is_over = bool(work.steps) and outcome.saved >= work.steps
    wanted = 1 if work.before == TORCHRUN and wanted else wanted
    if outcome.code not in (wanted, 0 if is_over else wanted):
        found.append(f"code {outcome.code} for {wanted}")
    if "Finished" in said and not is_over:
        found.append("says Finished")
    promised = re.findall(r"finishing (?:the batch of validation after )?step (\d+)", said)
    if promised and "stopped at once" not in said and outcome.saved != int(promised[-1]):
        found.append(f"promised step {promised[-1]}")
    code, error = started_again(work, out, folder)
    if code:
        found.append(f"again: code {code}: {error}")
    elif work.steps and steps_in(out) != work.steps:
        found.append(f"again: ended at step {steps_in(out)}")


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["mlm.training.pretrain.run", "mlm.finetune.run", "mlm.config.cli.run"])


def started_again(work: Work, out: Path, folder: Path) -> tuple[int, str]:
    """Exit code and last line of the same command by one rank; a fork, which has imported torch."""
    words = [ONE_RANK.get(word, word.format(out=out)) for word in work.words]
    child = FORKS.Process(target=as_typed, args=(words, str(folder / "again")))
    child.start()
    child.join(HUNG_S)
    if child.is_alive():
        child.kill()
        child.join()
    lines = (folder / "again").read_text(errors="replace").splitlines()
    return child.exitcode or 0, lines[-1] if lines else ""


ONE_RANK = dict.fromkeys(("tp=2", "pp=2", "dp=2"), "dp=1")


def as_typed(words: list[str], log: str) -> None:
    """Run a command in this process, with its output in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    sys.exit(main(words))
