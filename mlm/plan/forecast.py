"""Needs and expected speed of a pretraining run before it starts: a line, and a warning if it does not fit.

Nothing is rejected on an estimate. Model families and context parallelism, which the formulas do not know,
have no forecast.
"""

import ctypes
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from mlm.launch.environment import read_rank_place
from mlm.launch.process import device_kind
from mlm.launch.start import choose_world_size
from mlm.models.family import SHIPPED
from mlm.parallel.layout_checks import Launch
from mlm.plan.hardware import HardwareConfig, calibrated, preset_of_gpu
from mlm.plan.memory import GIB, MemoryModel, gib
from mlm.plan.report import seconds, spread
from mlm.plan.search import Models, Query, layouts
from mlm.plan.shape import Layout
from mlm.tracking.summary import Predicted
from mlm.training.config import PretrainConfig
from mlm.util.errors import format_settings
from mlm.util.system import host_memory

GPU_RESERVED, CPU_RESERVED = 1.5 * GIB, 0.3 * GIB
"""Bytes that a rank has before the model: driver and libraries on a GPU, the program on a CPU."""
MOST_SIMULATED = 1 << 12
"""Pairs of stage and micro-batch up to which the line before a run simulates its pipeline."""
NAME_BYTES = 96  # of a GPU's name in NVML

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of a run."""

    device: str
    """gpu or cpu."""
    capacity: float
    """Bytes of memory of one rank: of its GPU, or its share of the host."""
    reserved: float
    """Bytes of them that no tensor can use."""
    hardware: HardwareConfig | None
    """Its speed, as far as that is known."""
    source: str
    """Source of `hardware`."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A run's predicted numbers."""

    query: Query
    layout: Layout
    machine: Machine
    memory: float
    """Bytes of the fullest rank."""
    first_memory: float
    """Bytes of rank 0."""
    step_s: float | None
    """None where the hardware's speed is unknown."""
    mfu: float | None

    @property
    def fits(self) -> bool:
        """True if the fullest rank has the memory that it needs."""
        return self.memory <= self.machine.capacity


def lines(config: PretrainConfig, facts: Launch) -> list[str]:
    """Lines to print before a run starts; empty where nothing can be said. Never raises."""
    try:
        place = read_rank_place(os.environ)
        ranks = choose_world_size(config.parallel, facts)
        found = forecast(
            config, ranks, machine_of(config, place.local_world_size if place else ranks), quick=True
        )
        if found is None:
            return []
        return [summary(found), *(() if found.fits else [warning(found)])]
    except Exception as error:  # a forecast must not be in the way of a run
        log.debug("no forecast: %r", error)
        return []


def predicted(config: PretrainConfig, ranks: int) -> Predicted | None:
    """The forecast as a run's summary shows it, in one of its ranks; None without one. Never raises."""
    try:
        place = read_rank_place(os.environ)
        found = forecast(config, ranks, machine_of(config, place.local_world_size if place else ranks))
    except Exception as error:
        log.debug("no forecast: %r", error)
        return None
    if found is None:
        return None
    hardware, machine = found.machine.hardware, found.machine
    name = "" if hardware is None or found.step_s is None else f"{hardware.name} ({machine.source})"
    return Predicted(found.step_s, found.first_memory, found.mfu, name)


def forecast(
    config: PretrainConfig, ranks: int, machine: Machine | None, *, quick: bool = False
) -> Forecast | None:
    """The forecast of a run on so many ranks; None for custom families, cp > 1 and unknown machines.

    `quick` takes the bound of a long pipeline's time, a few per cent below, and not its simulation.
    """
    if machine is None or config.model.kind not in SHIPPED or config.parallel.cp > 1:
        return None
    parallel, train = config.parallel, config.train
    layout = Layout.of(
        parallel,
        dp=ranks // (parallel.tp * parallel.pp),
        micro_batch=train.micro_batch_size,
        global_batch=train.global_batch_size,
    )
    dtype, seq = config.precision.dtype, config.data.seq_length
    memory = MemoryModel(config.model, seq, dtype, device=machine.device, reserved=machine.reserved)
    query = Query(
        model=config.model,
        hardware=machine.hardware or blank(machine),
        gpus=ranks,
        seq=seq,
        global_batch=train.global_batch_size,
        dtype=dtype,
    )
    pairs = layout.pp * layout.vp * min(layout.micro_batches, 3 * layout.pp)
    step_s, mfu = None, None
    if machine.hardware is not None:
        step_s, mfu = speed(query, layout, simulate=not quick or pairs <= MOST_SIMULATED)
    return Forecast(
        query=query,
        layout=layout,
        machine=machine,
        memory=memory.worst(layout).total,
        first_memory=memory.peak(layout).total,
        step_s=step_s,
        mfu=mfu,
    )


def speed(query: Query, layout: Layout, *, simulate: bool) -> tuple[float | None, float | None]:
    """Step time and MFU; nothing where the hardware's peak is unknown, or CPU ranks share cores."""
    hardware, dtype = query.hardware, query.dtype
    if getattr(hardware.peak_tflops, dtype) is None:
        return None, None
    if hardware.device == "cpu" and layout.gpus > hardware.devices_per_node:
        return None, None
    models = Models(query)
    cost = models.cost(layout.tp)
    step = cost.step(layout).total if simulate else cost.bound(layout)
    flops = cost.shape.model_flops(layout.global_batch)
    return step, flops / (step * layout.gpus * models.hardware.peak(dtype))


