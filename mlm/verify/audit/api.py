"""`mlm audit` and `mlm.audit`: run a subject on a layout and on one process, and say where they part."""

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
    layout that parts from one process, or of the layout. Raises UserError for a subject that cannot be
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
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # its ranks fork, which threads do not survive
        try:
            return pool.submit(outcomes_of, config).result()[0]
        except BrokenProcessPool as error:
            fix = "guard calls of mlm.audit by __name__ == '__main__'"
            raise UserError(f"the process that audits {name} ended", fix=fix) from error


def outcomes_of(config: AuditConfig) -> list[Outcome]:
    """The audit of a process of its own."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)  # before the user's code computes
    return audit_layouts(load_build(config.build), config)


def preflight(config: AuditConfig) -> list[Problem]:
    return [*filter(None, [folder_problem(config.out)])]


def run(config: AuditConfig) -> None:
    """Audit, print and write. Raises CheckFailedError where the layout parts from one process."""
    outcomes = outcomes_of(config)
    first, screen, shown = outcomes[0], console(), table("audit against one process", *COLUMNS)
    for outcome in outcomes:
        add_row(shown, *row_of(outcome))
    screen.print(shown)
    for line in first.skipped[:5]:
        screen.print(f"not compared: {line}")
    if config.out is not None:
        write_result(config.out, content(config, outcomes))
    if first.finding is not None:
        raise CheckFailedError(first.sentence)
    screen.print(first.sentence)


COLUMNS = ("layout", "finding", "first at", "what parts", "tensors that differ#")


def row_of(outcome: Outcome) -> list[str]:
    found = outcome.finding
    verdict = ["alike", "", ""] if found is None else [found.cause, found.place, found.kind]
    return [outcome.described, *verdict, f"{outcome.wrong} of {outcome.compared}"]


def content(config: AuditConfig, outcomes: Sequence[Outcome]) -> bytes | dict[str, object]:
    """The report as a page for .html, else as JSON."""
    first = outcomes[0]
    if str(config.out).endswith(".html"):
        headings = [column.removesuffix("#") for column in COLUMNS]
        sections = [
            ("verdict", "Verdict", paragraph(first.sentence)),
            ("layouts", "Layouts", html_table(headings, map(row_of, outcomes))),
            ("skipped", "Not compared", html_table(["reason"], [[line] for line in first.skipped])),
        ]
        return page(f"Audit of {config.build}", sections)
    return {
        "task": "audit",
        "equal": first.finding is None,
        "verdict": first.sentence,
        "layouts": replace_nonfinite([asdict(outcome) for outcome in outcomes]),
    }
