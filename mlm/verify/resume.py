"""`mlm verify-resume`: does a killed run resume as if nothing had happened? Every step, then every tensor."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from mlm.checkpoint.native.compare import (
    CheckpointComparison,
    TensorDifference,
    compare_checkpoints,
    compared_bytes,
)
from mlm.checkpoint.native.folders import step_name
from mlm.checkpoint.native.run_state import LINEAGE
from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.launch.start import launch_facts
from mlm.optim.adamw import MOMENTS
from mlm.tracking.history import FILE_NAME, read_records
from mlm.training.corpora import corpus_problems
from mlm.training.run_tokenizer import tokenizer_of
from mlm.training.state import CHECKPOINTS, INCIDENTS, is_weights_only
from mlm.util.errors import CheckFailedError, UserError, writing_to
from mlm.util.lock import single_writer
from mlm.util.ownership import claim_folder, claim_problems, delete_owned
from mlm.util.terminal import add_row, progress_bar, table
from mlm.verify.config import (
    KillPlan,
    VerifyResumeConfig,
    check_halves,
    comparable,
    describe_layout,
    is_same_layout,
)
from mlm.verify.rehearsal import FILES, RESUMED, STRAIGHT, TASK, Kill, Rehearsal, read_steps
from mlm.verify.verdict import FLOOR, TOLERANCES, Tolerance, Verdict, write_and_show

RESULT = f"{TASK}.json"
WRITES = (RESULT, STRAIGHT, RESUMED, *FILES)
"""Names written in `out`."""
LISTED = 24
"""Steps up to which the table shows all; of more, those around the kill and the last."""
FIELDS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "loss_scale": "loss scale",
    "skipped_steps": "count of skipped steps",
    "tokens": "count of consumed tokens",
}
"""Compared fields of each step, and their names in words."""
NO_COUNTERS = ("config", "versions", LINEAGE)
"""Entries of a checkpoint's state that are not counters."""

Records = Mapping[int, Mapping[str, Any]]
"""Step → its record of metrics.jsonl."""
May = Tolerance | None
"""How far the second half may be from the straight run's; None: not by a bit."""


@dataclass(frozen=True)
class Runs:
    """Records of both runs."""

    plan: KillPlan
    straight: Records
    resumed: Records
    """Up to plan.kill of the run that was killed, then of the one that resumed it."""
    starts: tuple[int, ...]
    """Step at which each start of the resumed run began."""
    final: CheckpointComparison
    """Of the checkpoints of the last step, the straight run's first."""

    @property
    def sum_lr(self) -> float:
        """Learning rates of the second half added up: about how far Adam moves a weight."""
        return math.fsum(record["lr"] for step, record in self.straight.items() if step > self.plan.kill)

    def loss_difference(self, step: int) -> float | None:
        """|resumed - straight| of a step's loss; None where one of them is not finite or missing."""
        straight, resumed = (side.get(step, {}).get("loss") for side in (self.straight, self.resumed))
        return None if straight is None or resumed is None else float(abs(resumed - straight))


def preflight(config: VerifyResumeConfig) -> list[str]:
    """Problems that this host and the named files show; called before anything starts."""
    try:
        facts = launch_facts(config.dist)
    except UserError as error:
        return list(error.problems)
    if facts.world_size is not None:
        return ["runs here are killed and started again, on one host: start this plainly, not as a rank"]
    if wrong := check_halves(config, local_devices=facts.local_devices):
        return list(wrong)
    run = comparable(config)
    problems = [*corpus_problems(run), *claim_problems(config.out, TASK, writes=WRITES)]
    try:
        first_step(config)
        tokenizer_of(run.data)
    except UserError as error:
        problems += error.problems
    return problems


def first_step(config: VerifyResumeConfig) -> int:
    """Steps done where both runs begin. Raises UserError if the checkpoint of `ckpt` cannot be read."""
    if config.ckpt is None:
        return 0
    manifest = read_manifest(resolve(config.ckpt))
    return 0 if is_weights_only(manifest) else manifest.step


def run(config: VerifyResumeConfig) -> None:
    """Run, kill, resume and compare; writes out/verify-resume.json. Raises CheckFailedError if not equal."""
    out, plan = Path(config.out), config.plan(first_step(config))
    devices = launch_facts(config.dist).local_devices
    is_same = is_same_layout(config, local_devices=devices)
    may = None if is_same else TOLERANCES[config.precision.dtype]
    with writing_to(config.out):
        claim_folder(out, TASK, writes=WRITES)
    with writing_to(config.out), single_writer(out, wait_s=0.0):
        delete_owned(out, TASK, names=WRITES, keep_folder=True)
        rehearsal = Rehearsal(config, plan)
        rehearsal.run_straight()
        kill = rehearsal.run_killed()
        rehearsal.run_resumed()
        runs = collect(out, plan)
        verdict = judge(runs, may)
        numbers = result(config, runs, kill, may)
        write_and_show(
            out / RESULT, config, verdict, numbers, heading(config, runs, kill), table_of_steps(runs)
        )
    if not verdict.equal:
        raise CheckFailedError(f"{verdict.headline} ({out / RESULT})")


