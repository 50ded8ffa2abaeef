"""`mlm plan dry-run`: run a step of any rank of any layout here, and show its counts.

On meta tensors, as on a GPU; with dist.device=cpu on real ones, as on this CPU.
"""

import logging
import resource
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mlm.config.build import to_dict
from mlm.plan.config import PlanDryRunConfig
from mlm.plan.dry_run_meter import BACKWARD, FORWARD, IN_ATTENTION, OPTIMIZER, RECOMPUTED, MessageType
from mlm.plan.dry_run_rank import META, DryRun, dry_run
from mlm.training.memory import reuse_large_blocks
from mlm.util.errors import writing_to
from mlm.util.results import target_name, write_result
from mlm.util.terminal import Screen, add_row, console, table

SCOPE = (
    "eager kernels of a {}: no torch.compile, no workspace of a library, no rounding up by an allocator; "
    "the loss computes its gradients in its forward pass"
)
CPU = torch.device("cpu")
PROCESS = 390_000_000
"""Bytes of a process beside its tensors: interpreter and libraries, 0.30 GB, and 0.09 at their first use."""


def run(config: PlanDryRunConfig) -> DryRun:
    """Run the rank's step, print what it counted, write `out` where it is given.

    Raises UserError if `out` cannot be written.
    """
    screen = console()
    for name in ("torch.distributed", "torch.nn.parallel"):  # advice for real groups
        logging.getLogger(name).setLevel(logging.ERROR)
    if config.dist.device == "cpu":
        reuse_large_blocks()
    result = dry_run(config, config.rank, device=CPU if config.dist.device == "cpu" else META)
    show(result, config, screen)
    if config.out is not None:
        with writing_to(str(config.out)):
            Path(config.out).parent.mkdir(parents=True, exist_ok=True)
        write_result(config.out, record(result, config))
        screen.print(f"written to {target_name(config.out)}")
    return result


def flops_of(result: DryRun) -> dict[str, int]:
    """FLOPs of a step by phase; `model` without what is computed twice, `hardware` with all."""
    phases = {
        phase: sum(n for (of, _), n in result.counts.flops.items() if of == phase)
        for phase in (FORWARD, BACKWARD, RECOMPUTED, IN_ATTENTION)
    }
    model = phases[FORWARD] + phases[BACKWARD]
    return {**phases, "model": model, "hardware": sum(phases.values())}


def messages_of(result: DryRun) -> list[tuple[MessageType, int]]:
    """Messages by axis with their counts, the most bytes first."""
    return sorted(
        result.counts.messages.items(), key=lambda item: (item[0].axis, -item[0].bytes * item[1], item[0])
    )


def record(result: DryRun, config: PlanDryRunConfig) -> dict[str, Any]:
    """All of a dry run in values that JSON holds; bytes and FLOPs are of this rank and one step."""
    ctx, peak = result.ctx, result.log.peak()
    return {
        "format": "mlm-dry-run-1",
        "settings": to_dict(config),
        "rank": ctx.rank,
        "ranks": ctx.world_size,
        "place": {axis.name: axis.rank for axis in (ctx.tp, ctx.cp, ctx.pp, ctx.dp)},
        "layers": result.layers,
        "micro_batches": result.micro_batches,
        "micro_batches_run": result.micro_batches_run,
        "attention": result.attention,
        "scope": scope(result),
        "parameters": result.parameters,
        "flops": flops_of(result),
        "flops_by_module": [
            {"phase": phase, "module": module, "flops": n}
            for (phase, module), n in sorted(result.counts.flops.items())
            if n
        ],
        "communication": [
            {**message._asdict(), "count": n, "ring_bytes_each": message.ring_bytes}
            for message, n in messages_of(result)
        ],
        "memory": {
            "peak": peak.bytes,
            **({"process": peak.bytes + PROCESS, "kept": peak_of_process()} if ctx.device == CPU else {}),
            "phase": peak.phase,
            "parts": peak.parts,
            "by_module": peak.modules,
            "by_phase": peak.made_in,
            "peak_of_phase": {
                phase: result.log.peak(phase).bytes for phase in (FORWARD, BACKWARD, OPTIMIZER)
            },
        },
    }


def show(result: DryRun, config: PlanDryRunConfig, screen: Screen) -> None:
    """Print the tables."""
    ctx, peak = result.ctx, result.log.peak()
    layout = f"tp={ctx.tp.size}{f' cp={ctx.cp.size}' * (ctx.cp.size > 1)} pp={ctx.pp.size} dp={ctx.dp.size}"
    place = f"tensor {ctx.tp.rank}, stage {ctx.pp.rank}, replica {ctx.dp.rank}"
    screen.print(f"{config.name}: rank {ctx.rank} of {ctx.world_size} ({layout}): {place}")
    chunks = "; ".join(f"{layers[0]} to {layers[-1]}" if layers else "none" for layers in result.layers)
    screen.print(f"layers {chunks}; {result.parameters:,} parameters here")
    ran = (
        f", {result.micro_batches_run} of them run" if result.micro_batches_run < result.micro_batches else ""
    )
    screen.print(f"one step: {result.micro_batches} micro-batches{ran}; {result.attention} attention\n")
    flops = [(name, f"{n:,}", f"{n / 1e12:,.3f}") for name, n in flops_of(result).items() if n]
    show_table(screen, "Matrix products of a step", ("", "FLOPs#", "TFLOPs#"), flops)
    messages = [
        (
            *(message.axis, message.operation, f"{n:,}", f"{message.bytes:,}", f"{n * message.bytes:,}"),
            f"{n * message.ring_bytes / 1e9:,.6g}",
        )
        for message, n in messages_of(result)
    ]
    columns = ("axis", "operation", "count#", "bytes each#", "bytes#", "GB sent in a ring#")
    show_table(screen, "Communication of a step", columns, messages)
    parts = [(part, f"{n:,}", _gib(n), f"{n / peak.bytes:.1%}") for part, n in peak.parts.items()]
    parts.append(("peak", f"{peak.bytes:,}", _gib(peak.bytes), ""))
    if ctx.device == CPU:
        process = peak.bytes + PROCESS
        parts.append(("process, if it keeps no freed blocks", f"{process:,}", _gib(process), ""))
        kept = peak_of_process()
        parts.append(("this process, which keeps them", f"{kept:,}", _gib(kept), ""))
    for phase in (FORWARD, BACKWARD, OPTIMIZER):
        most = result.log.peak(phase).bytes
        parts.append((f"most while in {phase}", f"{most:,}", _gib(most), ""))
    show_table(screen, f"Memory at its peak (in {peak.phase})", ("", "bytes#", "GiB#", "share#"), parts)
    makers = [("made by", module, f"{n:,}", _gib(n)) for module, n in peak.modules.items()]
    makers += [("made in", phase, f"{n:,}", _gib(n)) for phase, n in peak.made_in.items()]
    title = "The same without weights, gradients and optimizer state, by module and by phase"
    show_table(screen, title, ("", "", "bytes#", "GiB#"), makers)
    screen.print(scope(result))


def peak_of_process() -> int:
    """Return the bytes that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def scope(result: DryRun) -> str:
    """Return what was counted, and what was not."""
    return SCOPE.format("CPU" if result.ctx.device == CPU else "GPU")


def show_table(screen: Screen, title: str, columns: Iterable[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table if it has rows."""
    made = table(title, *columns)
    for row in rows:
        add_row(made, *row)
    if rows:
        screen.print(made)


def _gib(n: int) -> str:
    return f"{n / 2**30:.3f}"
