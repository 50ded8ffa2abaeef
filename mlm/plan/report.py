"""Numbers of planned layouts: what is printed, and what JSON and CSV hold."""

import csv
import io
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlm.models.config import ModelConfig
from mlm.plan.hardware import HardwareConfig
from mlm.plan.memory import GIB, DeviceMemory
from mlm.plan.memory import PARTS as MEMORY_PARTS
from mlm.plan.search import LayoutForecast, Query
from mlm.plan.shape import PlannedLayout, Shape
from mlm.util.terminal import Screen

HOUR, DAY = 3600.0, 86400.0
WIDTH = 100  # columns of the widest table
SHORT = {
    "cast weights": "cast",
    "vocabulary": "vocab",
    "communication": "buffers",
    "elementwise": "elementw.",
    "activations": "activat.",
    "allocator": "reserved",
}
"""Headings of parts, where a column is narrow."""


@dataclass(frozen=True)
class Numbers:
    """Costs and yield of a layout."""

    step_s: float
    tokens_per_s: float
    model_tflops: float
    """Per GPU, without recomputation."""
    hardware_tflops: float
    """Per GPU, with it."""
    mfu: float
    days: float | None
    energy_mwh: float | None
    price: float | None


def numbers(query: Query, planned: LayoutForecast, tokens: float | None, price: float | None) -> Numbers:
    """Numbers of one layout; days, energy and price for a number of tokens."""
    layout, seconds = planned.layout, planned.step.total
    shape = Shape(query.model, query.seq, layout.tp)
    rate = query.global_batch * query.seq / seconds
    per_gpu = 1 / (seconds * layout.gpus * 1e12)
    model = shape.model_flops(query.global_batch) * per_gpu
    length, power = None if tokens is None else tokens / rate, query.hardware.power_w
    return Numbers(
        step_s=seconds,
        tokens_per_s=rate,
        model_tflops=model,
        hardware_tflops=shape.hardware_flops(layout.recompute, query.global_batch) * per_gpu,
        mfu=model * 1e12 / query.hardware.peak(query.dtype),
        days=None if length is None else length / DAY,
        energy_mwh=None if length is None or power is None else length / HOUR * power * layout.gpus / 1e6,
        price=None if length is None or price is None else length / HOUR * layout.gpus * price,
    )


def label(layout: PlannedLayout) -> str:
    """A layout in few words: `tp8 pp4 vp2 dp16 sp zero2 full mb4`."""
    words = [f"tp{layout.tp}", f"pp{layout.pp}"]
    words += [f"vp{layout.vp}"] if layout.vp > 1 else []
    words += [f"dp{layout.dp}"]
    words += ["sp"] if layout.sequence_parallel else []
    words += [layout.pipeline] if layout.pipeline != "1f1b" else []
    words += [f"zero{layout.zero}"] if layout.zero else []
    words += ["every"] if layout.zero_reduce == "every" else []
    words += [layout.recompute] if layout.recompute != "none" else []
    return " ".join([*words, f"mb{layout.micro_batch}"])


def seconds(value: float) -> str:
    """A time in three figures."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def amount(value: float) -> str:
    """A number in three figures: 1.23M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


LONG_SEQUENCE = 8192
"""Tokens from which on a length that was not typed is worth a line: a model's most positions."""


def time_caution(hardware: HardwareConfig, step_s: float) -> list[str]:
    """A line on a step's time that rests on constants of other programs; none where they were measured."""
    if hardware.is_calibrated:
        return []
    known = (
        f"expect {spread(hardware, step_s)} a step" if hardware.time_error else "never compared with a run"
    )
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


def spread(hardware: HardwareConfig, step_s: float) -> str:
    """`226 ms to 319 ms`: the range of a step's time by `time_error`; empty where none is known."""
    error = None if hardware.is_calibrated else hardware.time_error
    return f"{seconds(step_s / (1 + error))} to {seconds(step_s * (1 + error))}" if error else ""


def new_table(title: str) -> Table:
    """A table without vertical lines."""
    return Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0), pad_edge=False)


def wide(console: Console) -> Console:
    """The console, with the width that the tables need where its own is less."""
    if console.width >= WIDTH:
        return console
    return Screen(file=console.file, width=WIDTH, no_color=console.no_color)