def blank(machine: Machine) -> HardwareConfig:
    """Hardware of which nothing but the memory is known."""
    return HardwareConfig(
        name="this machine",
        device="cpu" if machine.device == "cpu" else "gpu",
        devices_per_node=1,
        memory_gib=machine.capacity / GIB,
        reserved_gib=machine.reserved / GIB,
        memory_gbps=1.0,
        node_gbps=1.0,
        node_latency_us=0.0,
        network_gbps=1.0,
        network_latency_us=0.0,
    )


def machine_of(config: PretrainConfig, local_ranks: int) -> Machine | None:
    """This machine: as it was calibrated, by the preset of its GPU, or its memory alone."""
    own = calibrated()
    if device_kind(config.dist) == "cpu":
        known = own if own is not None and own.device == "cpu" else None
        reserved = CPU_RESERVED if known is None else known.reserved_gib * GIB
        return Machine("cpu", host_memory() / local_ranks, reserved, known, "hardware=this")
    name, size = first_gpu()
    known = preset_of_gpu(name)
    reserved = GPU_RESERVED if known is None else known.reserved_gib * GIB
    if own is not None and own.device == "gpu":
        return Machine("gpu", size, reserved, own, "hardware=this")
    return Machine("gpu", size, reserved, known, "a preset")


def first_gpu() -> tuple[str, int]:
    """Name and memory in bytes of the host's first GPU, by NVML: torch would open a context.

    Raises OSError.
    """

    class Memory(ctypes.Structure):
        _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))

    library, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    name, memory = ctypes.create_string_buffer(NAME_BYTES), Memory()
    calls = (
        library.nvmlInit_v2(),
        library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)),
        library.nvmlDeviceGetName(device, name, NAME_BYTES),
        library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)),
    )
    library.nvmlShutdown()
    if any(calls):
        raise OSError(f"NVML answers {calls}")
    return name.value.decode(), int(memory.total)


def summary(found: Forecast) -> str:
    """`needs 61.0 GiB of 79.2 GiB per GPU; 41% MFU expected (DGX A100 80GB)`."""
    machine, ranks = found.machine, found.layout.gpus
    if machine.device == "cpu":
        local = round(host_memory() / machine.capacity)
        need = f"{local} ranks need {gib(found.memory)} each" if local > 1 else f"needs {gib(found.memory)}"
        words = f"{need}; this host has {gib(host_memory())}"
    else:
        words = f"needs {gib(found.memory)} of {gib(machine.capacity)} per GPU"
    if found.step_s is None or found.mfu is None or machine.hardware is None:
        return words
    name = f"{machine.hardware.name}, {ranks} ranks" if ranks > 1 else machine.hardware.name
    if expected := spread(machine.hardware, found.step_s):
        name = f"{expected} by constants of other programs; {name}"
    return f"{words}; {seconds(found.step_s)} a step and {found.mfu:.0%} MFU expected ({name})"


def warning(found: Forecast) -> str:
    """The nearest layout that fits, with what it changes."""
    lacks = gib(found.memory - found.machine.capacity)
    nearest = nearest_fit(found)
    if nearest is None:
        return (
            f"warning: {lacks} may be lacking, and no layout on this many ranks fits; start more, or train a "
            "smaller model"
        )
    before, after = found.layout.settings(), nearest.settings()
    changed = {
        key: after.get(key, default(key)) for key in {**after, **before} if before.get(key) != after.get(key)
    }
    return f"warning: {lacks} may be lacking; the nearest layout that fits: {format_settings(changed)}"


def default(key: str) -> object:
    """The value of a setting that `Layout.settings` leaves out."""
    return {"vp": 1, "zero": 0, "sequence_parallel": False}.get(key, getattr(Layout(), key, None))


def nearest_fit(found: Forecast) -> Layout | None:
    """The layout on as many ranks that fits, with the fewest settings changed and the most memory used."""
    memory = MemoryModel(
        found.query.model,
        found.query.seq,
        found.query.dtype,
        device=found.machine.device,
        reserved=found.machine.reserved,
    )
    for fixed in narrowing(found.layout):
        fitting = []
        for layout in layouts(found.query.replaced(fixed=fixed)):
            if (size := memory.worst(layout).total) <= found.machine.capacity:
                fitting.append((distance(layout, found.layout), -size, layout))
        if fitting:
            return min(fitting, key=lambda each: each[:2])[2]
    return None


def narrowing(layout: Layout) -> Iterator[dict[str, Any]]:
    """Settings to keep while a layout that fits is looked for: the ranks' first, then only the batch's."""
    kept = {"tp": layout.tp, "pp": layout.pp, "vp": layout.vp, "dp": layout.dp, "pipeline": layout.pipeline}
    yield {**kept, "zero": layout.zero, "sequence_parallel": layout.sequence_parallel}
    yield kept
    yield {"vp": 1, "pipeline": "1f1b", "recompute": "full", "micro_batch": 1, "zero_reduce": "every"}
    yield {"vp": 1, "pipeline": "1f1b", "recompute": "full", "micro_batch": 1, "zero_reduce": "last"}


def distance(layout: Layout, other: Layout) -> int:
    """Settings in which two layouts differ."""
    return sum(getattr(layout, each.name) != getattr(other, each.name) for each in fields(Layout))
