"""`mlm parity`: compare a layout's training with that of one process."""

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

import mlm
from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.config.build import to_dict
from mlm.launch.environment import read_place
from mlm.launch.process import device_kind
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.training.corpora import corpus_problems
from mlm.training.memory import reuse_large_blocks
from mlm.util.errors import CheckFailedError, UserError, writing_to
from mlm.util.results import result_problems, write_result
from mlm.util.system import available_memory
from mlm.util.terminal import Screen, progress_bar
from mlm.verify.parity.compare import Report, compare
from mlm.verify.parity.config import ParityConfig
from mlm.verify.parity.verdict import TOLERANCES, Verdict, judge, of_moved, relative, skipped

RESULT = "parity.json"
SHOWN = 3
"""Parameters listed: those that differ most."""


def preflight(config: ParityConfig) -> list[str]:
    """Problems that the named files and this host's memory show; called before any rank starts."""
    problems = corpus_problems(config.comparable())
    if config.ckpt is not None:
        try:
            read_manifest(resolve(config.ckpt))
        except UserError as error:
            problems += error.problems
    too_large = memory_problem(config, available_bytes(config))
    problems += result_problems(Path(config.out, RESULT))
    return [*problems, too_large] if too_large else problems


def available_bytes(config: ParityConfig) -> int:
    """Memory for the comparison: of one GPU, or what this host has left."""
    if device_kind(config.dist) == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return available_memory()


def memory_problem(config: ParityConfig, available: int) -> str | None:
    """Why the whole model does not fit beside its layout, with the remedy; None where it does."""
    needed = needed_bytes(config, config.model.num_layers)
    if needed <= available:
        return None
    parallel, layers = config.parallel, config.model.num_layers
    least = parallel.pp * parallel.vp
    fits = [n for n in range(least, layers, least) if needed_bytes(config, n) <= available]
    remedy = (
        f"use model.num_layers={fits[-1]}, the same shapes with fewer layers"
        if fits
        else "use a smaller model=… that tp divides, such as model=gpt2_tiny"
    )
    return (
        f"model.num_layers={layers}: a model of {config.model.num_parameters() / 1e9:.2g} billion "
        f"parameters, whole in one process beside its layout, takes about {needed / 1e9:,.1f} GB of the "
        f"{available / 1e9:,.1f} GB there are; {remedy}"
    )


def needed_bytes(config: ParityConfig, num_layers: int) -> int:
    """Memory of rank 0's whole model, and of the layout's ranks that share the same memory, in bytes.

    Weights, gradients and Adam's moments in the format they are kept in, and the activations of a
    micro-batch by arXiv:2205.05198, equation 2, in the format of compute, without recomputation.
    """
    model, batch = config.model, config.train.micro_batch_size
    parameters = replace(model, num_layers=num_layers).num_parameters()
    kept, computed = {"fp64": (8, 8), "fp32": (4, 4)}.get(config.precision.dtype, (4, 2))
    s, h = config.data.seq_length, model.hidden_size
    per_layer = s * batch * h * (34 + 5 * model.num_heads * s / h) / 2 * computed
    whole = 4 * kept * parameters + per_layer * num_layers
    return int(whole * (1 + _share_of_layout(config)))


def _share_of_layout(config: ParityConfig) -> float:
    """Copies of the model that the layout's ranks hold in the memory that rank 0 uses."""
    parallel = config.parallel
    if device_kind(config.dist) == "cuda":
        return 1 / (parallel.tp * parallel.pp)
    place = read_place(os.environ)
    ranks = parallel.replica * (parallel.dp or 1) if place is None else place.local_world_size
    return ranks / (parallel.tp * parallel.pp)


def run(config: ParityConfig, ctx: ParallelContext) -> None:
    """Compare; rank 0 prints tables and writes out/parity.json. Raises CheckFailedError if not equal."""
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    out = Path(config.out, RESULT)
    if ctx.is_main:
        with writing_to(config.out):
            out.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=out.parent):  # found now rather than when all is computed
                pass
    with progress_bar("comparing", config.steps, shown=ctx.is_main) as advance:
        report = compare(config, ctx, lambda: advance(1))
    verdict = judge(report, config.precision.dtype, config.optimizer.kind)
    if ctx.is_main:
        with writing_to(config.out):
            write_result(out, result_json(config, ctx, report, verdict).encode())
        show(config, ctx, report, verdict, out)
    if not verdict.equal:
        raise CheckFailedError(f"{verdict.word}: {verdict.sentence} ({out})")


