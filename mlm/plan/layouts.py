"""The commands `mlm plan layouts`, `compare` and `memory`."""

import shlex

from mlm.config.tree import HOISTED, leaves
from mlm.launch.command_line import typed_settings
from mlm.models.shape import architecture_of, count_active_parameters, count_parameters
from mlm.plan.candidates import Query, query_of
from mlm.plan.config import PlanCompareConfig, PlanLayoutsConfig, PlanMemoryConfig, SearchedLayoutConfig
from mlm.plan.cost import PARTS as TIME_PARTS
from mlm.plan.hardware import GIB, gib
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import DeviceMemory, in_flight
from mlm.plan.report import (
    Row,
    as_row,
    format_fit,
    format_range,
    format_seconds,
    memory_row,
    show_table,
    time_caution,
    time_range,
    wide_screen,
    write_rows,
)
from mlm.plan.search import Forecaster, LayoutForecast, SearchResult, search
from mlm.runs.config import PretrainConfig
from mlm.tracking.display import format_count
from mlm.util.errors import UserError, format_settings

PLAN_KEYS = {HOISTED, "out", *leaves(SearchedLayoutConfig)}
PLAN_KEYS |= {key.partition(".")[0] for key in leaves(PlanLayoutsConfig).keys() - leaves(PretrainConfig)}
"""Keys and sections that the printed `mlm pretrain` does not take from the search: its layout sets them."""


def run(config: PlanLayoutsConfig) -> SearchResult:
    """Print the fastest layouts and write `out`. Raises UserError if none fits."""
    screen, query = wide_screen(), query_of(config)
    result = search(query, config.show)
    if not result.best:
        assert result.nearest is not None
        layout, lacks = result.nearest
        raise UserError(
            f"gpus={query.gpus}: no layout fits into {gib(query.memory_bytes)} per GPU (the smallest, "
            f"{layout.label}, lacks {gib(lacks)}); use more GPUs, or free settings that are kept"
        )
    rows = [as_row(query, forecast, config.tokens, config.price_per_gpu_hour) for forecast in result.best]
    model = f"{format_count(count_parameters(config.model))} parameters"
    if architecture_of(config.model).experts:
        model += f", {format_count(count_active_parameters(config.model))} of a token"
    screen.print(
        f"{config.name} ({model}) on {query.gpus} GPUs of {query.hardware.name}, "
        f"{gib(query.memory_bytes)} each · {query.run.precision.dtype} · "
        f"{config.train.global_batch_size} x {config.data.seq_length} tokens a step"
    )
    more = [key for key in ("days", "price") if rows[0][key] is not None]
    columns = (" ##", "layout", "step#", "tokens/s#", "TFLOP/s#", "MFU#", "GiB#")
    cells = [
        (
            *(number, row["layout"], format_range(row["step_low_s"], row["step_high_s"], format_seconds)),
            format_count(row["tokens_per_s"]),
            f"{row['model_tflops']:.0f}" + f" ({row['hardware_tflops']:.0f})" * (row["recompute"] == "full"),
            *(f"{row['mfu']:.1%}", f"{row['memory_bytes'] / GIB:.1f}"),
            *(format_count(row[key]) for key in more),
        )
        for number, row in enumerate(rows, start=1)
    ]
    show_table(screen, "", (*columns, *(f"{key}#" for key in more)), cells)
    best = result.best[0]
    line = f"{result.candidates:,} valid layouts"
    if result.nearest:
        layout, lacks = result.nearest
        line += f"; of those that may be as fast, {layout.label} does not fit by {gib(lacks)}"
    screen.print(f"{line}. `mlm plan compare` and `memory` show the parts of a layout.")
    caution = time_caution(time_range(query.hardware, query.run.model, best.layout.gpus)[1])
    screen.print(f"{caution}\n\n{command_line(config, best.layout)}")
    facts = {"memory_bytes_per_gpu": query.memory_bytes, "valid_layouts": result.candidates}
    write_rows(config, "layouts", {**facts, "notes": [caution], "layouts": rows}, screen)
    return result


def command_line(config: PlanLayoutsConfig, layout: PlannedLayout) -> str:
    """Return the `mlm pretrain` command of a layout, with the settings that were typed."""
    typed = dict[str, str]()
    for word in typed_settings():
        key, _, value = word.lstrip("+~").partition("=")
        typed[word if value.startswith("{") else key] = (
            word  # words that set sections do not replace each other
        )
    settings = {"model": config.name} if "name" not in typed else {}
    if config.data.seq_length != config.model.max_positions:
        settings["data.seq_length"] = str(config.data.seq_length)
    settings["precision"] = config.precision.dtype
    words = {key: f"{key}={value}" for key, value in settings.items()}
    words |= {key: word for key, word in typed.items() if key.partition(".")[0] not in PLAN_KEYS}
    words |= {key: format_settings({key: value}) for key, value in layout.settings().items()}
    return shlex.join(["mlm", "pretrain", *words.values()])


