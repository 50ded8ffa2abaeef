"""The jobs of a sweep: which ran, how each ended, and their table at the end."""

import os
from collections.abc import Callable

from mlm.config.cli.commands import Command, resolve
from mlm.config.cli.reporting import FAILED, OK
from mlm.config.cli.run import Job
from mlm.launch.environment import read_place
from mlm.launch.typed import origin

REPORT = "mlm.tracking.sweep"


class Sweep:
    """Runs the jobs of a sweep of training runs until one is stopped, and reports them as a table.

    Jobs of other commands run as they are: each has its own result.
    """

    def __init__(self, command: Command) -> None:
        self.has_table = command.out_is_run_folder
        self.runs: list[dict[str, object]] = []
        self.is_stopped = False

    def run(self, job: Job, work: Callable[[], int]) -> int:
        """Run a job and note how it ended; return its exit code. After one that was stopped none is run."""
        if self.is_stopped:
            self._note(job, None)
            return OK
        if job.dry is not None:
            return work()
        code = FAILED
        try:
            code = work()
        finally:
            self._note(job, code)
        return code

    def _note(self, job: Job, code: int | None) -> None:
        if not self.has_table:
            return
        settings = resolve(f"{REPORT}:settings_of")(job.varied)
        run = resolve(f"{REPORT}:run_of")(settings, next(iter(job.outs), None), code)
        self.runs.append(run)
        if read_place(os.environ) is None:  # the ranks of a launcher might disagree on what files say
            self.is_stopped |= run["state"] in ("stopped", "interrupted")

    def report(self) -> None:
        """Print and write the table, on the first rank."""
        if not self.runs:
            return
        place = read_place(os.environ)
        if place is None or place.rank == 0:
            resolve(f"{REPORT}:report_sweep")(self.runs, origin().get("command", []))
