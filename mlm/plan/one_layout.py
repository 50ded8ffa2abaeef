"""`mlm plan memory`: the memory of one layout by part, at both ends of its pipeline or any rank."""

from pathlib import Path

from rich.console import Console

from mlm.plan.config import PlanMemoryConfig
from mlm.plan.memory import GIB, DeviceMemory, MemoryModel, gib, in_flight
from mlm.plan.report import amount, as_csv, label, layout_cautions, say, show_memory, wide
from mlm.plan.shape import PlannedLayout
from mlm.util.results import target_name, write_result
from mlm.util.terminal import Screen

FORMAT = "mlm-plan-memory-1"


def run(config: PlanMemoryConfig, console: Console | None = None) -> dict[int, DeviceMemory]:
    """Print the memory of some ranks, write `out` where it is given, and return the peaks by rank.

    Raises UserError if `out` cannot be written.
    """
    console = wide(console or Screen())
    layout = layout_of(config)
    memory = MemoryModel(
        config.model,
        config.data.seq_length,
        config.precision.dtype,
        device=config.hardware.device,
        reserved=config.hardware.reserved_gib * GIB,
    )
    peaks = {rank: peak_of(memory, layout, rank) for rank in ranks(layout, config.rank)}
    capacity = config.hardware.memory_gib * GIB
    say(
        f"{config.name} · {label(layout)} on {layout.gpus} GPUs of {config.hardware.name} · "
        f"{config.precision.dtype} · {layout.micro_batches} micro-batches of {layout.micro_batch} x "
        f"{config.data.seq_length} tokens",
        console,
    )
    show_memory([(str(rank), peak) for rank, peak in peaks.items()], "rank", capacity, console)
    for rank, peak in peaks.items():
        say(described(layout, rank, peak), console)
    say(verdict(peaks, capacity), console)
    for line in layout_cautions(config.hardware, config.model, config.data.seq_length, layout):
        say(line, console)
    if config.out is not None:
        write(config, layout, peaks)
        say(f"written to {target_name(config.out)}", console)
    return peaks


def layout_of(config: PlanMemoryConfig) -> PlannedLayout:
    """The layout that the settings describe."""
    return PlannedLayout.of(
        config.parallel,
        dp=config.parallel.dp or 1,
        micro_batch=config.train.micro_batch_size,
        global_batch=config.train.global_batch_size,
    )


def ranks(layout: PlannedLayout, wanted: int | None) -> list[int]:
    """The first rank of the pipeline's first stage and of its last, and the wanted one."""
    last = (layout.pp - 1) * layout.tp * layout.dp
    return sorted({0, last, *([] if wanted is None else [wanted])})


def peak_of(memory: MemoryModel, layout: PlannedLayout, rank: int) -> DeviceMemory:
    """The peak of a global rank: rank = (stage * dp + replica) * tp + tensor-parallel rank."""
    stage, replica = rank // (layout.tp * layout.dp), rank // layout.tp % layout.dp
    return memory.peak(layout, stage, replica)


def described(layout: PlannedLayout, rank: int, peak: DeviceMemory) -> str:
    """A rank's place, its parameters, what it has in flight, and when it is fullest."""
    stage = rank // (layout.tp * layout.dp)
    held = in_flight(layout, stage)
    unit = "micro-batch" if layout.vp == 1 else "chunk"
    flight = f"{held} {unit}{'' if held == 1 else 'es' if layout.vp == 1 else 's'}"
    moment = "when backward begins" if peak.moment == "backward" else "when the optimizer steps"
    return (
        f"rank {rank}: stage {stage} of {layout.pp}, {amount(peak.parameters)} parameters, "
        f"{flight} in flight, fullest {moment}"
    )


def verdict(peaks: dict[int, DeviceMemory], capacity: float) -> str:
    """A line that compares the fullest rank with the device."""
    rank, peak = max(peaks.items(), key=lambda each: each[1].total)
    left = capacity - peak.total
    if left >= 0:
        return f"rank {rank} needs {gib(peak.total)} of {gib(capacity)}: fits, {gib(left)} left"
    return f"rank {rank} needs {gib(peak.total)} of {gib(capacity)}: does not fit by {gib(-left)}"


def write(config: PlanMemoryConfig, layout: PlannedLayout, peaks: dict[int, DeviceMemory]) -> None:
    """Write the peaks to `out`, by its ending. Raises UserError."""
    assert config.out is not None
    rows = [
        {
            "rank": rank,
            "stage": rank // (layout.tp * layout.dp),
            "parameters": peak.parameters,
            "moment": peak.moment,
            "memory_bytes": peak.total,
            **{f"{name.replace(' ', '_')}_bytes": value for name, value in peak.parts.items()},
        }
        for rank, peak in peaks.items()
    ]
    if Path(config.out).suffix == ".csv":
        write_result(config.out, as_csv(rows))
        return
    write_result(
        config.out,
        {
            "format": FORMAT,
            "model": config.name,
            "layout": layout.settings(),
            "memory_bytes_per_gpu": config.hardware.memory_gib * GIB,
            "ranks": rows,
        },
    )
