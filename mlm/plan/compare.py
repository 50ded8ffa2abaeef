"""`mlm plan compare`: two layouts of a model, and the parts of a step that make their difference."""

from collections.abc import Iterator

from mlm.plan.candidates import Query
from mlm.plan.config import PlanCompareConfig
from mlm.plan.cost import PARTS
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import GIB
from mlm.plan.report import (
    as_row,
    fit,
    format_seconds,
    show_table,
    spread,
    time_caution,
    time_error,
    wide_screen,
    write_rows,
)
from mlm.plan.search import LayoutForecast, Models

FORMAT = "mlm-plan-compare-1"
ROWS = {
    "products": ("matmul", "vocabulary"),
    **{part: (part,) for part in ("attention", "elementwise", "recompute", "tp", "cp", "ep", "pp")},
    **{"idle (pipeline bubble)": ("bubble",), "dp": ("dp",), "optimizer": ("optimizer",), "step": PARTS},
}
"""Rows of the table, and the parts of a step in them: all, once, and their sum."""


def run(config: PlanCompareConfig) -> tuple[LayoutForecast, LayoutForecast]:
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
    for name, each in (("A", a), ("B", b)):
        gpus, memory = each.layout.gpus, each.memory.total
        error, assumed = time_error(config.hardware, config.model, gpus)
        took = spread(each.step.total, error, format_seconds)
        needs = fit(memory, config.hardware.for_ranks(gpus).memory_gib * GIB)
        screen.print(f"{name}: {each.layout.label} on {gpus} GPUs; {took} a step; the fullest {needs}")
    ratio, more = b.step.total / a.step.total, b.layout.gpus / a.layout.gpus
    screen.print(f"B takes {ratio:.3g} times the time of A and {ratio * more:.3g} times its GPU-hours")
    for line in time_caution(assumed):
        screen.print(line)
    write_rows(config.out, {"format": FORMAT, "model": config.name}, "layouts", rows, screen)
    return a, b


def part_rows(a: LayoutForecast, b: LayoutForecast) -> Iterator[tuple[str, str, str, str]]:
    """Cells of each part that takes time in either step."""
    for name, parts in ROWS.items():
        mine, other = (sum(each.step.parts[part] for part in parts) for each in (a, b))
        if mine or other:
            yield name, format_seconds(mine), format_seconds(other), f"{(other - mine) * 1e3:+,.4g} ms"
