"""`mlm audit` and `mlm.audit`: run a subject on a layout and on one process, and say where they part."""

import inspect
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table

from mlm.launch.child_run import child_run
from mlm.tracking.history import replace_nonfinite
from mlm.tracking.page.html import page, paragraph
from mlm.tracking.page.html import table as html_table
from mlm.util.errors import CheckFailedError, UserError
from mlm.util.results import folder_problem, result_problems, write_result
from mlm.util.terminal import add_row, console, table
from mlm.verify.audit.diagnose import Finding
from mlm.verify.audit.host import IMPORTING, Outcome, audit_layouts, load_build
from mlm.verify.audit.record import AuditSubject
from mlm.verify.config import AuditConfig


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
    timeout_s: float = 60.0,
) -> AuditReport:
    """Run `build(mesh)` on tp * cp * dp * pp processes of this host and on one, and compare: `mlm audit`.

    `build` is a function of a module, or its name FILE.py:FUNCTION. Raises UserError for a subject that
    cannot be judged: one that needs CUDA, is not deterministic, changes its batch or fails on one process.
    """
    name = build if isinstance(build, str) else "<"
    if inspect.isfunction(build):
        name = f"{inspect.getsourcefile(build)}:{build.__qualname__}"
    if "<" in name:
        raise UserError(f"build={build}: no function of a module; move it out of what holds it")
    if IMPORTING in os.environ:
        raise UserError("mlm.audit is called where its file is imported; guard it by __name__ == '__main__'")
    keys = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "steps": steps, "timeout_s": timeout_s}
    with TemporaryDirectory(prefix="mlm-audit-") as folder:
        out, log = Path(folder, "audit.json"), Path(folder, "log")
        words = ["audit", name, f"out={out}", *(f"{key}={value}" for key, value in keys.items())]
        with child_run(words, log) as process:
            process.wait()
        if out.exists():
            return AuditReport(tuple(map(outcome_of, json.loads(out.read_text())["layouts"])))
        line = log.read_text(errors="replace").rstrip().rpartition("\n")[2].removeprefix("mlm audit: ")
    kind = UserError if process.returncode == UserError.exit_code else CheckFailedError
    raise kind(line or f"the audit of {name} ended with {process.returncode}")


def outcome_of(fields: dict[str, Any]) -> Outcome:
    """Read an outcome back from a report's JSON, where infinity is null."""
    found = fields["finding"]
    finding = found and Finding(**found | {"size": math.inf if found["size"] is None else found["size"]})
    return Outcome(**fields | {"finding": finding, "skipped": tuple(fields["skipped"])})


def preflight(config: AuditConfig) -> list[str]:
    """Problems of the file for the report; called before anything runs."""
    problem = folder_problem(config.out)
    return [problem] if problem else result_problems(config.out)


def run(config: AuditConfig) -> None:
    """Audit, print and write. Raises CheckFailedError where the layout parts from one process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)  # before the user's code computes: threads do not outlive a fork
    report = AuditReport(tuple(audit_layouts(load_build(config.build), config)))
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
