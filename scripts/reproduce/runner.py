"""Runs what is left of an experiment's stages. What is done is remembered in steps/NAME.json, beside its
log."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mlm.launch.doctor.findings import versions
from mlm.plan.hardware import cpu_name
from mlm.util.errors import CheckFailedError, UserError
from mlm.util.files import write_atomic
from reproduce.experiment import SCRIPTS, Stages, Step
from reproduce.results import Record, read_metrics

POLL_S = 0.2
SAVE_S = 120.0
"""Seconds in which a stopped training run must have saved; later it is killed, and resumes earlier."""
SIGNALLED = 128
"""Exit codes from here on name the signal that ended a command; so do negative ones."""
DIVERGED = ("gradients still overflow", "gradients are not finite")
PROGRAMS = {"mlm": (sys.executable, "-P", "-m", "mlm"), "python": (sys.executable, "-P")}


def hardware() -> str:
    """Return the processor with the cores that this process may use."""
    return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"


def program_versions() -> str:
    """Return `mlm 0.2.0, torch 2.13.0, python 3.11.7`."""
    return ", ".join(f"{name} {version}" for name, version in versions().items())


def read_record(folder: Path, step: Step) -> Record | None:
    """Return the record of a finished step; None if it must run.

    Raises UserError for a step that ran with other settings: its result is another one.
    """
    path = folder / "steps" / f"{step.name}.json"
    if not path.is_file():
        return None
    fields = json.loads(path.read_text("utf-8"))
    record = Record(**{**fields, "words": tuple(fields["words"])})
    if not record.code and not (folder / step.result).exists():
        return None
    if record.words != step.words:
        changed = sorted(set(record.words) ^ set(step.words))
        raise UserError(
            f"--out={folder}: step {step.name} ran with other settings there ({', '.join(changed[:4])}); "
            "use another folder"
        )
    return record


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP too, as for Ctrl-C."""
    chosen = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(each, signal.default_int_handler) for each in chosen]
    try:
        yield
    finally:
        for each, handler in zip(chosen, before, strict=True):
            signal.signal(each, handler)


@dataclass
class Running:
    """Process of a step, in a process group of its own."""

    step: Step
    process: "subprocess.Popen[bytes]"
    since: float


class Runner:
    """Steps of an experiment.

    Args:
        folder: of all experiments, in which commands run.
        stages: of the experiment.
        cores: steps of a stage that run beside each other.
        show: prints a line.
    """

    def __init__(self, folder: Path, stages: Stages, cores: int, show: Callable[[str], None]) -> None:
        self.folder, self.stages, self.cores, self.show = folder, stages, cores, show
        steps = [step for stage in stages for step in stage]
        records = {step.name: read_record(folder, step) for step in steps}
        self.records = {name: record for name, record in records.items() if record is not None}
        self.waiting = [step for step in steps if step.name not in self.records]
        self.running = list[Running]()

    def run(self) -> None:
        """Run what is left. Raises CheckFailedError if a step fails.

        Whatever ends this, running steps are asked to save and stop; they continue at the next call.
        """
        (self.folder / "steps").mkdir(parents=True, exist_ok=True)
        try:
            for stage in self.stages:
                self.run_stage([step for step in stage if step.name not in self.records])
        finally:
            self.stop()

    def run_stage(self, waiting: list[Step]) -> None:
        """Run steps beside each other, as many as there are cores."""
        while waiting or self.running:
            while waiting and len(self.running) < self.cores:
                self.start(waiting.pop(0))
            time.sleep(POLL_S)
            for each in [each for each in self.running if each.process.poll() is not None]:
                self.running.remove(each)
                self.finish(each)

    def start(self, step: Step) -> None:
        """Start a step; a training run continues from its last checkpoint."""
        program, *rest = step.words
        (self.folder / step.result).parent.mkdir(parents=True, exist_ok=True)
        paths = (str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", ""))
        with open(self.log(step), "wb") as log:
            process = subprocess.Popen(
                [*PROGRAMS.get(program, (program,)), *rest],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it through `stop` alone
            )
        self.running.append(Running(step, process, time.monotonic()))

    def finish(self, running: Running) -> None:
        """Remember a step that has ended. Raises CheckFailedError if it failed."""
        step, code = running.step, running.process.returncode
        seconds, result = time.monotonic() - running.since, self.folder / step.result
        message = last_line(self.log(step))
        diverged = step.may_diverge and 0 < code < SIGNALLED and any(words in message for words in DIVERGED)
        if code and not diverged:
            raise CheckFailedError(
                f"step {step.name} ended with {code}: {message} (its output: {self.log(step)}; "
                f"the command: {shlex.join(step.words)})"
            )
        if not code and (not result.exists() or not is_complete(step, result)):
            raise CheckFailedError(f"step {step.name} was stopped; the same command continues")
        record = Record(step.words, code, round(seconds, 3), hardware(), program_versions())
        write_atomic(self.folder / "steps" / f"{step.name}.json", json.dumps(asdict(record)).encode())
        self.records[step.name] = record
        self.waiting.remove(step)
        left = sum(each.minutes for each in self.waiting)
        end = ", diverged" if diverged else ""
        self.show(f"{step.name}: {seconds / 60:.1f} min{end}; {len(self.waiting)} to go, some {left:.0f} min")

    def log(self, step: Step) -> Path:
        """Return the output of a step."""
        return self.folder / "steps" / f"{step.name}.log"

    def stop(self) -> None:
        """Ask what runs to save and stop, and kill what does not."""
        try:
            for each in self.running:
                self.show(f"stopping {each.step.name}")
                each.process.terminate()
            end = time.monotonic() + SAVE_S
            for each in self.running:
                with suppress(subprocess.TimeoutExpired):
                    each.process.wait(max(end - time.monotonic(), 0.0))
        finally:
            for each in self.running:
                with suppress(ProcessLookupError):
                    os.killpg(each.process.pid, signal.SIGKILL)


def is_complete(step: Step, result: Path) -> bool:
    """True unless a training run has logged fewer steps than its command asks for."""
    total = next((word for word in step.words if word.startswith("train.steps=")), "")
    if step.words[:2] != ("mlm", "pretrain") or not total:
        return True
    read_metrics.cache_clear()
    logged = read_metrics(result).get("step", [])
    return bool(logged) and logged[-1]["step"] >= int(total.removeprefix("train.steps="))


def last_line(log: Path) -> str:
    """Return the last line of a step's output."""
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def shell_lines(stages: Stages, done: Container[str]) -> Iterator[str]:
    """Yield the steps as command lines, finished ones marked."""
    for stage in stages:
        for step in stage:
            mark = "  # done" if step.name in done else ""
            yield f"{shlex.join(step.words)}{mark}"
