"""The command `mlm report`, and the checks of its settings."""

from pathlib import Path

from mlm.cli.command import Command
from mlm.config.tree import out_of_range
from mlm.tracking.config import ReportConfig, choose_runs
from mlm.util.errors import Problem
from mlm.util.results import folder_problem, is_stream

MAX_RUNS = 20  # whose curves a reader can tell apart


def check_report(config: ReportConfig) -> list[Problem]:
    fix = "name a run folder: mlm report runs/shakespeare"
    problems = [] if config.runs else [Problem(("runs",), "runs=[]: no run", fix)]
    out, is_streamed = Path(config.out), is_stream(config.out)
    if is_streamed and config.watch:
        fix = "name a file, such as out=report.html"
        problems.append(Problem(("out", "watch"), f"out={config.out}: watch=true writes the page again", fix))
    # a folder in its place is found by the check of paths
    elif not (is_streamed or out.is_dir() or out.suffix in (".html", ".htm")):
        fix = f"use a file that ends in .html, such as out={out.with_suffix('.html')}"
        problems.append(Problem.at("out", config.out, "a page ends in .html", fix))
    problems += filter(None, [folder_problem(config.out)])
    outside = out_of_range(config)
    return [problem for problem in problems if not problem.concerns(outside)]


def preflight(config: ReportConfig) -> list[Problem]:
    runs, _, problems = choose_runs(config.runs)
    if len(runs) > MAX_RUNS:
        fix = "choose some, or write several pages"
        problems.append(Problem(("runs",), f"runs: {len(runs)} runs; {MAX_RUNS} is the limit", fix))
    return problems


COMMANDS = (
    Command(
        name="report",
        other_names=("dashboard", "plot", "tensorboard"),
        spec=ReportConfig,
        target="mlm.tracking.page.report:run",
        local_check=check_report,
        preflight="mlm.cli.report:preflight",
        positional=("runs",),
        takes_list=True,
        summary="show runs on one page for a browser: curves, settings, incidents, scores",
        about="""Writes one HTML page that opens from disk and loads nothing: loss, validation, gradient norm,
            learning rate, throughput and memory over steps, tokens or time, runs overlaid; the settings in
            which they differ; samples and loads of experts; incidents, checkpoints and scores with their
            receipts. Reads run folders and changes nothing in them.""",
        examples="""
            # One run
            mlm report runs/shakespeare
            # Two runs compared
            mlm report runs/shakespeare runs/longer out=compared.html
            # While a run goes on, from another terminal
            mlm report runs/shakespeare watch=true
        """,
    ),
)
