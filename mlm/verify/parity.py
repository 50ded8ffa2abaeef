"""`mlm parity`: compare a layout's training with that of one process, and judge the differences."""

import os
from dataclasses import asdict, astuple, replace
from pathlib import Path
from tempfile import TemporaryFile

import torch
from rich.table import Table

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.launch.devices import device_kind
from mlm.launch.environment import read_rank_place
from mlm.models.family import SHIPPED
from mlm.parallel.mesh import ParallelContext
from mlm.plan.forecast import most_of_small
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import MemoryModel
from mlm.training.corpora import corpus_problems
from mlm.training.memory import reuse_large_blocks
from mlm.util.errors import CheckFailedError, UserError, writing_to
from mlm.util.results import result_problems
from mlm.util.system import available_memory
from mlm.util.terminal import add_row, progress_bar, table
from mlm.verify.compare import Report, compare
from mlm.verify.config import ParityConfig, comparable, describe_layout
from mlm.verify.verdict import TOLERANCES, Verdict, write_and_show

RESULT = "parity.json"
SHOWN = 3
"""Parameters listed: those that differ most."""


def preflight(config: ParityConfig) -> list[str]:
    """Problems that the named files and this host's memory show; called before any rank starts."""
    problems = corpus_problems(comparable(config))
    if config.ckpt is not None:
        try:
            read_manifest(resolve(config.ckpt))
        except UserError as error:
            problems += error.problems
    is_gpu = device_kind(config.dist) == "cuda"
    available = torch.cuda.get_device_properties(0).total_memory if is_gpu else available_memory()
    too_large = memory_problem(config, available)
    problems += result_problems(Path(config.out, RESULT))
    return [*problems, too_large] if too_large else problems


def memory_problem(config: ParityConfig, available: int) -> str | None:
    """Why the whole model does not fit beside its layout; None where it does, and for custom families."""
    small = most_of_small(config, config.parallel.replica * (config.parallel.dp or 1))
    if config.model.kind not in SHIPPED or 0 < 3 * small <= available:  # one process is in it, as a rank
        return None
    if (needed := needed_bytes(config)) <= available:
        return None
    return (
        f"model.num_layers={config.model.num_layers}: a model of {config.model.num_parameters() / 1e9:.2g} "
        f"billion parameters, whole in one process beside its layout, takes about {needed / 1e9:,.1f} GB of "
        f"the {available / 1e9:,.1f} GB there are; use fewer layers of the same shapes, or a smaller model=…"
    )


def needed_bytes(config: ParityConfig) -> float:
    """Memory of rank 0's whole model, and of the layout's ranks that share the same memory.

    Each has weights, gradients, two moments and a copy of gradients; rank 0 has what all ranks record, too.
    """
    is_gpu = device_kind(config.dist) == "cuda"
    memory = MemoryModel(counts_of(config, "gpu" if is_gpu else "cpu"))
    layout = PlannedLayout.of(config, config.parallel.dp or 1)
    whole = PlannedLayout(micro_batch=layout.micro_batch, global_batch=layout.global_batch)
    place = read_rank_place(os.environ)
    ranks = layout.gpus if place is None else place.local_world_size
    split = memory.worst(layout).total * (1 if is_gpu else ranks)
    return memory.worst(whole).total * 5 / 4 + split * 7 / 4


def run(config: ParityConfig, ctx: ParallelContext) -> None:
    """Compare; rank 0 prints tables and writes out/parity.json. Raises CheckFailedError if not equal."""
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    out = Path(config.out, RESULT)
    if ctx.is_main:
        with writing_to(config.out):
            out.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=out.parent):  # a full disk is reported before all is computed
                pass
    with progress_bar("comparing", config.steps, shown=ctx.is_main) as advance:
        report = compare(config, ctx, lambda: advance(1))
    verdict = shared_verdict(report, ctx)
    if report is not None:
        layout = describe_layout(replace(config.parallel, dp=ctx.dp.size))
        numbers = {
            "layout": layout,
            "tolerance": asdict(TOLERANCES[config.precision.dtype]),
            **asdict(report),
            "weights": [asdict(weight) for weight in report.steps[-1].weights],
        }
        tables = (table_of_steps(report), table_of_parameters(report))
        write_and_show(out, config, verdict, numbers, heading(config, layout), *tables)
    if not verdict.equal:
        raise CheckFailedError(f"{verdict.headline} ({out})")


