"""`mlm plan layouts`: the fastest layouts of a model on a number of GPUs that fit. No torch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mlm.config.suggest import divisors
from mlm.plan.config import PlanLayoutsConfig
from mlm.plan.memory import MemoryModel, gib
from mlm.plan.report import (
    Numbers,
    amount,
    as_csv,
    label,
    layout_cautions,
    numbers,
    records,
    say,
    seconds,
    show_memory,
    show_speed,
    show_time,
    time_caution,
    wide,
)
from mlm.plan.search import Found, LayoutForecast, Models, Query, layouts, least_gpus, query_of, search
from mlm.plan.shape import PlannedLayout, Shape
from mlm.util.errors import UserError, format_settings
from mlm.util.results import target_name, write_result
from mlm.util.terminal import Screen

FORMAT = "mlm-plan-layouts-1"
MOST_REASONS = 8


def run(config: PlanLayoutsConfig, console: Console | None = None) -> Found:
    """Print the best layouts, write `out` where it is given, and return what was found.

    Raises UserError if no layout fits, or if `out` cannot be written.
    """
    console = wide(console or Screen())
    query = query_of(config)
    found = search(query, config.show)
    if not found.best:
        raise UserError(too_large(query, found))
    each = [numbers(query, planned, config.tokens, config.price_per_gpu_hour) for planned in found.best]
    say(title(config, query), console)
    show_speed(query, found.best, each, console)
    show_time(found.best, console)
    rows = [(str(n), planned.peak) for n, planned in enumerate(found.best, start=1)]
    show_memory(rows, "#", query.memory_bytes, console)
    say(footnote(found), console)
    for line in notes(query, found):
        say(line, console)
    if config.why:
        for line in reasons(query, found):
            say(line, console)
    say(f"\n{command_line(config, found.best[0].layout)}", console)
    if config.out is not None:
        write(config, query, found, each)
        say(f"written to {target_name(config.out)}", console)
    return found


def title(config: PlanLayoutsConfig, query: Query) -> str:
    """The heading: model, GPUs, batch."""
    size = amount(MemoryModel(config.model, query.seq).held(PlannedLayout(), 0).parameters)
    return (
        f"{config.name} ({size} parameters) on {query.gpus} GPUs of {query.hardware.name} · {query.dtype} · "
        f"{query.global_batch} x {query.seq} tokens a step"
    )


def command_line(config: PlanLayoutsConfig, layout: PlannedLayout) -> str:
    """The `mlm pretrain` that runs a layout."""
    more: dict[str, object] = {"model": config.name}
    if config.data.seq_length != config.model.max_positions:
        more["data.seq_length"] = config.data.seq_length
    return (
        f"mlm pretrain {format_settings({**more, 'precision': config.precision.dtype, **layout.settings()})}"
    )


def footnote(found: Found) -> str:
    """A line that counts the layouts."""
    line = f"{found.candidates:,} valid layouts"
    if found.too_large:
        line += f"; {len(found.too_large):,} as fast as these do not fit"
    return f"{line}. MFU: model FLOPs over the dense peak. mb: micro-batch. sp: sequence parallelism."


def notes(query: Query, found: Found) -> list[str]:
    """Lines on how far the best layout's numbers can be trusted."""
    best = found.best[0]
    return [
        *time_caution(query.hardware, best.step.total),
        *layout_cautions(query.hardware, query.model, query.seq, best.layout),
    ]


def too_large(query: Query, found: Found) -> str:
    """The error of a model that no layout fits into memory."""
    layout, lacks = min(found.too_large, key=lambda each: each[1])
    least = least_gpus(query)
    fix = f"needs at least gpus={least} of this kind" if least else "no number of GPUs of this kind holds it"
    if least is not None and least <= query.gpus:
        fix = "allow other layouts or another train.global_batch_size"
    return (
        f"gpus={query.gpus}: no layout fits into {gib(query.memory_bytes)} per GPU (the smallest, "
        f"{label(layout)}, lacks {gib(lacks)}); {fix}"
    )


def reasons(query: Query, found: Found) -> list[str]:
    """The rules that rejected other layouts, and the limits of the best."""
    lines = ["", "why not others:"]
    nearest = sorted(found.too_large, key=lambda each: each[1])
    for layout, lacks in nearest[:MOST_REASONS]:
        lines.append(f"  {label(layout)}: does not fit by {gib(lacks)}")
    if len(nearest) > MOST_REASONS:
        lines.append(f"  … and {len(nearest) - MOST_REASONS:,} more that do not fit")
    lines += [f"  {line}" for line in slower(query, found)]
    for why, count in found.broken.reasons():
        lines.append(f"  not valid: {why}" + (f" (and {count - 1:,} more by this rule)" if count > 1 else ""))
    return [*lines, "", *limits(found.best[0])]


