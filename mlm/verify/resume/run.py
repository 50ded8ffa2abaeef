"""`mlm verify-resume`: does a killed run resume as if nothing had happened?"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import mlm
from mlm.checkpoint.native.compare import compare_checkpoints, compared_bytes
from mlm.checkpoint.native.folders import step_name
from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.config.build import to_dict
from mlm.launch.start import launch_facts
from mlm.parallel.config import ParallelConfig
from mlm.tracking.history import FILE_NAME, finite
from mlm.training.corpora import corpus_problems
from mlm.training.run_tokenizer import tokenizer_of
from mlm.training.state import CHECKPOINTS, is_weights_only
from mlm.util.atomic import parse_json, read_bounded, write_atomic
from mlm.util.errors import CheckFailedError, UserError, writing_to
from mlm.util.lock import LOCK, sole_writer
from mlm.util.ownership import MARKER, claim_folder, delete_owned
from mlm.util.terminal import Screen, progress_bar
from mlm.verify.parity.config import comparable
from mlm.verify.parity.verdict import Verdict
from mlm.verify.resume.checks import problems_here, same_layout
from mlm.verify.resume.config import KillPlan, VerifyResumeConfig
from mlm.verify.resume.rehearsal import FILES, RESUMED, STRAIGHT, Kill, Rehearsal, Show
from mlm.verify.resume.verdict import (
    FIELDS,
    Allowed,
    Runs,
    allowed,
    beyond,
    judge,
    read_starts,
    read_steps,
    step_difference,
)

TASK = "verify-resume"
RESULT = f"{TASK}.json"
OURS = {RESULT, STRAIGHT, RESUMED, *FILES, LOCK, MARKER}
"""Names allowed in `out`."""
MAX_RESULT = 1 << 28  # bytes of an earlier result that is looked at
LISTED = 24
"""Steps up to which the table shows all; of more, those around the kill and the last."""


def preflight(config: VerifyResumeConfig) -> list[str]:
    """Problems that this host and the named files show; called before anything starts."""
    try:
        facts = launch_facts(config.dist)
    except UserError as error:
        return list(error.problems)
    if facts.joined:
        return ["runs here are killed and started again, on one host: start this plainly, not as a rank"]
    if found := problems_here(config, local_devices=facts.local_devices):
        return list(found)
    run = comparable(config)
    problems = [*corpus_problems(run), *out_problems(Path(config.out))]
    try:
        first_step(config)
        tokenizer_of(run.data)
    except UserError as error:
        problems += error.problems
    return problems


def out_problems(out: Path) -> list[str]:
    """Problems of replacing `out`: it holds something else than an earlier verify-resume."""
    try:
        names = set(os.listdir(out)) - {LOCK, MARKER} if os.path.lexists(out) else set()
        foreign = {name for name in names if name not in OURS and not _is_partial(name)}
        if names and not foreign and parse_json(read_bounded(out / RESULT, MAX_RESULT, ""))["task"] != TASK:
            foreign = names
    except NotADirectoryError:
        return [f"out={out}: is a file; name a folder that is new, or of an earlier {TASK}"]
    except (OSError, ValueError, TypeError, KeyError):
        foreign = names
    if not foreign:
        return []
    return [
        f"out={out}: holds {min(foreign)}, which is not of an earlier {TASK}: name another folder, as this "
        "one is emptied first"
    ]


def _is_partial(name: str) -> bool:
    """True for a file that a kill left half written (write_atomic)."""
    return name.endswith(".partial") and any(name.startswith(f".{ours}.") for ours in OURS)


def first_step(config: VerifyResumeConfig) -> int:
    """Steps done where both runs begin. Raises UserError if the checkpoint of `ckpt` cannot be read."""
    if config.ckpt is None:
        return 0
    manifest = read_manifest(resolve(config.ckpt))
    return 0 if is_weights_only(manifest) else manifest.step


def run(config: VerifyResumeConfig) -> None:
    """Run, kill, resume and compare; writes out/verify-resume.json. Raises CheckFailedError if not equal."""
    out, plan = Path(config.out), config.plan(first_step(config))
    with writing_to(config.out):
        claim(out)
    with writing_to(config.out), sole_writer(out, wait_s=0.0):
        empty(out)
        with progress() as show:
            rehearsal = Rehearsal(config, plan, show)
            rehearsal.run_straight()
            kill = rehearsal.run_killed()
            rehearsal.run_resumed()
        runs = collect(out, plan)
        devices = launch_facts(config.dist).local_devices
        may = allowed(config.precision.dtype, same_layout=same_layout(config, local_devices=devices))
        verdict = judge(runs, may)
        write_atomic(out / RESULT, result_json(config, runs, kill, may, verdict).encode())
    report(config, runs, kill, may, verdict)
    if not verdict.equal:
        raise CheckFailedError(f"{headline(may, verdict)} ({out / RESULT})")


def claim(out: Path) -> None:
    """Mark the folder as this command's. Raises UserError where anything else is there, OSError."""
    if problems := out_problems(out):
        raise UserError(problems[0])
    claim_folder(out, TASK)


def empty(out: Path) -> None:
    """Remove what an earlier check left in `out`."""
    delete_owned(out, TASK, names=(STRAIGHT, RESUMED, *FILES), keep_folder=True)
    write_atomic(out / RESULT, json.dumps({"task": TASK, "equal": None}).encode())


