"""Planned layouts as rows of numbers, which JSON and CSV hold, and as the tables that are printed."""

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
"""Shares of the predicted time between which four of five published steps were (plan_published.py)."""
UNCOMPARED: Range = (0.92, 1.37)
"""Those between which nine of ten were: the range of what is like none of them."""
Row = Mapping[str, Any]


def as_row(
    query: Query, forecast: LayoutForecast, tokens: float | None = None, price: float | None = None
) -> Row:
    """A layout as a flat row: settings, numbers, seconds and bytes by part.

    Days and price are for so many tokens, at the price of a GPU for an hour.
    """
    layout, step, memory = forecast.layout, forecast.step, forecast.memory
    seq, batch, seconds = query.run.data.seq_length, query.run.train.global_batch_size, step.total
    counted, rate = (query.run.model, seq, batch), batch * seq / seconds
    per_gpu = 1 / (seconds * layout.gpus * 1e12)
    model = model_flops(*counted, layout.tp) * per_gpu
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
        "hardware_tflops": hardware_flops(*counted, layout.recompute, layout.tp) * per_gpu,
        "mfu": model * 1e12 / query.hardware.peak(query.run.precision.dtype),
        "days": None if length is None else length / DAY,
        "gpus": layout.gpus,
        "gpu_hours_per_billion": 1e9 / rate / HOUR * layout.gpus,
        "price": None if length is None or price is None else length / HOUR * layout.gpus * price,
        **{f"{name}_s": value for name, value in step.parts.items()},
        **memory_row(memory),
    }


def memory_row(memory: DeviceMemory) -> Row:
    """Bytes of a device and of each part."""
    parts = {f"{name.replace(' ', '_')}_bytes": value for name, value in memory.parts.items()}
    return {"memory_bytes": memory.total, **parts}


def write_rows(config: PlannedRunConfig, command: str, facts: Mapping[str, Any], screen: Console) -> None:
    """Write the rows of a command where `out` is given: the last of `facts`, as a .csv, or all as JSON."""
    *_, rows = facts.values()
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    is_table = config.out is not None and Path(config.out).suffix == ".csv"
    whole = {"format": f"mlm-plan-{command}-1", "settings": to_dict(config), **facts}
    save_result(config.out, text.getvalue().encode() if is_table else whole, screen.print)


def format_seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def fit(needed: float, capacity: float) -> str:
    """`needs 42.5 GiB of 79.2 GiB: fits, 36.7 GiB left`."""
    left = capacity - needed
    words = f"fits, {gib(left)} left" if left >= 0 else f"does not fit by {gib(-left)}"
    return f"needs {gib(needed)} of {gib(capacity)}: {words}"


def time_range(hardware: HardwareConfig, model: ModelConfig, gpus: int) -> tuple[Range, list[str]]:
    """Range of a step's time, as shares of it, and what it rests on."""
    constants = "constants of other programs (`mlm plan calibrate` measures this one's)"
    rests = ["this machine's rate at usual sizes" if hardware.is_calibrated else constants]
    if hardware.network_is_assumed and gpus > hardware.devices_per_node:
        rests.append("links between nodes that were not measured")
    if architecture_of(model).experts:
        rests.append("even loads of experts")
    return (COMPARED if len(rests) == 1 else UNCOMPARED), rests


def time_caution(rests: Iterable[str]) -> str:
    """A line on what times rest on."""
    caution = "times are ranges that held four of five published runs, and speeds are the prediction's"
    return f"{caution}: they rest on {' and '.join(rests)}"


def spread(low: float, high: float, form: Callable[[float], str]) -> str:
    """`226-319 ms`: a range of values."""
    first, last = form(low), form(high)
    number, _, unit = first.partition(" ")
    return f"{number if last.endswith(f' {unit}') else first}-{last}"


def wide_screen() -> Console:
    """A console of the width that the tables need where the terminal's is less."""
    screen = console()
    screen.width = max(screen.width, WIDTH)
    return screen


def show_table(screen: Console, title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """Print a table if it has rows, whole numbers with commas."""
    grid, rows = table(title, *columns), list(rows)
    grid.padding = 0
    for row in rows:
        add_row(grid, *(f"{cell:,}" if type(cell) is int else cell for cell in row))
    if rows:
        screen.print(grid)
