"""A run's layout, pipeline schedule (planned and measured), memory and loads of experts, drawn for a page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from statistics import fmean
from typing import Any, cast

from markupsafe import Markup

from mlm.config.build import build
from mlm.models.family import SHIPPED
from mlm.models.stage import PipelineStage, split_layers
from mlm.parallel.pipeline.actions import Action, Cost, Op, Plan, ScheduleError, TimedAction
from mlm.parallel.pipeline.lower import DEFAULT_COST
from mlm.plan.config import PlanScheduleConfig
from mlm.plan.drawing import NAMES, svg, svg_legend
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import GIB, MOMENTS, PARTS, DeviceMemory
from mlm.plan.schedule import pipeline_time, simulate, title
from mlm.tracking.page.html import macro
from mlm.tracking.page.runs import RunRecords, number
from mlm.training.config import PretrainConfig
from mlm.util.errors import UserError

TEMPLATE = "pipeline.html"
COLOURS, PATTERNS = 7, 6  # of page.css
MAX_DRAWN = {"tp": 8, "cp": 4, "pp": 16}
"""Ranks drawn along each axis."""
MAX_RANKS, MAX_STAGES = 64, 16
MAX_SIZE = 1 << 20
MAX_SPANS = 1200
MAX_SIMULATED = 20_000  # computations: half a second
MAX_STEP_MS = 1e9
"""A longer step is damage."""
WAITING = "waiting over pp"
NOT_RECORDED = ("not recorded", "not recorded")


@dataclass(frozen=True)
class RunPlan:
    """Facts that follow from a run's settings, which may be damaged or of another version."""

    run: RunRecords

    def size(self, key: str) -> int:
        """Return a number of the layout or the settings; 1 where there is none."""
        value = self.run.layout.get(key, self.run.settings.get(key))
        return value if type(value) is int and 0 < value <= MAX_SIZE else 1

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        return {axis: self.size(axis) for axis in ("tp", "cp", "pp", "dp")}

    @property
    def world_size(self) -> int:
        """All ranks."""
        return prod(self.sizes.values())

    @property
    def schedule(self) -> str:
        """The pipeline's schedule."""
        name = self.run.layout.get("pipeline")
        return name if name in ("1f1b", "gpipe", "zb_h1") else "1f1b"

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a replica in a step."""
        batch = self.size("train.global_batch_size")
        return max(batch // (self.sizes["dp"] * self.size("train.micro_batch_size")), 1)

    @cached_property
    def stages(self) -> list[list[PipelineStage]]:
        """Chunks of layers of each pipeline rank; empty where they are not known."""
        layers, pp, chunks = self.size("model.num_layers"), self.sizes["pp"], self.size("vp")
        if "model.num_layers" not in self.run.settings or layers < pp * chunks or pp * chunks > 4096:
            return []
        every = split_layers(layers, pp * chunks)
        return [every[rank::pp] for rank in range(pp)]

    @cached_property
    def config(self) -> PretrainConfig | None:
        """The run's settings, if they are those of a pretraining run of this version."""
        if self.run.command != "pretrain":
            return None
        try:
            config = build(PretrainConfig, self.run.settings, check=lambda config: ())
        except (UserError, ValueError, TypeError):
            return None
        return config if config.model.kind in SHIPPED and self.sizes["cp"] == 1 else None

    @property
    def device(self) -> str:
        """The type of device: as set, or by PyTorch's build."""
        chosen = self.run.settings.get("dist.device")
        versions = self.run.latest.get("versions")
        torch = str(versions.get("torch", "")) if isinstance(versions, dict) else ""
        return "cpu" if chosen == "cpu" or (chosen != "cuda" and torch.endswith("+cpu")) else "gpu"

    @cached_property
    def layout(self) -> PlannedLayout | None:
        """The layout of a run whose settings are known."""
        return None if self.config is None else PlannedLayout.of(self.config, self.sizes["dp"])

    @property
    def name(self) -> str:
        """The layout in a few words."""
        if self.layout is not None:
            return self.layout.label
        words = [f"{axis}={size}" for axis, size in self.sizes.items() if size > 1] or ["one rank"]
        return " ".join(words) + (f" vp={self.size('vp')} {self.schedule}" if self.sizes["pp"] > 1 else "")

    def peaks(self) -> list[DeviceMemory]:
        """Planned memory of the first pipeline stages, as the run recorded it; empty where it is damaged."""
        recorded = self.run.latest.get("memory")
        peaks = [recorded_peak(entry) for entry in recorded] if isinstance(recorded, list) else []
        return [peak for peak in peaks if peak is not None] if all(peaks) else []


