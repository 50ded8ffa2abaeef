"""`mlm plan dry-run`: run a step of any rank of any layout here, and show its counts.

On meta tensors as a GPU would; with dist.device=cpu on real tensors as this CPU would.
"""

import logging
from typing import Any

import torch

from mlm.config.build import to_dict
from mlm.plan.config import PlanDryRunConfig
from mlm.plan.dry_run_meter import BACKWARD, FORWARD, IN_ATTENTION, RECOMPUTED
from mlm.plan.dry_run_rank import META, DryRun, dry_run
from mlm.plan.report import show_table
from mlm.plan.trace import Message
from mlm.util.results import save_result
from mlm.util.terminal import Screen, console

SCOPE = (
    "eager kernels of a {}: no torch.compile, no workspace of a library, no rounding up by an allocator; "
    "the loss computes its gradients in its forward pass"
)
CPU = torch.device("cpu")
MESSAGE = Message._fields[:-1]
"""Fields of a type of message."""
PROCESS = 390_000_000
"""Bytes of a process without tensors: interpreter and libraries, 0.30 GB, and 0.09 GB at their first use."""


def run(config: PlanDryRunConfig) -> DryRun:
    """Run the rank's step, print its counts, and write `out`."""
    screen = console()
    for name in ("torch.distributed", "torch.nn.parallel"):  # their warnings are about real process groups
        logging.getLogger(name).setLevel(logging.ERROR)
    result = dry_run(config, config.rank, device=CPU if config.dist.device == "cpu" else META)
    facts = record(result, config)
    show(facts, screen)
    save_result(config.out, facts, screen.print)
    return result


def flops_of(result: DryRun) -> dict[str, int]:
    """Return a step's FLOPs by phase; `model` is without recomputation, `hardware` the sum."""
    phases = {phase: result.counts.flops[phase] for phase in (FORWARD, BACKWARD, RECOMPUTED, IN_ATTENTION)}
    model = phases[FORWARD] + phases[BACKWARD]
    return {**phases, "model": model, "hardware": sum(phases.values())}


def record(result: DryRun, config: PlanDryRunConfig) -> dict[str, Any]:
    """Return a dry run as JSON values; bytes and FLOPs are of this rank and one step."""
    ctx, peak, counts = result.ctx, result.log.peak(), result.counts
    messages = sorted(counts.messages.items(), key=lambda item: (item[0].axis, -item[0].bytes * item[1]))
    return {
        "format": "mlm-dry-run-1",
        "settings": to_dict(config),
        "rank": ctx.rank,
        "ranks": ctx.world_size,
        "place": {axis.name: axis.rank for axis in (ctx.tp, ctx.cp, ctx.pp, ctx.dp)},
        "layers": result.layers,
        "micro_batches": result.micro_batches,
        "micro_batches_run": result.micro_batches_run,
        "scope": SCOPE.format("CPU" if ctx.device == CPU else "GPU"),
        "parameters": result.parameters,
        "flops": flops_of(result),
        "communication": [
            {**dict(zip(MESSAGE, message, strict=False)), "count": n, "ring_bytes_each": message.ring_bytes}
            for message, n in messages
        ],
        "memory": {
            "peak": peak.bytes,
            **({"process": peak.bytes + PROCESS} if ctx.device == CPU else {}),
            "phase": peak.phase,
            "parts": peak.parts,
        },
    }


def show(facts: dict[str, Any], screen: Screen) -> None:
    memory = facts["memory"]
    position = ", ".join(f"{axis} {rank}" for axis, rank in facts["place"].items())
    screen.print(f"{facts['settings']['name']}: rank {facts['rank']} of {facts['ranks']} ({position})")
    chunks = "; ".join(f"{layers[0]} to {layers[-1]}" if layers else "none" for layers in facts["layers"])
    screen.print(f"layers {chunks}; {facts['parameters']:,} parameters here")
    screen.print(f"{facts['micro_batches']} micro-batches, {facts['micro_batches_run']} of them run\n")
    flops = [(name, n, f"{n / 1e12:,.3f}") for name, n in facts["flops"].items() if n]
    show_table(screen, "Matrix products of a step", ("", "FLOPs#", "TFLOPs#"), flops)
    messages = []
    for message in facts["communication"]:
        axis, operation, _, size, count, ring_bytes = message.values()
        messages.append((axis, operation, count, size, count * size, f"{count * ring_bytes / 1e9:,.6g}"))
    columns = ("axis", "operation", "count#", "bytes each#", "bytes#", "GB sent in a ring#")
    show_table(screen, "Communication of a step", columns, messages)
    sizes = {**memory["parts"], "peak": memory["peak"]}
    if "process" in memory:
        sizes["process, if it keeps no freed blocks"] = memory["process"]
    rows = [(name, n, f"{n / 2**30:.3f}", f"{n / memory['peak']:.1%}") for name, n in sizes.items()]
    show_table(screen, f"Memory at its peak (in {memory['phase']})", ("", "bytes#", "GiB#", "of it#"), rows)
    screen.print(facts["scope"])
