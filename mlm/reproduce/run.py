"""`mlm reproduce`: list the experiments, or run what is left of one and write its report."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from mlm.launch.stop import Stopped, requests_raised
from mlm.reproduce.catalogue import EXPERIMENTS
from mlm.reproduce.cluster import with_places
from mlm.reproduce.conclusion import Conclusion
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.corpus import with_corpus
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.page import shown
from mlm.reproduce.preflight import ALL, KIND
from mlm.reproduce.records import STEPS, read_records
from mlm.reproduce.report import write_report
from mlm.reproduce.results import Results
from mlm.reproduce.runner import Runner, Tell
from mlm.util.errors import UserError, writing_to
from mlm.util.lock import Lock
from mlm.util.ownership import claim_folder
from mlm.util.terminal import LINE_S, Screen, add_row, console, table

LOCK = ".lock"


def run(config: ReproduceConfig) -> int:
    """List the experiments, or run those named; return the exit code.

    Raises UserError, CheckFailedError, CorruptFileError.
    """
    if config.name is None:
        show_experiments(EXPERIMENTS)
        return 0
    chosen = [each for each in EXPERIMENTS if config.name in (each.name, ALL)]
    with writing_to(config.out):
        folder = claim_folder(config.out, KIND)
        (folder / STEPS).mkdir(exist_ok=True)
        lock = Lock(folder / LOCK)
        is_ours = lock.take()
    if not is_ours:
        raise UserError(
            f"out={config.out}: {lock.holder()} runs experiments there; wait, or name another out"
        )
    try:
        lock.sign()
        with requests_raised():
            for experiment in chosen:
                reproduce(experiment, config, folder)
    except Stopped as stopped:
        return stopped.exit_code
    finally:
        lock.release()
    return 0


def reproduce(experiment: Experiment, config: ReproduceConfig, folder: Path) -> None:
    """Run what is left of an experiment, then write and show what it says."""
    screen = console()
    steps = steps_of(experiment, config)
    records = read_records(folder, steps)
    runner = Runner(folder, steps, records, config.cores or len(os.sched_getaffinity(0)))
    if runner.waiting:
        left = runner.minutes - runner.minutes_done()
        screen.print(
            f"{experiment.name}: {len(runner.waiting)} of {len(steps)} steps to run, some {left:.0f} minutes"
        )
        with progress(experiment.name, runner.minutes) as tell:
            runner.run(tell, screen.print)
    results = Results(config, steps, records)
    found = experiment.conclude(results)
    conclusion = replace(found, commands=with_places(experiment.name, found.commands))
    page = write_report(experiment, conclusion, results)
    show_conclusion(experiment, conclusion, page)


def steps_of(experiment: Experiment, config: ReproduceConfig) -> list[Step]:
    """Return the steps of an experiment, each once, after those of the corpora that they read."""
    steps = list({step.name: step for step in experiment.steps(config)}.values())
    return with_corpus(config, steps)


@contextmanager
def progress(name: str, minutes: float) -> Iterator[Tell]:
    """Show a bar with what runs and the time left on stderr; in a log a line each minute."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    screen = Screen(stderr=True)
    begun = printed = time.monotonic()
    before: float | None = None
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(name, total=minutes)

        def tell(done: float, running: Sequence[str]) -> None:
            nonlocal printed, before
            before = done if before is None else before
            bar.update(task, completed=done, description=", ".join(running) or name)
            now = time.monotonic()
            if screen.is_terminal or now - printed < LINE_S:
                return
            printed = now
            rate = (done - before) / (now - begun)
            left = f", some {(minutes - done) / rate / 60:.0f} minutes left" if rate > 0 else ""
            screen.print(
                Text(f"{name}: {100 * done / max(minutes, 1e-9):.0f} % done ({', '.join(running)}){left}"),
                soft_wrap=True,
            )

        yield tell


def show_experiments(experiments: Sequence[Experiment]) -> None:
    """Print the experiments."""
    made = table("Experiments", "name", "paper", "what is shown", "minutes here#")
    for each in experiments:
        add_row(made, each.name, each.source, each.title, f"{each.minutes:g}")
    screen = console()
    screen.print(made)
    screen.print(
        "mlm reproduce NAME runs one; scale=paper prints its commands for a cluster, with the plan's cost"
    )


def show_conclusion(experiment: Experiment, conclusion: Conclusion, page: Path) -> None:
    """Print what an experiment shows, in short."""
    screen = console()
    for found in conclusion.tables:
        made = table(found.title, *found.headings)
        for row in found.rows:
            add_row(made, *map(shown, row))
        screen.print(made)
        if found.note:
            screen.print(found.note)
    for what, line in conclusion.commands:
        screen.print(f"# {what}\n{line}")
    screen.print(f"The paper: {experiment.claim}")
    screen.print(f"Seen here: {conclusion.seen}")
    screen.print(f"{experiment.name}: {conclusion.verdict.value}; its page: {page}")
