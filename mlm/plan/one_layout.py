"""`mlm plan memory`: the memory of one layout by part, at both ends of its pipeline or any rank."""

from mlm.plan.config import PlanMemoryConfig
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import GIB, DeviceMemory, MemoryModel, gib, in_flight
from mlm.plan.report import format_amount, layout_cautions, memory_row, show_memory, wide_screen, write_rows

FORMAT = "mlm-plan-memory-1"


def run(config: PlanMemoryConfig) -> dict[int, DeviceMemory]:
    """Print the memory of some ranks, write `out` where it is given, and return it by rank.

    Raises UserError if `out` cannot be written.
    """
    screen, hardware, seq = wide_screen(), config.hardware, config.data.seq_length
    layout = PlannedLayout.of(config, config.parallel.dp or 1)
    counts = counts_of(config, hardware.device)
    memory = MemoryModel(counts, hardware.reserved_gib * GIB)
    peaks = {rank: peak_of(memory, layout, rank) for rank in ranks(layout, config.rank)}
    capacity = hardware.memory_gib * GIB
    batch = f"{layout.micro_batches} micro-batches of {layout.micro_batch} x {seq} tokens"
    where = f"{layout.label} on {layout.gpus} GPUs of {hardware.name}"
    screen.print(f"{config.name} · {where} · {config.precision.dtype} · {batch}")
    show_memory(peaks, "rank", capacity, screen)
    lines = [describe(layout, rank, peak) for rank, peak in peaks.items()]
    for line in (*lines, compare(peaks, capacity), *layout_cautions(hardware, config.model, seq, layout)):
        screen.print(line)
    values = {
        "format": FORMAT,
        "model": config.name,
        "layout": layout.settings(),
        "memory_bytes_per_gpu": capacity,
    }
    rows = [
        {
            "rank": rank,
            "stage": stage_of(layout, rank),
            "parameters": peak.parameters,
            "moment": peak.moment,
            **memory_row(peak),
        }
        for rank, peak in peaks.items()
    ]
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


def describe(layout: PlannedLayout, rank: int, peak: DeviceMemory) -> str:
    """A rank's place, its parameters, what it has in flight, and when it is fullest."""
    stage = stage_of(layout, rank)
    held = in_flight(layout, stage)
    unit = ("micro-batch", "micro-batches") if layout.vp == 1 else ("chunk", "chunks")
    moment = "when backward begins" if peak.moment == "backward" else "when the optimizer steps"
    return (
        f"rank {rank}: stage {stage} of {layout.pp}, {format_amount(peak.parameters)} parameters, "
        f"{held} {unit[held > 1]} in flight, fullest {moment}"
    )


def compare(peaks: dict[int, DeviceMemory], capacity: float) -> str:
    """A line that compares the fullest rank with the device."""
    rank, peak = max(peaks.items(), key=lambda each: each[1].total)
    left = capacity - peak.total
    fits = f"fits, {gib(left)} left" if left >= 0 else f"does not fit by {gib(-left)}"
    return f"rank {rank} needs {gib(peak.total)} of {gib(capacity)}: {fits}"