@contextmanager
def progress() -> Iterator[Show]:
    """A progress bar of the run under way, with an ETA, on a terminal; yields what moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Screen(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[what] = bar.add_task(f"{what} ({len(tasks) + 1} of 3)", total=total)
            bar.update(tasks[what], completed=done)

        yield show


def collect(out: Path, plan: KillPlan) -> Runs:
    """Read the records of both runs. Raises UserError for unreadable checkpoints, OSError for metrics."""
    first, second = (out / name / CHECKPOINTS / step_name(plan.last) for name in (STRAIGHT, RESUMED))
    count = compared_bytes(read_manifest(first), read_manifest(second))
    with progress_bar("comparing the last checkpoints", count, in_bytes=True) as advance:
        final = compare_checkpoints(first, second, advance)
    return Runs(
        plan,
        read_steps(out / STRAIGHT / FILE_NAME),
        read_steps(out / RESUMED / FILE_NAME),
        read_starts(out / RESUMED / FILE_NAME),
        final,
    )


def result_json(config: VerifyResumeConfig, runs: Runs, kill: Kill, may: Allowed, verdict: Verdict) -> str:
    """Everything compared, with the configuration. Numbers that are not finite are null."""
    sides = {STRAIGHT: runs.straight, RESUMED: runs.resumed}
    state = {STRAIGHT: runs.final.first.state, RESUMED: runs.final.second.state}
    result = {
        "task": TASK,
        "equal": verdict.equal,
        "verdict": headline(may, verdict),
        "hint": verdict.hint,
        "layout": {"first_half": asdict(config.parallel), "second_half": asdict(config.resumed_parallel())},
        "tolerance": None if may.tolerance is None else asdict(may.tolerance),
        "plan": asdict(runs.plan),
        "kill": asdict(kill),
        "starts_of_the_resumed_run": list(runs.starts),
        "steps": [
            {"step": step}
            | {name: {key: side[step][key] for key in FIELDS} for name, side in sides.items() if step in side}
            for step in range(runs.plan.first + 1, runs.plan.last + 1)
        ],
        "counters": {
            name: {key: value for key, value in counters.items() if key not in ("config", "versions")}
            for name, counters in state.items()
        },
        "tensors": {
            "compared": len(runs.final.tensors),
            "elements": sum(tensor.elements for tensor in runs.final.tensors),
            "differing": [asdict(tensor) for tensor in runs.final.differing],
            "beyond_tolerance": [tensor.name for tensor in beyond(runs, may)],
            "only_straight": list(runs.final.only_first),
            "only_resumed": list(runs.final.only_second),
        },
        "config": to_dict(config),
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
    }
    return json.dumps(finite(result), indent=2, allow_nan=False) + "\n"


def headline(may: Allowed, verdict: Verdict) -> str:
    """`EQUAL bit for bit: …`."""
    how = "" if not verdict.equal else " bit for bit" if may.tolerance is None else f" to {rounding(may)}"
    return f"{verdict.word}{how}: {verdict.sentence}"


def rounding(may: Allowed) -> str:
    """The tolerance in words."""
    assert may.tolerance is not None
    return (
        f"the rounding of {may.precision} (losses {may.tolerance.loss:g}, weights {may.tolerance.weight:g} "
        f"of the learning rates added up, moments {may.tolerance.later:g} of the largest)"
    )


def report(config: VerifyResumeConfig, runs: Runs, kill: Kill, may: Allowed, verdict: Verdict) -> None:
    """Print the table and the verdict."""
    model, plan = config.model, runs.plan
    console = Screen(highlight=False, soft_wrap=True)
    halves = [words_of(parallel) for parallel in (config.parallel, config.resumed_parallel())]
    tries = f" (try {kill.tries}: the runs before were over too soon)" if kill.tries > 1 else ""
    console.print(
        f"{model.kind} {model.num_parameters() / 1e6:,.1f}M, {config.precision.dtype}, {halves[0]}\n"
        f"killed {kill.after_s:.3f} s after the checkpoint of step {plan.kill} was there, with step "
        f"{kill.step} of {plan.last} reported{tries}\n"
        f"resumed at step {runs.starts[-1] if runs.starts else '?'}, {halves[1]}"
    )
    console.print(_table(runs))
    if verdict.equal:  # else the error that ends the command reports it
        console.print(f"[bold green]{verdict.word}[/]{headline(may, verdict).removeprefix(verdict.word)}")
    if verdict.hint:
        console.print(f"[bold]hint[/]: {verdict.hint}")
    console.print(f"written to {Path(config.out, RESULT)}")


def words_of(parallel: ParallelConfig) -> str:
    """`tp=2 pp=1 zero=2`: sizes, and what else is not as on one process."""
    plain, chosen = asdict(ParallelConfig()), asdict(parallel)
    kept = {key: value for key, value in chosen.items() if key in ("tp", "pp") or value != plain[key]}
    return " ".join(f"{key}={str(value).lower()}" for key, value in kept.items())


def _table(runs: Runs) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "loss straight", "loss resumed", "difference"):
        table.add_column(name, justify="right", overflow="fold")
    plan = runs.plan
    steps = list(range(plan.first + 1, plan.last + 1))
    if len(steps) > LISTED:
        near = range(plan.kill - LISTED // 4, plan.kill + LISTED // 2)
        steps = [step for step in steps if step in near or step == plan.last]
    for step in steps:
        by = step_difference(runs, step)
        losses = [_loss(side.get(step, {}).get("loss")) for side in (runs.straight, runs.resumed)]
        table.add_row(str(step), *losses, "" if by is None else "0" if by == 0 else f"{by:.1e}")
        if step == plan.kill:
            table.add_section()
    return table


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.10f}"