def collect(out: Path, plan: KillPlan) -> Runs:
    """Read the records of both runs. Raises UserError for unreadable checkpoints, OSError for metrics."""
    first, second = (out / name / CHECKPOINTS / step_name(plan.last) for name in (STRAIGHT, RESUMED))
    count = compared_bytes(read_manifest(first), read_manifest(second))
    with progress_bar("comparing the last checkpoints", count, in_bytes=True) as advance:
        final = compare_checkpoints(first, second, advance)
    straight, resumed = (read_steps(out / name / FILE_NAME) for name in (STRAIGHT, RESUMED))
    return Runs(plan, straight, resumed, read_starts(out / RESUMED / FILE_NAME), final)


def read_starts(metrics: Path) -> tuple[int, ...]:
    """Steps done at each start of a run. Raises OSError."""
    return tuple(record["start_step"] for record in read_records(metrics) if record["kind"] == "run")


def result(config: VerifyResumeConfig, runs: Runs, kill: Kill, may: May) -> dict[str, Any]:
    """Everything compared."""
    sides = {STRAIGHT: runs.straight, RESUMED: runs.resumed}
    state = {STRAIGHT: runs.final.first.state, RESUMED: runs.final.second.state}
    return {
        "layout": {"first_half": asdict(config.parallel), "second_half": asdict(config.resumed_parallel())},
        "tolerance": may and asdict(may),
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
    }


def heading(config: VerifyResumeConfig, runs: Runs, kill: Kill) -> str:
    """Return lines on the run, its kill and its resumption."""
    model, plan = config.model, runs.plan
    halves = [describe_layout(parallel) for parallel in (config.parallel, config.resumed_parallel())]
    tries = f" (try {kill.tries}: the runs before were over too soon)" if kill.tries > 1 else ""
    return (
        f"{model.kind} {model.num_parameters() / 1e6:,.1f}M, {config.precision.dtype}, {halves[0]}\n"
        f"killed {kill.after_s:.3f} s after the checkpoint of step {plan.kill} was there, with step "
        f"{kill.step} of {plan.last} reported{tries}\n"
        f"resumed at step {runs.starts[-1] if runs.starts else '?'}, {halves[1]}"
    )


