"""`mlm plan compare` and `mlm plan memory`: the parts of a step in two layouts, and of a rank's memory."""

from collections.abc import Iterator
from typing import Any

from mlm.plan.candidates import Query
from mlm.plan.config import PlanCompareConfig, PlanMemoryConfig
from mlm.plan.cost import PARTS as TIME_PARTS
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import GIB, PARTS, DeviceMemory, MemoryModel, in_flight
from mlm.plan.report import (
    Row,
    as_row,
    fit,
    format_amount,
    format_seconds,
    layout_cautions,
    memory_row,
    show_table,
    spread,
    time_caution,
    time_error,
    wide_screen,
    write_rows,
)
from mlm.plan.search import LayoutForecast, Models

ROWS = {
    "products": ("matmul", "vocabulary"),
    **{part: (part,) for part in ("attention", "elementwise", "recompute", "tp", "cp", "ep", "pp")},
    **{"idle (pipeline bubble)": ("bubble",), "dp": ("dp",), "optimizer": ("optimizer",), "step": TIME_PARTS},
}
"""Rows of the table, and the parts of a step in them: all, once, and their sum."""


def compare(config: PlanCompareConfig) -> tuple[LayoutForecast, LayoutForecast]:
    """Print both layouts and their difference, write `out` where it is given, and return the forecasts.

    Raises UserError if `out` cannot be written.
    """
    screen, forecasts, rows = wide_screen(), list[LayoutForecast](), []
    batch = config.train.global_batch_size
    for label in (config.a, config.b):
        layout = PlannedLayout.named(label, batch)
        query = Query(run=config, hardware=config.hardware, gpus=layout.gpus)
        forecasts.append(Models(query).forecast(layout))
        rows.append(as_row(query, forecasts[-1]))
    a, b = forecasts
    tokens = f"{batch} x {config.data.seq_length} tokens a step"
    screen.print(f"{config.name} on {config.hardware.name} · {config.precision.dtype} · {tokens}")
    show_table(screen, "", ("", "A#", "B#", "B - A#"), part_rows(a, b))
    reasons = dict[str, None]()
    for name, each in (("A", a), ("B", b)):
        gpus, memory = each.layout.gpus, each.memory.total
        error, assumed = time_error(config.hardware, config.model, gpus)
        reasons |= dict.fromkeys(assumed)
        took = spread(each.step.total, error, format_seconds)
        needs = fit(memory, config.hardware.for_ranks(gpus).memory_gib * GIB)
        screen.print(f"{name}: {each.layout.label} on {gpus} GPUs; {took} a step; the fullest {needs}")
    ratio, more = b.step.total / a.step.total, b.layout.gpus / a.layout.gpus
    screen.print(f"B takes {ratio:.3g} times the time of A and {ratio * more:.3g} times its GPU-hours")
    for line in time_caution(list(reasons)):
        screen.print(line)
    write_rows(config.out, {"format": "mlm-plan-compare-1", "model": config.name}, "layouts", rows, screen)
    return a, b


def part_rows(a: LayoutForecast, b: LayoutForecast) -> Iterator[tuple[str, str, str, str]]:
    """Cells of each part that takes time in either step."""
    for name, parts in ROWS.items():
        mine, other = (sum(each.step.parts[part] for part in parts) for each in (a, b))
        if mine or other:
            yield name, format_seconds(mine), format_seconds(other), f"{(other - mine) * 1e3:+,.4g} ms"


def memory(config: PlanMemoryConfig) -> dict[int, DeviceMemory]:
    """Print the memory of some ranks, write `out` where it is given, and return it by rank.

    Raises UserError if `out` cannot be written.
    """
    screen, hardware, seq = wide_screen(), config.hardware, config.data.seq_length
    layout = PlannedLayout.of(config, config.parallel.dp or 1)
    model = MemoryModel(counts_of(config, hardware.device), hardware.reserved_gib * GIB)
    peaks = {rank: peak_of(model, layout, rank) for rank in ranks(layout, config.rank)}
    capacity = hardware.memory_gib * GIB
    batch = f"{layout.micro_batches} micro-batches of {layout.micro_batch} x {seq} tokens"
    where = f"{layout.label} on {layout.gpus} GPUs of {hardware.name}"
    screen.print(f"{config.name} · {where} · {config.precision.dtype} · {batch}")
    rows: list[Row] = [
        {"rank": rank, "stage": stage_of(layout, rank), "parameters": peak.parameters}
        | {"moment": peak.moment, **memory_row(peak)}
        for rank, peak in peaks.items()
    ]
    show_table(screen, "", ("", *(f"rank {rank}#" for rank in peaks)), lines(layout, peaks))
    rank, fullest = max(peaks.items(), key=lambda each: each[1].total)
    screen.print(f"rank {rank} {fit(fullest.total, capacity)}")
    for line in layout_cautions(hardware, config.model, seq, layout):
        screen.print(line)
    values: dict[str, Any] = {"format": "mlm-plan-memory-1", "model": config.name}
    values |= {"layout": layout.settings(), "memory_bytes_per_gpu": capacity}
    write_rows(config.out, values, "ranks", rows, screen)
    return peaks


def ranks(layout: PlannedLayout, wanted: int | None) -> list[int]:
    """The first rank of the pipeline's first stage and of its last, and the wanted one."""
    last = (layout.pp - 1) * layout.gpus // layout.pp
    return sorted({0, last, last if wanted is None else wanted})


def peak_of(model: MemoryModel, layout: PlannedLayout, rank: int) -> DeviceMemory:
    """The peak of a global rank: rank = (stage * dp * cp + replica) * tp + tensor-parallel rank."""
    return model.peak(layout, stage_of(layout, rank), rank // layout.tp % (layout.dp * layout.cp))


def stage_of(layout: PlannedLayout, rank: int) -> int:
    """The pipeline rank of a global rank."""
    return rank // (layout.gpus // layout.pp)


def lines(layout: PlannedLayout, peaks: dict[int, DeviceMemory]) -> Iterator[tuple[str, ...]]:
    """Lines of the table: what each rank has, and its memory by part; parts that none has are left out."""
    stages = [stage_of(layout, rank) for rank in peaks]
    yield "stage", *map(str, stages)
    yield "parameters", *(format_amount(peak.parameters) for peak in peaks.values())
    yield "in flight" if layout.vp == 1 else "chunks in flight", *(str(in_flight(layout, n)) for n in stages)
    yield "fullest in", *(peak.moment for peak in peaks.values())
    for part in PARTS:
        if any(peak.parts[part] >= 0.005 * GIB for peak in peaks.values()):
            yield f"{part}, GiB", *(f"{peak.parts[part] / GIB:.2f}" for peak in peaks.values())
    yield "all, GiB", *(f"{peak.total / GIB:.2f}" for peak in peaks.values())