def result_json(config: ParityConfig, ctx: ParallelContext, report: Report, verdict: Verdict) -> str:
    """Everything compared, with the configuration. Numbers that are not finite become null."""
    result = {
        "task": "parity",
        "equal": verdict.equal,
        "verdict": f"{verdict.word}: {verdict.sentence}",
        "hint": verdict.hint,
        "layout": describe_layout(config.parallel, ctx),
        "tolerance": asdict(TOLERANCES[config.precision.dtype]),
        **asdict(report),
        "config": to_dict(config),
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
    }
    return json.dumps(_finite(result), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_layout(parallel: ParallelConfig, ctx: ParallelContext) -> str:
    """`tp=2 pp=2 dp=2 sequence_parallel=true`: sizes, and what else is not as on one process."""
    over_context = f"cp={ctx.cp.size} " if ctx.cp.size > 1 else ""
    sizes = f"tp={ctx.tp.size} {over_context}pp={ctx.pp.size} dp={ctx.dp.size}"
    plain = ParallelConfig()
    others = {
        key: getattr(parallel, key)
        for key in ("vp", "sequence_parallel", "tp_overlap", "pipeline", "zero", "zero_reduce", "recompute")
    }
    return " ".join(
        [sizes]
        + [f"{key}={str(value).lower()}" for key, value in others.items() if value != getattr(plain, key)]
    )


def show(config: ParityConfig, ctx: ParallelContext, report: Report, verdict: Verdict, out: Path) -> None:
    """Print the tables."""
    model, console = config.model, Screen(highlight=False, soft_wrap=True)
    console.print(
        f"parity of {describe_layout(config.parallel, ctx)} with one process\n"
        f"{model.kind} {model.num_parameters() / 1e6:,.1f}M, {config.precision.dtype}, dropout "
        f"{max(model.hidden_dropout, model.attention_dropout):g}, {config.train.global_batch_size} × "
        f"{config.data.seq_length} tokens a step in micro-batches of {config.train.micro_batch_size}"
    )
    console.print(_table_of_steps(report))
    console.print(_table_of_parameters(report))
    if verdict.equal:  # else the error that ends the command reports it
        console.print(f"[bold green]{verdict.word}[/]: {verdict.sentence}")
    if verdict.hint:
        console.print(f"[bold]hint[/]: {verdict.hint}")
    console.print(f"written to {out}")


def _table(title: str, *columns: str) -> Table:
    """A table of names and numbers, none truncated."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "parameter") else "right", overflow="fold")
    return table


def _table_of_steps(report: Report) -> Table:
    table = _table(
        "losses and gradient norms", "step", "one process", "layout", "difference", "norm", "difference"
    )
    for step in report.steps:
        loss, norm = step.loss, step.grad_norm
        table.add_row(
            str(step.step),
            f"{loss.one_process:.10f}",
            f"{loss.layout:.10f}",
            f"{loss.difference:.1e}",
            f"{norm.one_process:.6g}",
            "overflow" if skipped(step) else f"{norm.difference:.1e}",
        )
    return table


def _table_of_parameters(report: Report) -> Table:
    """The parameters that differ most: gradients relative to their largest, weights to the learning rate."""
    table = _table("largest differences of a parameter", "", "parameter", "step", "difference", "relative")
    rows = [
        (by, gradient, step.step)
        for step in report.steps
        if not skipped(step)
        for gradient, by in zip(step.gradients, relative(step.gradients), strict=True)
    ]
    for by, gradient, step_number in sorted(rows, key=lambda row: -row[0])[:SHOWN]:
        table.add_row("gradient", gradient.name, str(step_number), f"{gradient.difference:.1e}", f"{by:.1e}")
    moved, last = sum(step.lr for step in report.steps), str(len(report.steps))
    for weight in sorted(report.weights, key=lambda weight: -weight.difference)[:SHOWN]:
        by = of_moved(weight.difference, moved)
        table.add_row("weight", weight.name, last, f"{weight.difference:.1e}", f"{by:.1e} of Σ lr")
    return table