def table_of_steps(runs: Runs) -> Table:
    """Return the losses of both runs; of many steps those around the kill and the last."""
    rows, plan = table("", "step#", "loss straight#", "loss resumed#", "difference#"), runs.plan
    near = range(plan.kill - LISTED // 4, plan.kill + LISTED // 2)
    for step in range(plan.first + 1, plan.last + 1):
        if plan.last - plan.first > LISTED and step not in near and step != plan.last:
            continue
        by = runs.loss_difference(step)
        losses = [side.get(step, {}).get("loss") for side in (runs.straight, runs.resumed)]
        words = ["not finite" if loss is None else f"{loss:.10f}" for loss in losses]
        add_row(rows, step, *words, "" if by is None else "0" if by == 0 else f"{by:.1e}")
        if step == plan.kill:
            rows.add_section()
    return rows


def kind_of(name: str) -> str:
    """`model`, `optimizer.exp_avg` or `optimizer.exp_avg_sq`: what a checkpoint's tensor is."""
    parts = name.split(".")
    return parts[0] if parts[0] == "model" else ".".join(parts[:2])


def judge(runs: Runs, may: May) -> Verdict:
    """The verdict, which names the first difference."""
    first = next(_differences(runs, may), None)
    if first is not None:
        return Verdict("DIFFERENT", *first)
    how = " bit for bit"
    if may is not None:
        how = (
            f" to the rounding of the precision (losses {may.loss:g}, weights {may.weight:g} of the learning "
            f"rates added up, moments {may.later:g} of the largest)"
        )
    return Verdict("EQUAL", _agreement(runs, may), how=how)


def _differences(runs: Runs, may: May) -> Iterator[tuple[str, str]]:
    """Yield what is beyond the tolerance: a sentence and what to suspect."""
    plan = runs.plan
    if runs.starts != (plan.first, plan.kill):
        began = ", ".join(map(str, runs.starts)) or "nowhere"
        yield (
            f"the killed run should have gone on from step {plan.kill}, but its starts were at: {began}",
            "the checkpoint was not found, or found damaged; see the log of the resumed run",
        )
    yield from _differences_of_steps(runs, may)
    first, second = runs.final.first.state, runs.final.second.state
    for key in sorted((first.keys() | second.keys()) - set(NO_COUNTERS)):
        a, b = first.get(key), second.get(key)
        if differs(may, key, a, b):
            yield (
                f"the first difference is in {key} of the last checkpoint's state: {a} straight, {b} resumed",
                "every step was equal: suspect what is saved of this counter",
            )
    yield from _differences_of_tensors(runs, may)


def _differences_of_steps(runs: Runs, may: May) -> Iterator[tuple[str, str]]:
    plan = runs.plan
    for step in range(plan.first + 1, plan.last + 1):
        a, b = runs.straight.get(step), runs.resumed.get(step)
        if a is None or b is None:
            which = "straight" if a is None else "resumed"
            yield f"the first difference is at step {step}: the {which} run has no record of it", ""
            return
        limit, side = (may, "resumed") if step > plan.kill else (None, "before the kill")
        for field, words in FIELDS.items():
            if differs(limit, field, a[field], b[field]):
                straight, other = ("not finite" if n is None else repr(n) for n in (a[field], b[field]))
                yield (
                    f"the first difference is in the {words} of step {step}: {straight} straight, "
                    f"{other} {side}",
                    _hint_of_step(step, field, plan),
                )


def differs(may: May, name: str, straight: Any, resumed: Any) -> bool:
    """True if values of a field or counter are beyond the tolerance; null (not finite) equals only null.

    Losses, norms, and those that incidents remember may be rounded; all else is exact.
    """
    if isinstance(straight, Mapping) and isinstance(resumed, Mapping) and straight.keys() == resumed.keys():
        return any(differs(may, name, straight[key], resumed[key]) for key in straight)
    if isinstance(straight, list) and isinstance(resumed, list) and len(straight) == len(resumed):
        return any(differs(may, name, *pair) for pair in zip(straight, resumed, strict=True))
    if may is None or not isinstance(straight, float) or not isinstance(resumed, float):
        return bool(straight != resumed)
    norm = may.norm * abs(straight)
    limits = {"loss": may.loss, "grad_norm": norm, INCIDENTS: max(may.loss, norm)}
    return not abs(straight - resumed) <= limits.get(name, 0.0)


def _hint_of_step(step: int, field: str, plan: KillPlan) -> str:
    if step <= plan.kill:
        return (
            "the run does not repeat itself even where nothing was resumed: on a GPU add deterministic=true, "
            "since the backward pass of its fastest attention repeats no bits; else suspect an operation "
            "that is not deterministic on this device"
        )
    if field in ("lr", "loss_scale", "skipped_steps", "tokens"):
        return "suspect the counters in the checkpoint's state"
    if step == plan.kill + 1 and field == "loss":
        return "suspect the weights that were loaded, the position in the data, or the dropout masks"
    if step == plan.kill + 1:
        return "the loss is right, so weights and samples are: suspect the backward pass of the layout"
    return "the step after the kill is right: suspect the moments, or the position in the data"


def _differences_of_tensors(runs: Runs, may: May) -> Iterator[tuple[str, str]]:
    final = runs.final
    forms = [form.name for form in final.forms]
    for name in sorted([*final.only_first, *final.only_second, *forms]):
        yield f"{name} of the last checkpoint is not in both runs, or not of one shape and dtype", ""
    if wrong := beyond(runs, may):
        worst = wrong[0]
        yield (
            f"the first difference is in the last checkpoint: {worst.name} differs in {worst.differing:,} of "
            f"{worst.elements:,} elements, by up to {worst.largest:.2g} of {worst.scale:.2g}, and "
            f"{len(wrong) - 1} more tensors of {len(final.tensors)} do",
            "every step was equal, the last one's update is not: suspect the optimizer's state",
        )


def beyond(runs: Runs, may: May) -> list[TensorDifference]:
    """Tensors of the last checkpoint that differ more than they may, the most different first."""
    if may is None:
        return list(runs.final.differing)
    largest: dict[str, float] = {}
    for tensor in runs.final.tensors:
        largest[kind_of(tensor.name)] = max(largest.get(kind_of(tensor.name), 0.0), tensor.scale)

    def limit(tensor: TensorDifference) -> float:
        kind = kind_of(tensor.name)
        if kind == "model":
            return may.weight * runs.sum_lr
        # the second moment is a mean of squares: relative differences double
        share = may.later * (2 if kind.endswith(MOMENTS[1]) else 1)
        return share * max(tensor.scale, FLOOR * largest[kind])

    return [tensor for tensor in runs.final.differing if not tensor.largest <= limit(tensor)]


def _agreement(runs: Runs, may: May) -> str:
    """The agreement in words."""
    steps, tensors = runs.plan.last - runs.plan.first, runs.final.tensors
    elements = sum(tensor.elements for tensor in tensors)
    counted = f"{steps} steps, then {len(tensors)} tensors of {elements:,} elements"
    if may is None:
        return f"loss, gradient norm, learning rate, loss scale and samples of {counted}"
    losses = max((runs.loss_difference(step) or 0.0 for step in runs.straight), default=0.0)
    weights = max((t.largest for t in tensors if kind_of(t.name) == "model"), default=0.0)
    moments = max((t.relative for t in tensors if kind_of(t.name) != "model"), default=0.0)
    return (
        f"{counted}: losses to {losses:.1e}, weights to {weights / runs.sum_lr if runs.sum_lr else 0:.1e} of "
        f"what the learning rate moves them, moments to {moments:.1e} of the largest of each"
    )
