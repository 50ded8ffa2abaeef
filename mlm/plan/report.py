"""Forecasts of layouts as rows for JSON and CSV, and as printed tables."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from mlm.config.build import to_dict
from mlm.models.config import ModelConfig
from mlm.models.shape import architecture_of
from mlm.plan.candidates import Query
from mlm.plan.config import PlannedRunConfig
from mlm.plan.hardware import HardwareConfig, gib
from mlm.plan.layout import DEFAULTS, hardware_flops, model_flops
from mlm.plan.memory import DeviceMemory
from mlm.plan.search import LayoutForecast
from mlm.util.results import save_result
from mlm.util.terminal import add_row, console, table

HOUR, DAY = 3600.0, 86400.0
WIDTH = 100  # columns of the widest table
Range = tuple[float, float]
COMPARED: Range = (0.93, 1.23)
"""Measured over predicted time of four of five published steps (plan_published.py)."""
UNCOMPARED: Range = (0.92, 1.37)
"""Measured over predicted time of nine of ten: for runs unlike the published ones."""
Row = Mapping[str, Any]


def as_row(
    query: Query, forecast: LayoutForecast, tokens: float | None = None, price: float | None = None
) -> Row:
    """Return a layout's flat row: settings, speed, seconds and bytes by part.

    Days and price are for `tokens` tokens, `price` per GPU and hour.
    """
    layout, step, memory = forecast.layout, forecast.step, forecast.memory
    seq, batch, seconds = query.run.data.seq_length, query.run.train.global_batch_size, step.total
    shape, rate = (query.run.model, seq, batch), batch * seq / seconds
    per_gpu = 1 / (seconds * layout.gpus * 1e12)
    model = model_flops(*shape, layout.tp) * per_gpu
    low, high = time_range(query.hardware, query.run.model, layout.gpus)[0]
    length = None if tokens is None else tokens / rate
    sizes = ("micro_batch", "global_batch")
    settings = {name: getattr(layout, name) for name in DEFAULTS if name not in sizes}
    return {
        "layout": layout.label,
        **settings,
        "micro_batch_size": layout.micro_batch,
        "global_batch_size": layout.global_batch,
        "step_s": seconds,
        "step_low_s": seconds * low,
        "step_high_s": seconds * high,
        "tokens_per_s": rate,
        "model_tflops": model,
        "hardware_tflops": hardware_flops(*shape, layout.recompute, layout.tp) * per_gpu,
        "mfu": model * 1e12 / query.hardware.peak(query.run.precision.dtype),
        "days": None if length is None else length / DAY,
        "gpus": layout.gpus,
        "gpu_hours_per_billion": 1e9 / rate / HOUR * layout.gpus,
        "price": None if length is None or price is None else length / HOUR * layout.gpus * price,
        **{f"{name}_s": value for name, value in step.parts.items()},
        **memory_row(memory),
    }


def memory_row(memory: DeviceMemory) -> Row:
    """Return a row of the bytes of a device and of each part."""
    parts = {f"{name.replace(' ', '_')}_bytes": value for name, value in memory.parts.items()}
    return {"memory_bytes": memory.total, **parts}


def write_rows(config: PlannedRunConfig, command: str, facts: Mapping[str, Any], screen: Console) -> None:
    """Write `out` if it is set: the rows, the last of `facts`, as .csv, or all facts as JSON."""
    *_, rows = facts.values()
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    is_table = config.out is not None and Path(config.out).suffix == ".csv"
    document = {"format": f"mlm-plan-{command}-1", "settings": to_dict(config), **facts}
    save_result(config.out, text.getvalue().encode() if is_table else document, screen.print)


def format_seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def format_fit(needed: float, capacity: float) -> str:
    """Return `needs 42.5 GiB of 79.2 GiB: fits, 36.7 GiB left`."""
    free = capacity - needed
    words = f"fits, {gib(free)} left" if free >= 0 else f"does not fit by {gib(-free)}"
    return f"needs {gib(needed)} of {gib(capacity)}: {words}"


def time_range(hardware: HardwareConfig, model: ModelConfig, gpus: int) -> tuple[Range, list[str]]:
    """Return the range of a step's time, as shares of it, and the assumptions of the prediction."""
    constants = "constants of other programs (`mlm plan calibrate` measures this one's)"
    assumptions = ["this machine's rate at usual sizes" if hardware.is_calibrated else constants]
    if hardware.network_is_assumed and gpus > hardware.devices_per_node:
        assumptions.append("links between nodes that were not measured")
    if architecture_of(model).experts:
        assumptions.append("even loads of experts")
    return (COMPARED if len(assumptions) == 1 else UNCOMPARED), assumptions


def time_caution(assumptions: Iterable[str]) -> str:
    """Return a line on the assumptions of predicted times."""
    caution = "times are ranges that held four of five published runs, and speeds are the prediction's"
    return f"{caution}: they rest on {' and '.join(assumptions)}"


def format_range(low: float, high: float, form: Callable[[float], str]) -> str:
    """Format a range of values as `226-319 ms`."""
    first, last = form(low), form(high)
    number, _, unit = first.partition(" ")
    return f"{number if last.endswith(f' {unit}') else first}-{last}"


def wide_screen() -> Console:
    """Return a console at least as wide as the tables."""
    screen = console()
    screen.width = max(screen.width, WIDTH)
    return screen


def show_table(screen: Console, title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table if it has rows; integers have commas."""
    grid, rows = table(title, *columns), list(rows)
    grid.padding = 0
    for row in rows:
        add_row(grid, *(f"{cell:,}" if type(cell) is int else cell for cell in row))
    if rows:
        screen.print(grid)
