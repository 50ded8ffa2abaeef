"""Runs what is left of an experiment's steps: several beside each other where each keeps few cores busy."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlm.launch.child_run import failure_of, kill, started
from mlm.reproduce.experiment import ALL_CORES, Step
from mlm.reproduce.host import hardware_here, versions_here
from mlm.reproduce.logged import last_step, steps_of
from mlm.reproduce.records import log_path, remember
from mlm.reproduce.results import Record
from mlm.tracking.history import FILE_NAME
from mlm.util.errors import CheckFailedError, UserError, writing_to

POLL_S = 0.5
SAVE_S = 120.0
"""Seconds in which a run that is asked to stop must have saved; later it is killed, and resumes earlier."""
KILLED = 128
"""Exit codes from here on name the signal that ended a command."""
PROGRAMS = {
    "mlm": (sys.executable, "-P", "-m", "mlm"),
    "python": (sys.executable, "-P"),
}

Tell = Callable[[float, Sequence[str]], None]
"""tell(minutes' worth of steps done, what runs)."""


@dataclass
class Running:
    """A step's process."""

    step: Step
    process: "subprocess.Popen[bytes]"
    since: float


class Runner:
    """The steps that are not done yet.

    Args:
        folder: of `mlm reproduce`, in which all commands run.
        steps: all steps of the experiments.
        records: of those that are done; those that end are added.
        cores: that steps share.
    """

    def __init__(self, folder: Path, steps: Sequence[Step], records: dict[str, Record], cores: int) -> None:
        self.folder, self.steps, self.records, self.cores = folder, steps, records, cores
        self.waiting = [step for step in steps if step.name not in records]
        self.running = list[Running]()

    def run(self, tell: Tell, say: Callable[[str], None]) -> None:
        """Run them to their ends. Raises UserError, CheckFailedError if one fails.

        Whatever ends this, running steps are asked to save and stop, and continue at the next call.
        """
        try:
            while self.waiting or self.running:
                while (step := self.next_step()) is not None:
                    self.waiting.remove(step)
                    self.start(step)
                time.sleep(POLL_S)
                for each in [each for each in self.running if each.process.poll() is not None]:
                    self.running.remove(each)
                    say(self.finish(each))
                tell(self.minutes_done(), [each.step.name for each in self.running])
        finally:
            if self.running:
                names = ", ".join(each.step.name for each in self.running)
                say(f"stopping {names}; training runs save first")
            self.stop()

    def next_step(self) -> Step | None:
        """Return a waiting step that can start now."""
        free = self.cores - sum(self.cores_of(each.step) for each in self.running)
        for step in self.waiting:
            ready = all(name in self.records for name in step.needs)
            if ready and self.cores_of(step) <= free:
                return step
            if ready and step.cores == ALL_CORES:
                return None  # it waits for the machine; later ones would keep it busy
        return None

    def cores_of(self, step: Step) -> int:
        """Return the cores that a step takes of those that are shared."""
        return self.cores if step.cores == ALL_CORES else min(step.cores, self.cores)

    def start(self, step: Step) -> None:
        """Start a step; a run continues from its last checkpoint. Raises UserError."""
        program, *rest = step.words
        log = log_path(self.folder, step.name)
        with writing_to(str(self.folder)):
            (self.folder / step.result).parent.mkdir(parents=True, exist_ok=True)
            log.touch()
        try:
            process = started([*PROGRAMS.get(program, (program,)), *rest], log, self.folder)
        except OSError as error:
            raise UserError(
                f"step {step.name}: {program}: {error.strerror}; install it, or choose other settings"
            ) from error
        self.running.append(Running(step, process, time.monotonic()))

    def finish(self, running: Running) -> str:
        """Remember a step that has ended, and return a line on it. Raises its error."""
        step, seconds = running.step, time.monotonic() - running.since
        log = log_path(self.folder, step.name)
        failure = failure_of(running.process, f"step {step.name}", log)
        code = running.process.returncode
        if failure is not None and not is_result(step, code, str(failure)):
            raise type(failure)(f"{failure}. The command: {shlex.join(step.words)}")
        if failure is None and not (self.folder / step.result).exists():
            raise CheckFailedError(f"step {step.name} left no {step.result} (its output: {log})")
        done, total = last_step(self.folder / step.result / FILE_NAME), steps_of(step.words)
        if failure is None and done < total:
            raise CheckFailedError(
                f"step {step.name} was stopped after {done} of {total} steps; the same command continues"
            )
        said = "" if failure is None else str(failure)
        record = Record(step.words, code, round(seconds, 3), said, hardware_here(), versions_here())
        with writing_to(str(self.folder)):
            remember(self.folder, step.name, record)
        self.records[step.name] = record
        return f"{step.name}: {seconds / 60:.1f} min" + (", failed" if failure else "")

    def stop(self) -> None:
        """Ask what runs to save and stop; kill what has not ended in time."""
        for each in self.running:
            each.process.terminate()
        end = time.monotonic() + SAVE_S
        for each in self.running:
            try:
                each.process.wait(max(end - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                pass
            finally:
                kill(each.process)

    @property
    def minutes(self) -> float:
        """Minutes' worth of all steps."""
        return sum(step.minutes for step in self.steps)

    def minutes_done(self) -> float:
        """Minutes' worth of the steps that are done, and of the running ones as far as they tell."""
        done = sum(step.minutes for step in self.steps if step.name in self.records)
        return done + sum(each.step.minutes * self.share(each) for each in self.running)

    def share(self, running: Running) -> float:
        """Return the share of a running step that is done: by its logged steps, or by its time."""
        total = steps_of(running.step.words)
        if total:
            return min(last_step(self.folder / running.step.result / FILE_NAME) / total, 1.0)
        passed = (time.monotonic() - running.since) / 60 / max(running.step.minutes, 0.01)
        return min(passed, 0.95)


def is_result(step: Step, code: int, said: str) -> bool:
    """True if a command ended by no signal, and with an error that the experiment expects."""
    return 0 < code < KILLED and bool(step.may_fail) and re.search(step.may_fail, said) is not None