def show_speed(query: Query, found: list[LayoutForecast], each: list[Numbers], console: Console) -> None:
    """The table of layouts, fastest first."""
    table = new_table("")
    table.add_column("#", justify="right")
    table.add_column("layout", no_wrap=True)
    headings = ["step", "tokens/s", "TFLOP/s", "MFU", "GiB"]
    headings += ["days"] if each and each[0].days is not None else []
    headings += ["MWh"] if each and each[0].energy_mwh is not None else []
    headings += ["price"] if each and each[0].price is not None else []
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, (planned, its) in enumerate(zip(found, each, strict=True), start=1):
        tflops = f"{its.model_tflops:.0f}"
        if planned.layout.recompute == "full":
            tflops += f" ({its.hardware_tflops:.0f})"
        cells = [seconds(its.step_s), amount(its.tokens_per_s), tflops, f"{its.mfu:.1%}"]
        cells.append(f"{planned.peak.total / GIB:.1f}")
        cells += [] if its.days is None else [f"{its.days:.3g}"]
        cells += [] if its.energy_mwh is None else [amount(its.energy_mwh)]
        cells += [] if its.price is None else [amount(its.price)]
        table.add_row(str(number), label(planned.layout), *cells)
    console.print(table)


TIME_COLUMNS = (
    ("products", ("matmul", "vocabulary")),
    ("attention", ("attention",)),
    ("elementw.", ("elementwise",)),
    ("recompute", ("recompute",)),
    ("optimizer", ("optimizer",)),
    ("tp", ("tp",)),
    ("pp", ("pp",)),
    ("dp", ("dp",)),
    ("bubble", ("bubble",)),
)
"""Columns of the table of time: heading, parts of a step."""


def show_time(found: list[LayoutForecast], console: Console) -> None:
    """Shares of the step's time; tp, pp and dp are communication that no computation hides."""
    table = new_table("share of the step; tp, pp, dp: exposed communication")
    table.add_column("#", justify="right")
    for heading, _ in TIME_COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for number, planned in enumerate(found, start=1):
        parts, total = planned.step.parts, planned.step.total
        shares = (sum(parts[name] for name in names) / total for _, names in TIME_COLUMNS)
        table.add_row(str(number), *(f"{share:.1%}" for share in shares))
    console.print(table)


def show_memory(
    rows: list[tuple[str, DeviceMemory]], heading: str, capacity: float, console: Console
) -> None:
    """Memory by part, a line per row; parts that no row has are left out."""
    used = [part for part in MEMORY_PARTS if any(peak.parts[part] >= 0.005 * GIB for _, peak in rows)]
    table = new_table(f"memory per GPU at its fullest, GiB of {capacity / GIB:.1f}")
    table.add_column(heading, justify="right", no_wrap=True)
    for part in used:
        table.add_column(SHORT.get(part, part), justify="right", no_wrap=True)
    table.add_column("all", justify="right", no_wrap=True)
    for name, peak in rows:
        cells = (f"{peak.parts[part] / GIB:.2f}" for part in used)
        table.add_row(name, *cells, f"{peak.total / GIB:.2f}")
    console.print(table)


def say(line: str, console: Console) -> None:
    """Print one line as it is."""
    console.print(Text(line), soft_wrap=True)


def records(query: Query, found: list[LayoutForecast], each: list[Numbers]) -> list[dict[str, Any]]:
    """Layouts as flat rows: settings, numbers, seconds and bytes by part."""
    return [
        {
            "layout": label(planned.layout),
            **{
                name: getattr(planned.layout, name)
                for name in PlannedLayout.__slots__
                if name not in ("micro_batch", "global_batch")
            },
            "micro_batch_size": planned.layout.micro_batch,
            "global_batch_size": planned.layout.global_batch,
            **{name: getattr(its, name) for name in Numbers.__dataclass_fields__},
            "bubble": planned.step.bubble,
            **{f"{name}_s": value for name, value in planned.step.parts.items()},
            "memory_bytes": planned.peak.total,
            **{f"{name.replace(' ', '_')}_bytes": value for name, value in planned.peak.parts.items()},
        }
        for planned, its in zip(found, each, strict=True)
    ]


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    """Rows as CSV with a heading; nothing where a value is missing."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
