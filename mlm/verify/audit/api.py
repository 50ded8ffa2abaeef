"""`mlm audit` and `mlm.audit`: run a subject on a layout and on one process, and say where they part."""

import inspect
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from tempfile import TemporaryFile
from typing import Any

from rich.table import Table

from mlm.launch.child_run import environment_without_launcher
from mlm.parallel.layout_checks import MAX_CPU_RANKS
from mlm.tracking.history import replace_nonfinite
from mlm.tracking.page.html import page, paragraph
from mlm.tracking.page.html import table as html_table
from mlm.util.errors import CheckFailedError, UserError
from mlm.util.results import folder_problem, write_result
from mlm.util.system import die_with_parent
from mlm.util.terminal import add_row, console, table
from mlm.verify.audit.host import Outcome
from mlm.verify.audit.subject import AuditSubject
from mlm.verify.config import AuditConfig

HOST = "from mlm.verify.audit.host import main; main()"


@dataclass(frozen=True)
class AuditReport:
    """The outcomes of an audit: that of the layout, then those of its axes alone where it parts."""

    outcomes: tuple[Outcome, ...]

    @property
    def smallest(self) -> Outcome:
        """The outcome of the smallest layout that parts, or of the layout."""
        wrong = [outcome for outcome in self.outcomes if outcome.finding is not None]
        return min(wrong, key=lambda o: sorted(o.layout.values()), default=self.outcomes[0])

    @property
    def equal(self) -> bool:
        """True if the layout trains as one process does."""
        return self.outcomes[0].finding is None

    @property
    def sentence(self) -> str:
        """One line."""
        best = self.smallest
        if best.finding is None:
            return f"ALIKE: {describe(best)} in {best.compared} tensors of one process ({best.precision})"
        found = best.finding
        return f"PARTS at {found.where} with {describe(best)}: {found.cause}: {found.sentence}"


def describe(outcome: Outcome) -> str:
    """`tp=2 dp=2`."""
    return " ".join(f"{a}={n}" for a, n in outcome.layout.items() if n > 1) or "one process"


def audit(
    build: str | Callable[..., AuditSubject],
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    steps: int = 2,
    seed: int = 0,
    timeout_s: float = 60.0,
) -> AuditReport:
    """Run `build(mesh)` on tp * cp * dp * pp processes of this host and on one, and compare.

    `build` is a function of a module, or its name FILE.py:FUNCTION. Raises UserError for a subject that
    cannot be judged: one that needs CUDA, is not deterministic, changes its batch or fails on one process.
    """
    name = build if isinstance(build, str) else f"{inspect.getsourcefile(build)}:{build.__qualname__}"
    if "<" in name:
        raise UserError(
            f"build={name}: a function of a module is needed; move it out of the function that holds it"
        )
    sizes = {"tp": tp, "pp": pp, "dp": dp, "cp": cp}
    if set(sizes.values()) == {1}:
        raise UserError("tp=1 pp=1 dp=1 cp=1 is one process, with nothing to compare; set one, such as tp=2")
    if not 1 <= (ranks := math.prod(sizes.values())) <= MAX_CPU_RANKS:
        typed = " * ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
        raise UserError(
            f"{typed} = {ranks} ranks, but a CPU host runs 1 to {MAX_CPU_RANKS}; use smaller sizes"
        )
    result = run_host({"build": name, **sizes, "steps": steps, "seed": seed, "timeout_s": timeout_s})
    return AuditReport(tuple(map(Outcome.of, result)))


def run_host(job: Mapping[str, object]) -> list[dict[str, Any]]:
    """The outcomes of a job, from a process of its own, which imports the user's code.

    Raises UserError as that process does, and CheckFailedError if it ends without a result.
    """
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with TemporaryFile("w+") as result_file:
        number = str(result_file.fileno())
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", HOST, json.dumps(job), number],
            env=environment_without_launcher(os.environ) | own,
            pass_fds=[result_file.fileno()],
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result_file.seek(0)
        content = result_file.read()
    if not content:
        raise CheckFailedError(
            f"the audit of {job['build']} ended with {process.returncode}; its last lines are above"
        )
    result: dict[str, Any] = json.loads(content)
    if "error" in result:
        raise UserError(result["error"])
    outcomes: list[dict[str, Any]] = result["outcomes"]
    return outcomes


def run(config: AuditConfig) -> None:
    """Audit, print and write. Raises CheckFailedError where the layout parts from one process."""
    if problem := folder_problem(config.out):
        raise UserError(problem)
    parallel = {axis: getattr(config, axis) for axis in ("tp", "pp", "dp", "cp")}
    report = audit(config.build, **parallel, steps=config.steps, seed=config.seed, timeout_s=config.timeout_s)
    screen = console()
    screen.print(table_of(report))
    for line in report.smallest.skipped[:5]:
        screen.print(f"not compared: {line}")
    if config.out is not None:
        write_result(config.out, content(config, report))
    if not report.equal:
        raise CheckFailedError(report.sentence)
    screen.print(report.sentence)


def rows_of(report: AuditReport) -> list[list[str]]:
    """A row for each layout."""
    rows = []
    for outcome in report.outcomes:
        found = outcome.finding
        verdict = ["alike", "", ""] if found is None else [found.cause, found.place, found.kind]
        rows.append(
            [describe(outcome), *verdict, f"{outcome.wrong} of {outcome.compared}", f"{outcome.seconds:.1f}"]
        )
    return rows


COLUMNS = ("layout", "finding", "first at", "what parts", "tensors that differ#", "seconds#")


def table_of(report: AuditReport) -> Table:
    """The table of layouts."""
    shown = table("audit against one process", *COLUMNS)
    for row in rows_of(report):
        add_row(shown, *row)
    return shown


def content(config: AuditConfig, report: AuditReport) -> bytes | dict[str, object]:
    """The report as a page for .html, else as JSON."""
    if str(config.out).endswith(".html"):
        headings = [column.removesuffix("#") for column in COLUMNS]
        skipped = [[line] for line in report.smallest.skipped]
        sections = [
            ("verdict", "Verdict", paragraph(report.sentence)),
            ("layouts", "Layouts", html_table(headings, rows_of(report))),
            ("skipped", "Not compared", html_table(["reason"], skipped)),
        ]
        return page(f"Audit of {config.build}", sections)
    return {
        "task": "audit",
        "equal": report.equal,
        "verdict": report.sentence,
        "layouts": replace_nonfinite([asdict(outcome) for outcome in report.outcomes]),
    }
