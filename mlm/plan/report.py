"""Planned layouts as rows of numbers, which JSON and CSV hold, and as the tables that are printed."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mlm.models.config import ModelConfig
from mlm.plan.candidates import Query
from mlm.plan.hardware import HardwareConfig
from mlm.plan.layout import DEFAULTS, PlannedLayout, hardware_flops, model_flops
from mlm.plan.memory import GIB, DeviceMemory
from mlm.plan.memory import PARTS as MEMORY_PARTS
from mlm.plan.search import LayoutForecast
from mlm.util.results import target_name, write_result
from mlm.util.terminal import PlainScreen, add_row, table

HOUR, DAY = 3600.0, 86400.0
WIDTH = 100  # columns of the widest table
LONG_SEQUENCE = 8192
"""Tokens from which on a length that was not typed is worth a line: a model's most positions."""
SHORT = {
    "cast weights": "cast",
    "vocabulary": "vocab",
    "communication": "buffers",
    "elementwise": "elementw.",
    "activations": "activat.",
    "allocator": "reserved",
}
"""Headings of parts, where a column is narrow."""
TIME_COLUMNS = (
    ("products", ("matmul", "vocabulary")),
    *((SHORT.get(part, part), (part,)) for part in ("attention", "elementwise", "recompute", "optimizer")),
    ("tp+cp+ep", ("tp", "cp", "ep")),
    *((part, (part,)) for part in ("pp", "dp", "bubble")),
)
"""Columns of the table of time: heading, parts of a step."""
Row = Mapping[str, Any]


def as_row(
    query: Query,
    forecast: LayoutForecast,
    tokens: float | None = None,
    price: float | None = None,
    share: float = 1.0,
) -> Row:
    """A layout as a flat row: settings, numbers, seconds and bytes by part.

    Days, energy and price are those of so many tokens, at the price of a GPU for an hour, with this share of
    the time progress.
    """
    layout, step, memory = forecast.layout, forecast.step, forecast.memory
    counted = (query.model, query.seq, query.global_batch)
    rate, seconds = query.global_batch * query.seq / step.total, step.total
    per_gpu = 1 / (seconds * layout.gpus * 1e12)
    model = model_flops(*counted, layout.tp) * per_gpu
    length, power = None if tokens is None else tokens / rate / share, query.hardware.power_w
    sizes = ("micro_batch", "global_batch")
    settings = {name: getattr(layout, name) for name in DEFAULTS if name not in sizes}
    return {
        "layout": layout.label,
        **settings,
        "micro_batch_size": layout.micro_batch,
        "global_batch_size": layout.global_batch,
        "step_s": seconds,
        "tokens_per_s": rate,
        "model_tflops": model,
        "hardware_tflops": hardware_flops(*counted, layout.recompute, layout.tp) * per_gpu,
        "mfu": model * 1e12 / query.hardware.peak(query.run.precision.dtype),
        "days": None if length is None else length / DAY,
        "gpus": layout.gpus,
        "gpu_hours_per_billion": 1e9 / rate / share / HOUR * layout.gpus,
        "energy_mwh": None if length is None or power is None else length / HOUR * power * layout.gpus / 1e6,
        "price": None if length is None or price is None else length / HOUR * layout.gpus * price,
        "bubble": step.bubble,
        **{f"{name}_s": value for name, value in step.parts.items()},
        **memory_row(memory),
    }


def memory_row(memory: DeviceMemory) -> Row:
    """Bytes of a device and of each part."""
    parts = {f"{name.replace(' ', '_')}_bytes": value for name, value in memory.parts.items()}
    return {"memory_bytes": memory.total, **parts}


def write_rows(
    out: str | None, values: Mapping[str, Any], name: str, rows: Sequence[Row], screen: Console
) -> None:
    """Write rows to `out` where it is given: a .csv, or a JSON of values with the rows by this name.

    Raises UserError if it cannot be written.
    """
    if out is None:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    is_table = Path(out).suffix == ".csv"
    write_result(out, text.getvalue().encode() if is_table else {**values, name: rows})
    screen.print(f"written to {target_name(out)}")


def format_seconds(value: float) -> str:
    """A time in three figures."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def format_amount(value: float) -> str:
    """A number in three figures: 1.23M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def step_range(hardware: HardwareConfig, step_s: float) -> str:
    """`226 ms to 319 ms`: the range of a step's time by `time_error`; empty where none is known."""
    error = None if hardware.is_calibrated else hardware.time_error
    if not error:
        return ""
    return f"{format_seconds(step_s / (1 + error))} to {format_seconds(step_s * (1 + error))}"