def recorded_peak(entry: object) -> DeviceMemory | None:
    """A stage's planned memory from a run's records; None if it is damaged."""
    parts = entry.get("parts") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(parts, dict):
        return None
    sizes = {part: number(parts.get(part)) for part in PARTS}
    moment, parameters = entry.get("moment"), entry.get("parameters")
    is_whole = all(size >= 0 for size in sizes.values()) and sum(sizes.values()) > 0
    if not is_whole or moment not in MOMENTS or type(parameters) is not int or parameters < 0:
        return None
    return DeviceMemory(sizes, moment, parameters)


def draw_layout(plan: RunPlan) -> Markup:
    """Draw the ranks: a row per pipeline stage, a column per replica and tensor-parallel rank."""
    sizes = plan.sizes
    shown = {axis: min(sizes[axis], most) for axis, most in MAX_DRAWN.items()}
    shown["dp"] = max(1, min(sizes["dp"], MAX_RANKS // prod(shown.values())))
    columns = [(d, c, t) for d in range(shown["dp"]) for c in range(shown["cp"]) for t in range(shown["tp"])]
    rows = []
    for p in range(shown["pp"]):
        cells = [
            (
                p % COLOURS,
                t % PATTERNS,
                ((p * sizes["dp"] + d) * sizes["cp"] + c) * sizes["tp"] + t,
                f"P{p} D{d} " + (f"C{c} " if sizes["cp"] > 1 else "") + f"T{t}",
            )
            for d, c, t in columns
        ]
        rows.append((f"stage P{p}" + (f": {layers_of(plan.stages[p])}" if plan.stages else ""), cells))
    hidden = [f"{axis}={sizes[axis]}" for axis in shown if shown[axis] < sizes[axis]]
    return macro(TEMPLATE, "layout", plan, rows, hidden)


def layers_of(stages: Sequence[PipelineStage]) -> str:
    """Return what a pipeline rank holds: `embedding, layers 0–3, output`."""
    ranges = [
        f"{stage.layers[0]}–{stage.layers[-1]}" if len(stage.layers) > 1 else f"{stage.layers[0]}"
        for stage in stages
    ]
    noun = "layers" if sum(len(stage.layers) for stage in stages) > 1 else "layer"
    words = ["embedding"] if stages[0].is_first else []
    return ", ".join([*words, f"{noun} {', '.join(ranges)}", *(["output"] if stages[-1].is_last else [])])


def draw_memory(plan: RunPlan) -> Markup:
    """Draw the memory of each pipeline stage by part, beside what rank 0 logged; empty without a model."""
    peaks = plan.peaks()
    if not peaks:
        return Markup()
    least = 0.002 * max(peak.total for peak in peaks)
    parts = [(n, part) for n, part in enumerate(PARTS) if any(peak.parts[part] >= least for peak in peaks)]
    return macro(TEMPLATE, "memory", plan, peaks, parts, GIB)


def draw_schedule(plan: RunPlan) -> Markup:
    """Draw the pipeline's schedule as planned and as measured, with idle times; empty without a pipeline."""
    pp, chunks, batches = plan.sizes["pp"], plan.size("vp"), plan.micro_batches
    if pp == 1:
        return Markup()
    settings = PlanScheduleConfig(pp=pp, vp=chunks, micro_batches=batches, pipeline=cast(Any, plan.schedule))
    each = 3 * pp * chunks
    drawn = batches if each * batches <= MAX_SPANS else MAX_SPANS // each // pp * pp
    measured, planned, some, reason, bubble, cost = None, None, None, None, None, DEFAULT_COST
    try:
        if each * batches <= MAX_SIMULATED:
            measured = newest_step(plan, simulate(settings))
            cost = cost if measured is None else measured.cost
            planned = simulate(settings, cost)
        some = simulate(replace(settings, micro_batches=drawn), cost) if drawn else None
        if each * min(batches, 3 * pp) <= MAX_SIMULATED:
            took = pipeline_time(settings.pipeline, pp, chunks, batches, [cost] * (pp * chunks))
            bubble = took / (batches * chunks * (cost.forward + cost.backward)) - 1
    except (ScheduleError, ValueError) as error:
        reason = str(error)
    pictures = list(draw_steps(some, measured if drawn == batches else None, chunks))
    rows = [] if reason else list(stage_rows(plan, planned, bubble, measured))
    names = (title(settings), bubble, reason)
    return macro(TEMPLATE, "schedule", plan, *names, drawn, measured, planned, pictures, rows)


def draw_steps(
    plan: Plan | None, measured: "MeasuredStep | None", chunks: int
) -> Iterator[tuple[str, Markup]]:
    """Yield the names and drawings of a plan, and of what was measured below it at the same scale."""
    if plan is not None and measured is None:
        yield "", svg(plan.timeline, chunks, plan.makespan, "schedule") + svg_legend(plan.timeline)
    elif plan is not None and measured is not None:
        whole = max(plan.makespan, measured.makespan)
        yield "planned", svg(plan.timeline, chunks, whole, "planned schedule")
        yield "measured, at the same scale", svg(measured.lines, chunks, whole, "measured schedule")
        yield "", svg_legend(measured.lines)


def stage_rows(
    plan: RunPlan, planned: Plan | None, bubble: float | None, measured: "MeasuredStep | None"
) -> Iterator[list[str]]:
    """Yield the first stages' idle time as planned, the same for all, and as measured."""
    idle = "not simulated" if bubble is None else f"{bubble / (1 + bubble):.1%}"
    for stage in range(min(plan.sizes["pp"], MAX_STAGES)):
        in_flight = "not simulated" if planned is None else str(planned.peak_in_flight[stage])
        idle_of_step = [] if measured is None else [f"{1 - measured.busy[stage] / measured.makespan:.1%}"]
        yield [f"P{stage}", idle, *idle_of_step, in_flight, *waiting_of(plan, stage)]


def waiting_of(plan: RunPlan, stage: int) -> tuple[str, str]:
    """Return the shares of time that a stage's ranks waited and computed, by the newest record of ranks."""
    records = plan.run.ranks[-1].get("ranks") if plan.run.ranks else None
    each = plan.world_size // plan.sizes["pp"]
    if not isinstance(records, list) or len(records) != plan.world_size:
        return NOT_RECORDED
    shares = []
    for times in records[stage * each : (stage + 1) * each]:
        parts = {name: number(value) for name, value in times.items()} if isinstance(times, dict) else {}
        total = sum(value for value in parts.values() if value == value)
        if total > 0:
            shares.append((parts.get(WAITING, 0.0) / total, parts.get("computing", 0.0) / total))
    if not shares:
        return NOT_RECORDED
    return f"{fmean(wait for wait, _ in shares):.1%}", f"{fmean(busy for _, busy in shares):.1%}"


@dataclass(frozen=True)
class MeasuredStep:
    """Computations of each stage in a step (log.timeline_every): from input to end, in ms."""

    step: int
    lines: tuple[tuple[TimedAction, ...], ...]
    one_clock: bool
    """False if ranks of several hosts were aligned by a barrier."""

    @cached_property
    def makespan(self) -> float:
        """Time to the last end."""
        return max(span.end for line in self.lines for span in line)

    @cached_property
    def busy(self) -> list[float]:
        """Time that each stage computes."""
        return [sum(span.end - span.start for span in line) for line in self.lines]

    @property
    def bubble(self) -> float:
        """Idle over busy time of the busiest stage, as `Plan.bubble`."""
        return self.makespan / max(self.busy) - 1

    @cached_property
    def means(self) -> dict[Op, float]:
        """Mean duration of each op over stages and micro-batches."""
        spans = [span for line in self.lines for span in line]
        used = [op for op in Op if any(span.action.op is op for span in spans)]
        return {op: fmean(span.end - span.start for span in spans if span.action.op is op) for op in used}

    @property
    def mean_words(self) -> str:
        """The means with their names."""
        return ", ".join(f"{NAMES[op]} {mean:.3g} ms" for op, mean in self.means.items())

    @property
    def cost(self) -> Cost:
        """The costs of a plan in which each computation takes the mean time that was measured."""
        backward, weight = self.means[Op.BACKWARD], self.means.get(Op.WEIGHT, 0.0)
        return Cost(self.means[Op.FORWARD], backward + weight, backward, weight)


def newest_step(plan: RunPlan, planned: Plan) -> MeasuredStep | None:
    """Return the newest step of this plan whose computations were timed; None without one."""
    actions = [sorted(map(sort_key, (span.action for span in line))) for line in planned.timeline]
    for record in reversed(plan.run.timelines):
        step = read_step(record)
        if [sorted(map(sort_key, (span.action for span in line))) for line in step.lines] == actions:
            return step
    return None


def read_step(record: Mapping[str, Any]) -> MeasuredStep:
    """Read a record of a step; damaged computations are left out."""
    stages = record.get("stages")
    lines = [
        tuple(filter(None, map(read_span, rows))) if isinstance(rows, list) else ()
        for rows in (stages if isinstance(stages, list) else [])
    ]
    return MeasuredStep(record["step"], tuple(lines), record.get("aligned") == "clock")


def read_span(row: object) -> TimedAction | None:
    """Read a computation; None if it is damaged."""
    if not isinstance(row, list) or len(row) != 6:
        return None
    op, chunk, micro_batch, *times = row
    begin, arrived, end = map(number, times)
    if op not in [each.value for each in Op] or type(chunk) is not int or type(micro_batch) is not int:
        return None
    is_sound = 0 <= begin <= arrived < end < MAX_STEP_MS  # false of a NaN
    return TimedAction(Action(Op(op), chunk, micro_batch), arrived, end) if is_sound else None


def sort_key(action: Action) -> tuple[str, int, int]:
    """Return an action as a key to sort by."""
    return action.op.value, action.chunk, action.micro_batch


MAX_CELLS = 4096
"""Experts of all layers that are drawn, some 60 bytes each."""


def draw_loads(runs: Sequence[RunRecords]) -> Markup:
    """Draw the newest loads of each run that has experts. Empty without any."""
    drawn = [(drawing, [run.name]) for run in runs for record in run.loads if (drawing := draw_load(record))]
    return macro("sections.html", "drawings", drawn, 0)


def draw_load(record: Mapping[str, Any]) -> Markup:
    """Draw a record of kind `experts` as a heat map: a row for each layer, a cell for each expert.

    Of a large model the least even layers; empty for a damaged record.
    """
    counts = record.get("counts")
    rows = [row for each in counts.items() if (row := load_row(*each))] if isinstance(counts, dict) else []
    if not rows:
        return Markup()
    most = max(1, MAX_CELLS // max(len(loads) for _, loads in rows))
    uneven = sorted(rows, key=lambda row: -max(row[1]))[:most]
    shown = [row for row in rows if row in uneven]
    return macro("pipeline.html", "loads", record["step"], shown, len(rows) - len(shown))


def load_row(layer: str, counts: object) -> tuple[str, list[float]] | None:
    """Return a layer's number and the loads of its experts over their mean; None if they are damaged."""
    loads = list(map(number, counts)) if isinstance(counts, list) else []
    total = sum(loads)
    is_sound = layer.isdecimal() and total > 0 and min(loads) >= 0  # a NaN makes the sum one
    return (layer, [load * len(loads) / total for load in loads]) if is_sound else None