VARIATIONS: tuple[tuple[str, Callable[[Query, Any], bool]], ...] = (
    ("tp crosses the node", lambda query, layout: layout.tp > query.hardware.devices_per_node),
    ("tp within the node", lambda query, layout: 1 < layout.tp <= query.hardware.devices_per_node),
    ("no tensor parallelism", lambda query, layout: layout.tp == 1),
    ("no pipeline", lambda query, layout: layout.pp == 1),
    ("a pipeline", lambda query, layout: layout.pp > 1),
    ("nothing sharded over dp (zero=0)", lambda query, layout: layout.zero == 0),
    ("weights sharded too (zero=3)", lambda query, layout: layout.zero == 3),
    ("full recomputation", lambda query, layout: layout.recompute == "full"),
)
"""Classes of layouts, whose best is compared with the best of all."""


def slower(query: Query, found: Found) -> list[str]:
    """The best of each class of layouts that the best of all is not in, beside it."""
    best = found.best[0]
    models, all_layouts = Models(query), list(layouts(query))
    lines = []
    for words, belongs in VARIATIONS:
        if belongs(query, best.layout):
            continue
        mine = [layout for layout in all_layouts if belongs(query, layout)]
        fastest = best_of(models, mine)
        if fastest is None:
            if mine:
                least = min(map(models.lacks, mine))
                lines.append(f"{words}: none of {len(mine):,} layouts fits, the smallest lacks {gib(least)}")
            continue
        ratio = fastest.step.total / best.step.total
        lines.append(f"{words}: {label(fastest.layout)} takes {ratio:.2f} times as long")
    return lines


def best_of(models: Models, some: list[Any]) -> LayoutForecast | None:
    """The fastest of some layouts that fits, of those with the least bounds."""
    ordered = sorted(some, key=lambda layout: models.cost(layout.tp).bound(layout))
    best: LayoutForecast | None = None
    for layout in ordered:
        if best is not None and models.cost(layout.tp).bound(layout) > best.step.total:
            break
        if models.lacks(layout) <= 0:
            planned = models.planned(layout)
            if best is None or planned.step.total < best.step.total:
                best = planned
    return best


def limits(best: LayoutForecast) -> list[str]:
    """The parts of the best layout's time, largest first."""
    ordered = sorted(best.step.parts.items(), key=lambda part: -part[1])
    shares = [
        f"{name} {value / best.step.total:.0%}" for name, value in ordered if value > 0.01 * best.step.total
    ]
    return [f"what limits the best ({seconds(best.step.total)}): {', '.join(shares)}"]


def write(config: PlanLayoutsConfig, query: Query, found: Found, each: list[Numbers]) -> None:
    """Write the layouts to `out`, by its ending. Raises UserError."""
    assert config.out is not None
    rows = records(query, found.best, each)
    ending = Path(config.out).suffix
    if ending == ".csv":
        write_result(config.out, as_csv(rows))
    elif ending in (".png", ".html"):
        from mlm.plan.charts import draw, layouts_page  # matplotlib takes half a second to import

        words = title(config, query)
        picture = draw(found.best, words, query.memory_bytes, against_batches(query, found.best[0].layout))
        lines = [footnote(found), *notes(query, found)]
        lines += reasons(query, found) if config.why else limits(found.best[0])
        lines += ["", command_line(config, found.best[0].layout)]
        write_result(config.out, picture if ending == ".png" else layouts_page(words, picture, rows, lines))
    else:
        write_result(config.out, record(config, query, found, rows))


def against_batches(query: Query, layout: PlannedLayout) -> list[tuple[int, float]]:
    """Memory of a layout at each micro-batch that its replicas can have."""
    memory, each = Models(query).memory, layout.global_batch // layout.dp
    layouts_of = (replace(layout, micro_batch=size) for size in divisors(each))
    valid = [other for other in layouts_of if layout.vp == 1 or other.micro_batches % layout.pp == 0]
    return [(other.micro_batch, memory.worst(other).total) for other in valid]


def record(
    config: PlanLayoutsConfig, query: Query, found: Found, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """All of a search in values that JSON holds."""
    shape = Shape(query.model, query.seq)
    return {
        "format": FORMAT,
        "model": config.name,
        "hardware": query.hardware.name,
        "gpus": query.gpus,
        "dtype": query.dtype,
        "seq_length": query.seq,
        "global_batch_size": query.global_batch,
        "model_flops_per_step": shape.model_flops(query.global_batch),
        "memory_bytes_per_gpu": query.memory_bytes,
        "valid_layouts": found.candidates,
        "time_error": query.hardware.time_error,
        "notes": notes(query, found),
        "layouts": rows,
    }
