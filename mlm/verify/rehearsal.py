"""The three commands of `mlm verify-resume`: a run straight, one that is killed, and the same again."""

import random
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.folders import latest_name, step_name
from mlm.launch.child_run import child_run, command_failure, kill
from mlm.tracking.history import FILE_NAME, read_records
from mlm.training.loop import composed_yaml
from mlm.training.state import CHECKPOINTS
from mlm.util.errors import UserError, show
from mlm.util.files import write_atomic
from mlm.util.ownership import delete_owned
from mlm.util.terminal import progress_bar
from mlm.verify.config import KillPlan, VerifyResumeConfig

TASK = "verify-resume"
STRAIGHT, RESUMED = "straight", "resumed"
FILES = (f"{STRAIGHT}.yaml", f"{RESUMED}.yaml", f"{STRAIGHT}.log", "killed.log", f"{RESUMED}.log")
TRIES = 5
POLL_S = 0.002  # polling period of `latest`: tiny models are quick
SHOW_S = 0.2


@dataclass(frozen=True)
class Kill:
    """End of the second run."""

    after_s: float
    """Seconds after the checkpoint of plan.kill was seen."""
    step: int
    """Last step it had reported."""
    tries: int
    """Number of runs it took: one may be over before it is killed."""


def read_steps(metrics: Path) -> dict[int, dict[str, Any]]:
    """The record of each step in a metrics.jsonl. Raises OSError."""
    return {record["step"]: record for record in read_records(metrics) if record["kind"] == "step"}


class Rehearsal:
    """The runs in their folders below `out`, which is there and holds none of them yet."""

    def __init__(self, config: VerifyResumeConfig, plan: KillPlan) -> None:
        self.plan, self.out = plan, Path(config.out)
        self.layout = [f"{key}={show(value)}" for key, value in config.resumed.chosen.items()]
        for name in (STRAIGHT, RESUMED):
            run = config.training_run(str(self.out / name), plan.last)
            write_atomic(self.out / f"{name}.yaml", composed_yaml(run, "pretrain").encode())

    def run_straight(self) -> None:
        """All steps, undisturbed. Raises UserError with the run's own last line if it fails."""
        self._run_to_end("straight run", STRAIGHT, [])

    def run_killed(self) -> Kill:
        """Run up to a random instant between the two checkpoints, then SIGKILL.

        Raises UserError if the run fails, or is always over before it can be killed.
        """
        window_s, log = self._between_checkpoints_s(), self.out / "killed.log"
        for tries in range(1, TRIES + 1):
            delete_owned(self.out, TASK, names=(RESUMED,), keep_folder=True)
            delay_s = random.uniform(0.0, window_s) * 0.5 ** (tries - 1)  # each try is killed earlier
            with child_run(self._words(RESUMED), log) as process:
                self._wait("run to be killed", RESUMED, process, POLL_S, self._is_saved)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(delay_s)
                if process.poll() is not None and (
                    failure := command_failure(process, "the run to be killed", log)
                ):
                    raise failure
                kill(process)
            if process.returncode and self._latest(RESUMED) == step_name(self.plan.kill):
                steps = read_steps(self.out / RESUMED / FILE_NAME)
                return Kill(delay_s, max(steps, default=self.plan.first), tries)
        k = self.plan.last - self.plan.kill
        raise UserError(
            f"steps={k}: {TRIES} runs were over before they could be killed after step {self.plan.kill}; "
            f"use more, such as steps={4 * k}"
        )

    def run_resumed(self) -> None:
        """The killed command again, at its other layout if there is one. Raises UserError if it fails."""
        self._run_to_end("resumed run", RESUMED, self.layout)

    def _run_to_end(self, what: str, name: str, overrides: list[str]) -> None:
        log = self.out / f"{name}.log"
        with child_run([*self._words(name), *overrides], log) as process:
            self._wait(what, name, process, SHOW_S / 2, lambda: False)
        if failure := command_failure(process, f"the {what}", log):
            raise failure
        if self._latest(name) != step_name(self.plan.last):
            raise UserError(f"the {what} was stopped before step {self.plan.last} (its output: {log})")

    def _wait(
        self,
        what: str,
        name: str,
        process: "subprocess.Popen[bytes]",
        poll_s: float,
        until: Callable[[], bool],
    ) -> None:
        """Until the process has ended or `until` holds; meanwhile show its progress."""
        metrics, shown, done = self.out / name / FILE_NAME, 0.0, self.plan.first
        with progress_bar(what, self.plan.last - self.plan.first) as advance:
            while process.poll() is None and not until():
                if time.monotonic() - shown > SHOW_S and metrics.exists():
                    now = max(done, *read_steps(metrics), 0)
                    advance(now - done)
                    shown, done = time.monotonic(), now
                time.sleep(poll_s)

    def _words(self, name: str) -> list[str]:
        return ["pretrain", f"resume={self.out / name}.yaml", f"out={self.out / name}"]

    def _latest(self, name: str) -> str | None:
        return latest_name(self.out / name / CHECKPOINTS)

    def _is_saved(self) -> bool:
        """True once the checkpoint to resume from, or a later one, is published."""
        return self._latest(RESUMED) in (step_name(self.plan.kill), step_name(self.plan.last))

    def _between_checkpoints_s(self) -> float:
        """Seconds between the two checkpoints of the straight run."""
        records = read_records(self.out / STRAIGHT / FILE_NAME)
        times = {record["step"]: record["time"] for record in records if record["kind"] == "saved"}
        if self.plan.kill not in times:  # its failure was reported there; the run continued
            raise UserError(
                f"the straight run could not save step {self.plan.kill} (its output: "
                f"{self.out / STRAIGHT}.log)"
            )
        return max(0.0, times[self.plan.last] - times[self.plan.kill])
