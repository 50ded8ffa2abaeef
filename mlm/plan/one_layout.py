"""`mlm plan memory`: the memory of one layout by part, at both ends of its pipeline or any rank."""

from collections.abc import Iterator

from mlm.plan.config import PlanMemoryConfig
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import GIB, PARTS, DeviceMemory, MemoryModel, in_flight
from mlm.plan.report import (
    fit,
    format_amount,
    layout_cautions,
    memory_row,
    show_table,
    wide_screen,
    write_rows,
)

FORMAT = "mlm-plan-memory-1"


def run(config: PlanMemoryConfig) -> dict[int, DeviceMemory]:
    """Print the memory of some ranks, write `out` where it is given, and return it by rank.

    Raises UserError if `out` cannot be written.
    """
    screen, hardware, seq = wide_screen(), config.hardware, config.data.seq_length
    layout = PlannedLayout.of(config, config.parallel.dp or 1)
    memory = MemoryModel(counts_of(config, hardware.device), hardware.reserved_gib * GIB)
    peaks = {rank: peak_of(memory, layout, rank) for rank in ranks(layout, config.rank)}
    capacity = hardware.memory_gib * GIB
    batch = f"{layout.micro_batches} micro-batches of {layout.micro_batch} x {seq} tokens"
    where = f"{layout.label} on {layout.gpus} GPUs of {hardware.name}"
    screen.print(f"{config.name} · {where} · {config.precision.dtype} · {batch}")
    rows = [
        {
            **{"rank": rank, "stage": stage_of(layout, rank), "parameters": peak.parameters},
            **{"moment": peak.moment, **memory_row(peak)},
        }
        for rank, peak in peaks.items()
    ]
    show_table(screen, "", ("", *(f"rank {rank}#" for rank in peaks)), lines(layout, peaks))
    rank, fullest = max(peaks.items(), key=lambda each: each[1].total)
    screen.print(f"rank {rank} {fit(fullest.total, capacity)}")
    for line in layout_cautions(hardware, config.model, seq, layout):
        screen.print(line)
    values = {
        "format": FORMAT,
        "model": config.name,
        "layout": layout.settings(),
        "memory_bytes_per_gpu": capacity,
    }
    write_rows(config.out, values, "ranks", rows, screen)
    return peaks


def ranks(layout: PlannedLayout, wanted: int | None) -> list[int]:
    """The first rank of the pipeline's first stage and of its last, and the wanted one."""
    last = (layout.pp - 1) * layout.gpus // layout.pp
    return sorted({0, last, last if wanted is None else wanted})


def peak_of(memory: MemoryModel, layout: PlannedLayout, rank: int) -> DeviceMemory:
    """The peak of a global rank: rank = (stage * dp * cp + replica) * tp + tensor-parallel rank."""
    return memory.peak(layout, stage_of(layout, rank), rank // layout.tp % (layout.dp * layout.cp))


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