def time_caution(hardware: HardwareConfig, step_s: float) -> list[str]:
    """A line on a step's time that rests on constants of other programs; none where they were measured."""
    if hardware.is_calibrated:
        return []
    expected = step_range(hardware, step_s)
    known = f"expect {expected} a step" if expected else "never compared with a run"
    fix = "`mlm plan calibrate` measures this one's"
    return [f"times rest on constants of other programs, {known}; {fix}"]


def layout_cautions(
    hardware: HardwareConfig, model: ModelConfig, seq: int, layout: PlannedLayout
) -> list[str]:
    """Lines on a sequence as long as the model's positions, and on tp across nodes."""
    lines = []
    if seq == model.max_positions > LONG_SEQUENCE:
        fix = f"data.seq_length={LONG_SEQUENCE} plans shorter ones"
        lines.append(f"sequences are as long as the model's positions, {seq:,}; {fix}")
    if hardware.device == "gpu" and layout.tp > hardware.devices_per_node:
        lines.append(
            f"warning: tp={layout.tp} crosses nodes of {hardware.devices_per_node}: the network carries each "
            f"layer's all-reduces (arXiv:2104.04473, section 3.2); use tp={hardware.devices_per_node} or less"
        )
    return lines


def wide_screen() -> Console:
    """A console of the width that the tables need where the terminal's is less."""
    screen = PlainScreen(highlight=False, markup=False, soft_wrap=True)
    screen.width = max(screen.width, WIDTH)
    return screen


def narrow_table(title: str, *columns: str) -> Table:
    """As `table`, with one space between columns."""
    made = table(title, *columns)
    made.padding = 0
    return made


def show_speed(rows: Sequence[Row], screen: Console) -> None:
    """The table of layouts."""
    headings = {"days": "days", "energy_mwh": "MWh", "price": "price"}
    if len({row["gpus"] for row in rows}) > 1:
        headings = {"gpus": "GPUs", "gpu_hours_per_billion": "GPUh/Gtok", **headings}
    more = [key for key in headings if rows[0][key] is not None]
    columns = ("step#", "tokens/s#", "TFLOP/s#", "MFU#", "GiB#", *(f"{headings[key]}#" for key in more))
    made = narrow_table("", " ##", "layout", *columns)
    for number, row in enumerate(rows, start=1):
        tflops = f"{row['model_tflops']:.0f}"
        if row["recompute"] == "full":
            tflops += f" ({row['hardware_tflops']:.0f})"
        cells = (format_seconds(row["step_s"]), format_amount(row["tokens_per_s"]), tflops)
        sizes = (f"{row['mfu']:.1%}", f"{row['memory_bytes'] / GIB:.1f}")
        add_row(made, number, row["layout"], *cells, *sizes, *(format_amount(row[key]) for key in more))
    screen.print(made)


def show_time(rows: Sequence[Row], screen: Console) -> None:
    """Shares of the step's time; tp, pp and dp are communication that no computation hides."""
    headings = (f"{heading}#" for heading, _ in TIME_COLUMNS)
    made = narrow_table("share of the step; tp, pp, dp: exposed communication", " ##", *headings)
    for number, row in enumerate(rows, start=1):
        shares = (sum(row[f"{name}_s"] for name in names) / row["step_s"] for _, names in TIME_COLUMNS)
        add_row(made, number, *(f"{share:.1%}" for share in shares))
    screen.print(made)


def show_memory(peaks: Mapping[int, DeviceMemory], heading: str, capacity: float, screen: Console) -> None:
    """Memory by part, a line per row; parts that no row has are left out."""
    used = [p for p in MEMORY_PARTS if any(peak.parts[p] >= 0.005 * GIB for peak in peaks.values())]
    columns = (f"{SHORT.get(part, part)}#" for part in used)
    title = f"memory per GPU at its fullest, GiB of {capacity / GIB:.1f}"
    made = narrow_table(title, f"{heading}#", *columns, "all#")
    for name, peak in peaks.items():
        cells = (f"{peak.parts[part] / GIB:.2f}" for part in used)
        add_row(made, name, *cells, f"{peak.total / GIB:.2f}")
    screen.print(made)
