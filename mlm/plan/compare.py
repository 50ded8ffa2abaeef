"""`mlm plan compare`: two layouts of a model, and the parts of a step that make their difference."""

from collections.abc import Iterator

from mlm.plan.candidates import Query
from mlm.plan.config import PlanCompareConfig
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import GIB, gib
from mlm.plan.report import as_row, format_seconds, narrow_table, time_caution, wide_screen, write_rows
from mlm.plan.search import LayoutForecast, Models
from mlm.util.terminal import add_row

FORMAT = "mlm-plan-compare-1"
WATERFALL = {
    "products": ("matmul", "vocabulary"),
    **{part: (part,) for part in ("attention", "elementwise", "recompute", "tp", "cp", "ep", "pp")},
    **{"idle (pipeline bubble)": ("bubble",), "dp": ("dp",), "optimizer": ("optimizer",)},
}
"""Rows of the waterfall, and the parts of a step in them: all, once."""
BAR = 40  # columns of the longest step


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
    made = narrow_table("", "", "A#", "B#", "B - A#", "from A to B")
    for cells in waterfall(a, b):
        add_row(made, *cells)
    screen.print(made)
    for name, each in (("A", a), ("B", b)):
        layout, size = each.layout, each.memory.total
        left = config.hardware.for_ranks(layout.gpus).memory_gib * GIB - size
        fits = f"{gib(left)} left" if left >= 0 else f"does not fit by {gib(-left)}"
        screen.print(f"{name}: {layout.label} on {layout.gpus} GPUs; {gib(size)} each at most, {fits}")
    ratio, gpus = b.step.total / a.step.total, b.layout.gpus / a.layout.gpus
    screen.print(f"B takes {ratio:.3g} times the time of A and {ratio * gpus:.3g} times its GPU-hours")
    for line in time_caution(config.hardware, a.step.total):
        screen.print(f"A: {line}")
    write_rows(config.out, {"format": FORMAT, "model": config.name}, "layouts", rows, screen)
    return a, b


def waterfall(a: LayoutForecast, b: LayoutForecast) -> Iterator[tuple[str, str, str, str, str]]:
    """Cells of each row: a part of both steps, its difference, and where that leads from A to B."""
    before = a.step.total
    scale = BAR / max(a.step.total, b.step.total)
    yield "step of A", format_seconds(a.step.total), "", "", "=" * round(a.step.total * scale)
    for name, parts in WATERFALL.items():
        mine, other = (sum(each.step.parts[part] for part in parts) for each in (a, b))
        if not mine and not other:
            continue
        after = before + other - mine
        low, high = sorted((round(before * scale), round(after * scale)))
        bar = " " * low + ("+" if after > before else "-") * (high - low)
        yield name, format_seconds(mine), format_seconds(other), f"{(other - mine) * 1e3:+,.4g} ms", bar
        before = after
    yield "step of B", "", format_seconds(b.step.total), "", "=" * round(b.step.total * scale)
