"""`mlm audit` and `mlm.audit`: run a subject on a layout and on one process, report the first difference."""

import inspect
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context

import torch

from mlm.tracking.history import replace_nonfinite
from mlm.tracking.page.html import page, paragraph
from mlm.tracking.page.html import table as html_table
from mlm.util.errors import CheckFailedError, Problem, UserError
from mlm.util.results import folder_problem, write_result
from mlm.util.terminal import add_row, console, table
from mlm.verify.audit.host import IMPORTING, Outcome, audit_layouts, load_build
from mlm.verify.audit.record import AuditSubject
from mlm.verify.config import AuditConfig


def audit(
    build: str | Callable[..., AuditSubject],
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    steps: int = 2,
    timeout_s: float = 60.0,
) -> Outcome:
    """Run `build(mesh)` on tp * cp * dp * pp processes of this host and on one, and compare: `mlm audit`.

    `build` is a function of a module, or its name FILE.py:FUNCTION. Returns the outcome of the smallest
    layout that differs from one process, or of the layout. Raises UserError for a subject that cannot be
    judged: one that needs CUDA, is not deterministic, changes its batch or fails on one process.
    """
    name = build if isinstance(build, str) else "<"
    if inspect.isfunction(build):
        name = f"{inspect.getsourcefile(build)}:{build.__qualname__}"
    if "<" in name:
        raise UserError(f"build={build}: no function of a module; move it out of what holds it")
    if IMPORTING in os.environ:
        raise UserError("mlm.audit is called where its file is imported; guard it by __name__ == '__main__'")
    config = AuditConfig(build=name, tp=tp, pp=pp, dp=dp, cp=cp, steps=steps, timeout_s=timeout_s)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # forking needs a process without threads
        try:
            return pool.submit(outcomes_of, config).result()[0]
        except BrokenProcessPool as error:
            fix = "guard calls of mlm.audit by __name__ == '__main__'"
            raise UserError(f"the process that audits {name} ended", fix=fix) from error


def outcomes_of(config: AuditConfig) -> list[Outcome]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)  # before user code runs
    return audit_layouts(load_build(config.build), config)


def preflight(config: AuditConfig) -> list[Problem]:
    return [*filter(None, [folder_problem(config.out)])]


def run(config: AuditConfig) -> None:
    """Audit, print and write. Raises CheckFailedError if the layout differs from one process."""
    outcomes = outcomes_of(config)
    smallest, screen, outcome_table = outcomes[0], console(), table("audit against one process", *COLUMNS)
    for outcome in outcomes:
        add_row(outcome_table, *row_of(outcome))
    screen.print(outcome_table)
    for line in smallest.skipped[:5]:
        screen.print(f"not compared: {line}")
    if config.out is not None:
        write_result(config.out, content(config, outcomes))
    if smallest.finding is not None:
        raise CheckFailedError(smallest.sentence)
    screen.print(smallest.sentence)


COLUMNS = ("layout", "finding", "first at", "what parts", "tensors that differ#")


def row_of(outcome: Outcome) -> list[str]:
    finding = outcome.finding
    cells = ["alike", "", ""] if finding is None else [finding.cause, finding.place, finding.kind]
    return [outcome.described, *cells, f"{outcome.wrong} of {outcome.compared}"]


def content(config: AuditConfig, outcomes: Sequence[Outcome]) -> bytes | dict[str, object]:
    """The report as a page for .html, else as JSON."""
    smallest = outcomes[0]
    if str(config.out).endswith(".html"):
        headings = [column.removesuffix("#") for column in COLUMNS]
        sections = [
            ("verdict", "Verdict", paragraph(smallest.sentence)),
            ("layouts", "Layouts", html_table(headings, map(row_of, outcomes))),
            ("skipped", "Not compared", html_table(["reason"], [[line] for line in smallest.skipped])),
        ]
        return page(f"Audit of {config.build}", sections)
    return {
        "task": "audit",
        "equal": smallest.finding is None,
        "verdict": smallest.sentence,
        "layouts": replace_nonfinite([asdict(outcome) for outcome in outcomes]),
    }
