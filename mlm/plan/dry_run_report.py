"""Counts of a dry run as tables and as a record."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlm.config.build import to_dict
from mlm.plan.config import PlanDryRunConfig
from mlm.plan.dry_run_meter import BACKWARD, FORWARD, IN_ATTENTION, OPTIMIZER, RECOMPUTED, MessageType
from mlm.plan.dry_run_rank import DryRun

SCOPE = (
    "eager kernels of a GPU: no torch.compile, no workspace of a library, no rounding up by an allocator; "
    "the loss computes its gradients in its forward pass"
)


def flops_of(found: DryRun) -> dict[str, int]:
    """FLOPs of a step by phase; `model` without what is computed twice, `hardware` with all."""
    phases = {
        phase: sum(n for (of, _), n in found.counts.flops.items() if of == phase)
        for phase in (FORWARD, BACKWARD, RECOMPUTED, IN_ATTENTION)
    }
    model = phases[FORWARD] + phases[BACKWARD]
    return {**phases, "model": model, "hardware": sum(phases.values())}


def record(found: DryRun, config: PlanDryRunConfig) -> dict[str, Any]:
    """All of a dry run in values that JSON holds; bytes and FLOPs are of this rank and one step."""
    ctx, peak = found.ctx, found.log.peak()
    return {
        "format": "mlm-dry-run-1",
        "settings": to_dict(config),
        "rank": ctx.rank,
        "ranks": ctx.world_size,
        "place": {axis.name: axis.rank for axis in (ctx.tp, ctx.pp, ctx.dp)},
        "layers": found.layers,
        "micro_batches": found.micro_batches,
        "micro_batches_run": found.micro_batches_run,
        "attention": found.attention,
        "scope": SCOPE,
        "parameters": found.parameters,
        "flops": flops_of(found),
        "flops_by_module": [
            {"phase": phase, "module": module, "flops": n}
            for (phase, module), n in sorted(found.counts.flops.items())
            if n
        ],
        "communication": [
            {**message._asdict(), "count": n, "ring_bytes_each": message.ring_bytes}
            for message, n in _messages(found)
        ],
        "memory": {
            "peak": peak.bytes,
            "phase": peak.phase,
            "parts": peak.parts,
            "by_module": peak.modules,
            "by_phase": peak.made_in,
            "peak_of_phase": {phase: found.log.peak(phase).bytes for phase in (FORWARD, BACKWARD, OPTIMIZER)},
        },
    }


def show(found: DryRun, config: PlanDryRunConfig, console: Console) -> None:
    """Print the tables."""
    ctx = found.ctx
    layout = f"tp={ctx.tp.size} pp={ctx.pp.size} dp={ctx.dp.size}"
    place = f"tensor {ctx.tp.rank}, stage {ctx.pp.rank}, replica {ctx.dp.rank}"
    _say(console, f"{config.name}: rank {ctx.rank} of {ctx.world_size} ({layout}): {place}")
    chunks = "; ".join(f"{layers[0]} to {layers[-1]}" if layers else "none" for layers in found.layers)
    _say(console, f"layers {chunks}; {found.parameters:,} parameters here")
    ran = f", {found.micro_batches_run} of them run" if found.micro_batches_run < found.micro_batches else ""
    _say(console, f"one step: {found.micro_batches} micro-batches{ran}; {found.attention} attention\n")
    console.print(_flops_table(found))
    if found.counts.messages:
        console.print(_messages_table(found))
    console.print(_memory_table(found))
    console.print(_modules_table(found))
    _say(console, SCOPE)


def _say(console: Console, line: str) -> None:
    """Print one line as it is."""
    console.print(Text(line), soft_wrap=True)


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> Table:
    """A table whose first `names` columns are words and the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < names else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _flops_table(found: DryRun) -> Table:
    rows = [(name, f"{n:,}", f"{n / 1e12:,.3f}") for name, n in flops_of(found).items() if n]
    return _table("Matrix products of a step", ("", "FLOPs", "TFLOPs"), rows)


def _messages(found: DryRun) -> list[tuple[MessageType, int]]:
    """Messages by axis, the most bytes first."""
    return sorted(
        found.counts.messages.items(), key=lambda item: (item[0].axis, -item[0].bytes * item[1], item[0])
    )


def _messages_table(found: DryRun) -> Table:
    rows = [
        (
            message.axis,
            message.operation,
            f"{n:,}",
            f"{message.bytes:,}",
            f"{n * message.bytes:,}",
            f"{n * message.ring_bytes / 1e9:,.6g}",
        )
        for message, n in _messages(found)
    ]
    headings = ("axis", "operation", "count", "bytes each", "bytes", "GB sent in a ring")
    return _table("Communication of a step", headings, rows, names=2)


def _memory_table(found: DryRun) -> Table:
    peak = found.log.peak()
    rows = [(part, f"{n:,}", _gib(n), f"{n / peak.bytes:.1%}") for part, n in peak.parts.items()]
    rows.append(("peak", f"{peak.bytes:,}", _gib(peak.bytes), ""))
    for phase in (FORWARD, BACKWARD, OPTIMIZER):
        most = found.log.peak(phase).bytes
        rows.append((f"most while in {phase}", f"{most:,}", _gib(most), ""))
    return _table(f"Memory at its peak (in {peak.phase})", ("", "bytes", "GiB", ""), rows)


def _modules_table(found: DryRun) -> Table:
    peak = found.log.peak()
    rows = [("made by", module, f"{n:,}", _gib(n)) for module, n in peak.modules.items()]
    rows += [("made in", phase, f"{n:,}", _gib(n)) for phase, n in peak.made_in.items()]
    title = "The same without weights, gradients and optimizer state, by module and by phase"
    return _table(title, ("", "", "bytes", "GiB"), rows, names=2)


def _gib(n: int) -> str:
    return f"{n / 2**30:.3f}"