def heading(config: ParityConfig, layout: str) -> str:
    """Return lines on what was compared."""
    model, train = config.model, config.train
    return (
        f"parity of {layout} with one process\n"
        f"{model.kind} {model.num_parameters() / 1e6:,.1f}M, {config.precision.dtype}, dropout "
        f"{max(model.hidden_dropout, model.attention_dropout):g}, {train.global_batch_size} × "
        f"{config.data.seq_length} tokens a step in micro-batches of {train.micro_batch_size}"
    )


def table_of_steps(report: Report) -> Table:
    """Return the losses and gradient norms."""
    columns = ("step#", "one process#", "layout#", "difference#", "norm#", "difference#")
    rows = table("losses and gradient norms", *columns)
    for step in report.steps:
        loss, norm = step.loss, step.grad_norm
        losses = (f"{loss.one_process:.10f}", f"{loss.layout:.10f}", f"{loss.difference:.1e}")
        off = "overflow" if step.is_skipped else f"{norm.difference:.1e}"
        add_row(rows, step.step, *losses, f"{norm.one_process:.6g}", off)
    return rows


def table_of_parameters(report: Report) -> Table:
    """Return the parameters that differ most: gradients relative to their largest, weights to Σ lr."""
    rows = table("largest differences of a parameter", "", "parameter", "step#", "difference#", "relative#")
    last = report.steps[-1]
    gradients = [("gradient", each, step.step, "") for step in report.steps for each in step.gradients]
    for found in gradients, [("weight", each, last.step, " of Σ lr") for each in last.weights]:
        for kind, each, step, unit in sorted(found, key=lambda row: -row[1].relative)[:SHOWN]:
            add_row(rows, kind, each.name, step, f"{each.difference:.1e}", f"{each.relative:.1e}{unit}")
    return rows


def shared_verdict(report: Report | None, ctx: ParallelContext) -> Verdict:
    """The verdict on the report of rank 0, on every rank. Collective."""
    verdict = None if report is None else list(astuple(judge(report)))
    return Verdict(*Ranks.of(ctx).broadcast(verdict))


def judge(report: Report) -> Verdict:
    """The verdict on a comparison."""
    if report.blind:
        return Verdict(
            "UNDECIDED", f"{report.blind} is not finite on one process either; nothing after it counts"
        )
    if report.finding is not None:
        found = report.finding
        others = f"; {report.wrong - 1} more tensors of that step differ" if report.wrong > 1 else ""
        return Verdict("DIFFERENT", f"first at {found.where}{others}", f"{found.cause}: {found.sentence}")
    if all(step.is_skipped for step in report.steps):
        return Verdict(
            "UNDECIDED", "nothing could be compared: on both sides every step's gradients overflow"
        )
    if report.torn:
        others = f", nor those of {len(report.torn) - 1} more" if len(report.torn) > 1 else ""
        return Verdict(
            "DIFFERENT",
            f"the copies of {report.torn[0]} on several ranks are no longer equal bit for bit{others}",
            "look at a reduction that reaches some copies only: they will drift apart",
        )
    return Verdict("EQUAL", _agreement(report))


def _agreement(report: Report) -> str:
    """The agreement in words."""
    losses = max(step.loss.difference for step in report.steps)
    gradients = max(each.relative for step in report.steps for each in step.gradients)
    weights, rounding, copies = report.steps[-1].weights, report.by_gradient, report.replicated
    moves = f"{max(each.relative for each in weights):.1e} of what the learning rate moves them"
    is_moved = any(step.lr for step in report.steps)
    return (
        f"losses to {losses:.1e}, gradients to {gradients:.1e} of the largest of each, weights to "
        + (moves if is_moved else "the last bit, as every learning rate is 0")
        + (f"; {rounding} elements compared by gradient alone, which is rounding" if rounding else "")
        + (f"; {copies} parameters held in copies, all bit-equal" if copies else "")
    )