def compare(config: PlanCompareConfig) -> tuple[LayoutForecast, LayoutForecast]:
    """Print both layouts and their difference, and write `out`."""
    screen, queries, forecasts, rows = wide_screen(), list[Query](), list[LayoutForecast](), []
    batch = config.train.global_batch_size
    for label in (config.a, config.b):
        layout = PlannedLayout.named(label, config)
        queries.append(Query(run=config, hardware=config.hardware, gpus=layout.gpus))
        forecasts.append(Forecaster(queries[-1]).forecast(layout))
        rows.append(as_row(queries[-1], forecasts[-1]))
    a, b = forecasts
    tokens = f"{batch} x {config.data.seq_length} tokens a step"
    screen.print(f"{config.name} on {config.hardware.name} · {config.precision.dtype} · {tokens}")
    cells = list[tuple[str, str, str, str]]()
    for name in (*TIME_PARTS, "step"):
        seconds_a, seconds_b = (forecast.step.parts.get(name, forecast.step.total) for forecast in forecasts)
        if seconds_a or seconds_b:
            difference = f"{(seconds_b - seconds_a) * 1e3:+,.4g} ms"
            cells.append((name, format_seconds(seconds_a), format_seconds(seconds_b), difference))
    show_table(screen, "", ("", "A#", "B#", "B - A#"), cells)
    assumptions = dict[str, None]()
    for name, query, forecast, row in zip("AB", queries, forecasts, rows, strict=True):
        assumptions |= dict.fromkeys(time_range(query.hardware, config.model, query.gpus)[1])
        time = format_range(row["step_low_s"], row["step_high_s"], format_seconds)
        needs = format_fit(forecast.memory.total, query.memory_bytes)
        screen.print(
            f"{name}: {forecast.layout.label} on {query.gpus} GPUs; {time} a step; the fullest {needs}"
        )
    ratio, gpus = b.step.total / a.step.total, b.layout.gpus / a.layout.gpus
    screen.print(f"B takes {ratio:.3g} times the time of A and {ratio * gpus:.3g} times its GPU-hours")
    screen.print(time_caution(assumptions))
    write_rows(config, "compare", {"layouts": rows}, screen)
    return a, b


def memory(config: PlanMemoryConfig) -> dict[int, DeviceMemory]:
    """Print the memory of a rank and of both pipeline ends, and write `out`; return it by rank."""
    screen, seq = wide_screen(), config.data.seq_length
    layout = PlannedLayout.of(config, config.parallel.dp or 1)
    query = Query(run=config, hardware=config.hardware, gpus=layout.gpus)
    model, capacity = Forecaster(query).memory, query.memory_bytes
    replicas, of_stage = layout.dp * layout.cp, layout.gpus // layout.pp
    peaks, rows = dict[int, DeviceMemory](), list[Row]()
    for rank in sorted({0, (layout.pp - 1) * of_stage, config.rank}):
        # rank = (stage * replicas + replica) * tp + tensor-parallel rank
        stage = rank // of_stage
        peak = peaks[rank] = model.peak(layout, stage, rank // layout.tp % replicas)
        names = {"rank": rank, "stage": stage, "parameters": peak.parameters, "moment": peak.moment}
        rows.append({**names, **memory_row(peak), "in_flight": in_flight(layout, stage)})
    batch = f"{layout.micro_batches} micro-batches of {layout.micro_batch} x {seq} tokens"
    where = f"{layout.label} on {layout.gpus} GPUs of {query.hardware.name}"
    screen.print(f"{config.name} · {where} · {config.precision.dtype} · {batch}")
    lines = list[tuple[str, ...]]()
    for key in list(rows[0])[1:]:
        name, values = key.removesuffix("_bytes").replace("_", " "), [row[key] for row in rows]
        if not key.endswith("_bytes"):
            lines.append((name, *(x if isinstance(x, str) else format_count(x) for x in values)))
        elif max(values) >= 0.005 * GIB:  # rows of zeros are left out
            lines.append((f"{name}, GiB", *(f"{x / GIB:.2f}" for x in values)))
    show_table(screen, "", ("", *(f"rank {rank}#" for rank in peaks)), lines)
    rank, fullest = max(peaks.items(), key=lambda item: item[1].total)
    screen.print(f"rank {rank} {format_fit(fullest.total, capacity)}")
    write_rows(config, "memory", {"memory_bytes_per_gpu": capacity, "ranks": rows}, screen)
    return peaks
