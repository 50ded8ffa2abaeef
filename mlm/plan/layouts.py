"""`mlm plan layouts`: the fastest layouts of a model on a number of GPUs that fit."""

import shlex
from collections.abc import Sequence

from rich.console import Console

from mlm.config.tree import HOISTED, leaves
from mlm.launch.typed import typed_settings
from mlm.plan.candidates import Query, query_of
from mlm.plan.config import PlanLayoutsConfig, SearchedLayoutConfig
from mlm.plan.goodput import Goodput, goodput
from mlm.plan.layout import PlannedLayout, model_flops
from mlm.plan.memory import GIB, gib
from mlm.plan.report import (
    Row,
    as_row,
    format_amount,
    format_seconds,
    layout_cautions,
    show_table,
    spread,
    time_caution,
    time_error,
    wide_screen,
    write_rows,
)
from mlm.plan.search import LayoutForecast, SearchResult, search, search_cheapest, search_leanest
from mlm.training.config import PretrainConfig
from mlm.util.errors import UserError, format_settings

FORMAT = "mlm-plan-layouts-1"
LEAST_SHARE = 1e-9
"""Of time that is progress: of a run that never ends, days are a number too."""
PLAN_KEYS = {HOISTED, "out", *leaves(SearchedLayoutConfig)}
PLAN_KEYS |= {key.partition(".")[0] for key in leaves(PlanLayoutsConfig).keys() - leaves(PretrainConfig)}
"""Keys and sections of a search that its `mlm pretrain` does not have, or that the layout found sets."""


def run(config: PlanLayoutsConfig) -> SearchResult:
    """Print the best layouts, write `out` where it is given, and return the result of the search.

    Raises UserError if no layout fits, or if `out` cannot be written.
    """

    def share(gpus: int) -> float:
        progress = goodput(config.failures, gpus)
        return 1.0 if progress is None else max(progress.share, LEAST_SHARE)

    screen, query = wide_screen(), query_of(config)
    if config.goal == "cost":
        result = search_cheapest(query, config.show, share)
    else:
        result = (search_leanest if config.goal == "memory" else search)(query, config.show)
    if not result.best:
        raise UserError(too_large(query, result))
    priced = [(each, share(each.layout.gpus)) for each in result.best]
    rows = [as_row(query, each, config.tokens, config.price_per_gpu_hour, its) for each, its in priced]
    screen.print(title(config, query))
    show_layouts(rows, screen)
    best = result.best[0]
    failures = failure_lines(goodput(config.failures, best.layout.gpus))
    for line in (footnote(result, config.goal), *failures, *notes(query, best)):
        screen.print(line)
    screen.print(f"\n{command_line(config, best.layout)}")
    values = {
        "format": FORMAT,
        "model": config.name,
        "hardware": query.hardware.name,
        "gpus": query.gpus,
        "goal": config.goal,
        "dtype": query.run.precision.dtype,
        "seq_length": query.seq,
        "global_batch_size": query.global_batch,
        "model_flops_per_step": model_flops(query.model, query.seq, query.global_batch),
        "memory_bytes_per_gpu": query.memory_bytes,
        "valid_layouts": result.candidates,
        "notes": notes(query, best),
    }
    write_rows(config.out, values, "layouts", rows, screen)
    return result


def title(config: PlanLayoutsConfig, query: Query) -> str:
    """The heading: model, GPUs, batch."""
    size = config.model.num_parameters()
    active = config.model.num_active_parameters()
    of = f"{format_amount(size)} parameters"
    of += f", {format_amount(active)} of a token" if config.model.architecture.experts else ""
    return (
        f"{config.name} ({of}) on {query.gpus} GPUs of {query.hardware.name}, "
        f"{gib(query.memory_bytes)} each · {query.run.precision.dtype} · "
        f"{query.global_batch} x {query.seq} tokens a step"
    )


def show_layouts(rows: Sequence[Row], screen: Console) -> None:
    """The table of layouts."""
    headings = {"days": "days", "energy_mwh": "MWh", "price": "price"}
    if len({row["gpus"] for row in rows}) > 1:
        headings = {"gpus": "GPUs", "gpu_hours_per_billion": "GPUh/Gtok", **headings}
    more = [key for key in headings if rows[0][key] is not None]
    columns = (" ##", "layout", "step#", "tokens/s#", "TFLOP/s#", "MFU#", "GiB#")
    cells = [
        (
            *(number, row["layout"], spread(row["step_s"], row["time_error"], format_seconds)),
            format_amount(row["tokens_per_s"]),
            f"{row['model_tflops']:.0f}" + f" ({row['hardware_tflops']:.0f})" * (row["recompute"] == "full"),
            *(f"{row['mfu']:.1%}", f"{row['memory_bytes'] / GIB:.1f}"),
            *(format_amount(row[key]) for key in more),
        )
        for number, row in enumerate(rows, start=1)
    ]
    show_table(screen, "", (*columns, *(f"{headings[key]}#" for key in more)), cells)


def command_line(config: PlanLayoutsConfig, layout: PlannedLayout) -> str:
    """The `mlm pretrain` that runs a layout of what was typed."""
    typed = {key_of(word): word for word in typed_settings()}
    settings = {"model": config.name} if "name" not in typed else {}
    if config.data.seq_length != config.model.max_positions:
        settings["data.seq_length"] = str(config.data.seq_length)
    settings["precision"] = config.precision.dtype
    words = {key: f"{key}={value}" for key, value in settings.items()}
    words |= {key: word for key, word in typed.items() if key.partition(".")[0] not in PLAN_KEYS}
    words |= {key: format_settings({key: value}) for key, value in layout.settings().items()}
    return shlex.join(["mlm", "pretrain", *words.values()])


def key_of(word: str) -> str:
    """The key of a typed setting; of a section that is set together, the word."""
    key, _, value = word.lstrip("+~").partition("=")
    return word if value.startswith("{") else key


def footnote(result: SearchResult, goal: str) -> str:
    """A line that counts the layouts, and tells their order."""
    line = f"{result.candidates:,} valid layouts"
    if result.nearest:
        layout, lacks = result.nearest
        line += f"; of those that may be as fast, {layout.label} does not fit by {gib(lacks)}"
    if goal != "time":
        line += f"; none beats one of these in both {'memory' if goal == 'memory' else 'GPU-hours'} and time"
    return f"{line}. `mlm plan compare` and `memory` show the parts of a layout."


def notes(query: Query, best: LayoutForecast) -> list[str]:
    """Lines on how far the best layout's numbers can be trusted."""
    cautions = layout_cautions(query.hardware, query.model, query.seq, best.layout)
    _, assumed = time_error(query.hardware, query.model, best.layout.gpus)
    return [*time_caution(assumed), *cautions]


def failure_lines(progress: Goodput | None) -> list[str]:
    """A line on goodput, where a mean time between failures is given."""
    if progress is None:
        return []
    times = (format_seconds(seconds) for seconds in (progress.failure_s, progress.interval_s))
    line = "goodput {:.1%}: a failure every {}, a checkpoint every {}; days, energy and price include it"
    return [line.format(progress.share, *times)]


def too_large(query: Query, result: SearchResult) -> str:
    """The error of a model that no layout fits into memory."""
    assert result.nearest is not None
    layout, lacks = result.nearest
    return (
        f"gpus={query.gpus}: no layout fits into {gib(query.memory_bytes)} per GPU (the smallest, "
        f"{layout.label}, lacks {gib(lacks)}); use more GPUs, or free settings that are kept"
    )
