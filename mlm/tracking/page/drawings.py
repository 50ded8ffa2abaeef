"""Drawings of a run's plan: ranks and what they hold, memory by part.

Each axis has a colour, a pattern or a letter of its own, so that no drawing depends on colour alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mlm.config.build import build
from mlm.models.family import SHIPPED
from mlm.models.stage import Stage, split_layers
from mlm.plan.memory import GIB, PARTS, MemoryModel, Peak
from mlm.plan.report import label
from mlm.plan.shape import Layout
from mlm.tracking.html.elements import Html, join, paragraph, table, text
from mlm.tracking.html.runs import Run
from mlm.training.config import PretrainConfig
from mlm.util.errors import UserError

COLOURS, PATTERNS = 7, 6  # of page.css
MOST = {"tp": 8, "cp": 4, "pp": 16}
MOST_RANKS, MOST_STAGES = 64, 16
LARGEST = 1 << 20
CPU_RESERVED = 0.3 * GIB


@dataclass(frozen=True)
class Plans:
    """Facts that follow from a run's settings."""

    run: Run

    def size(self, key: str) -> int:
        """Return a number of the layout or the settings; 1 where there is none."""
        value = self.run.layout.get(key, self.run.settings.get(key))
        return value if type(value) is int and 0 < value <= LARGEST else 1

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        return {axis: self.size(axis) for axis in ("tp", "cp", "pp", "dp")}

    @cached_property
    def schedule(self) -> str:
        """The pipeline's schedule."""
        found = self.run.layout.get("pipeline")
        return found if found in ("1f1b", "gpipe", "zb_h1") else "1f1b"

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a replica in a step."""
        batch = self.size("train.global_batch_size")
        return max(batch // (self.sizes["dp"] * self.size("train.micro_batch_size")), 1)

    @cached_property
    def stages(self) -> list[list[Stage]]:
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
            found = build(PretrainConfig, self.run.settings, check=lambda config: ())
        except (UserError, ValueError, TypeError):
            return None
        return found if found.model.kind in SHIPPED and self.sizes["cp"] == 1 else None

    @cached_property
    def device(self) -> str:
        """The type of device: as set, or by PyTorch's build."""
        chosen = self.run.settings.get("dist.device")
        versions = self.run.latest.get("versions")
        torch = str(versions.get("torch", "")) if isinstance(versions, dict) else ""
        return "cpu" if chosen == "cpu" or (chosen != "cuda" and torch.endswith("+cpu")) else "gpu"

    def peaks(self) -> list[Peak]:
        """Memory of each pipeline stage, of the first stages; empty where no formula holds."""
        if self.config is None or not self.stages:
            return []
        config, dp = self.config, self.sizes["dp"]
        layout = Layout.of(
            config.parallel,
            dp=dp,
            micro_batch=config.train.micro_batch_size,
            global_batch=config.train.global_batch_size,
        )
        reserved = CPU_RESERVED if self.device == "cpu" else 0.0
        model = MemoryModel(
            config.model,
            config.data.seq_length,
            config.precision.dtype,
            device=self.device,
            reserved=reserved,
        )
        return [model.peak(layout, stage) for stage in range(min(layout.pp, MOST_STAGES))]


def held(stages: Sequence[Stage]) -> str:
    """Return what a pipeline rank holds: `embedding, layers 0–3, output`."""
    ranges = [
        f"{stage.layers[0]}–{stage.layers[-1]}" if len(stage.layers) > 1 else f"{stage.layers[0]}"
        for stage in stages
    ]
    words = ["embedding"] if stages[0].is_first else []
    noun = "layers" if sum(len(stage.layers) for stage in stages) > 1 else "layer"
    words += [f"{noun} {', '.join(ranges)}", *(["output"] if stages[-1].is_last else [])]
    return ", ".join(words)


def draw_layout(plans: Plans) -> Html:
    """Draw the ranks: a row per pipeline stage, a column per replica and tensor-parallel rank."""
    sizes = plans.sizes
    shown = {axis: min(sizes[axis], most) for axis, most in MOST.items()}
    shown["dp"] = max(1, min(sizes["dp"], MOST_RANKS // (shown["tp"] * shown["cp"] * shown["pp"])))
    columns = [(d, c, t) for d in range(shown["dp"]) for c in range(shown["cp"]) for t in range(shown["tp"])]
    rows = []
    for p in range(shown["pp"]):
        holds = f"stage P{p}" + (f": {held(plans.stages[p])}" if plans.stages else "")
        cells = []
        for d, c, t in columns:
            rank = ((p * sizes["dp"] + d) * sizes["cp"] + c) * sizes["tp"] + t
            place = f"P{p} D{d} " + (f"C{c} " if sizes["cp"] > 1 else "") + f"T{t}"
            cells.append(
                f'<td class="c{p % COLOURS} p{t % PATTERNS}"><b>{rank}</b> <small>{place}</small></td>'
            )
        rows.append(f'<tr><th scope="row">{text(holds)}</th>{"".join(cells)}</tr>')
    return join(
        [
            paragraph(_axes(plans, shown)),
            Html(
                '<div class="wide" tabindex="0" role="region" aria-label="ranks"><table class="ranks"><tbody>'
                + "\n".join(rows)
                + "</tbody></table></div>\n"
            ),
        ]
    )


def _axes(plans: Plans, shown: Mapping[str, int]) -> str:
    """Return a line on each axis, and on the ranks that are not drawn."""
    sizes, layout = plans.sizes, plans.run.layout
    ranks = sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]
    words = [f"{ranks:,} ranks." if ranks > 1 else "1 rank."]
    if sizes["pp"] > 1:
        chunks = plans.size("vp")
        words.append(
            f"P (colour): {sizes['pp']} pipeline stages" + (f" of {chunks} chunks." if chunks > 1 else ".")
        )
    if sizes["tp"] > 1:
        also = ", and of the sequence between layers" if layout.get("sequence_parallel") is True else ""
        words.append(
            f"T (pattern): each holds 1/{sizes['tp']} of the heads, the MLP and the vocabulary{also}."
        )
    if sizes["cp"] > 1:
        words.append(f"C: each holds 1/{sizes['cp']} of every sequence.")
    if sizes["dp"] > 1:
        zero = layout.get("zero")
        shards = {2: "optimizer state and gradients", 3: "weights, gradients and optimizer state"}
        split = f"; {shards[zero]} are sharded over them" if zero in (2, 3) else ""
        words.append(f"D: {sizes['dp']} replicas{split}.")
    left = [f"{axis}={sizes[axis]}" for axis in shown if shown[axis] < sizes[axis]]
    words += [f"Drawn are the first of {', '.join(left)}; the others repeat them."] if left else []
    return " ".join(words)


def draw_memory(plans: Plans) -> Html:
    """Draw the memory of each pipeline stage by part, beside what rank 0 logged; empty without a model."""
    peaks = plans.peaks()
    if not peaks or plans.config is None:
        return Html()
    largest = max(peak.total for peak in peaks)
    used = [part for part in PARTS if any(peak.parts[part] >= 0.002 * largest for peak in peaks)]
    bars = []
    for stage, peak in enumerate(peaks):
        pieces = "".join(
            f'<span class="m{PARTS.index(part)}" style="width:{100 * peak.parts[part] / largest:.2f}%" '
            f'title="{part}: {peak.parts[part] / GIB:.3g} GiB"></span>'
            for part in used
        )
        bars.append(f'<div class="row"><b>P{stage}</b><div class="bar">{pieces}</div></div>')
    legend = "".join(f'<span class="key m{PARTS.index(part)}"> </span> {part} ' for part in used)
    measured = plans.run.column("step", "memory_gib")
    logged = f" Rank 0 logged {measured.max():.2f} GiB at most." if len(measured) else ""
    rows = [
        [f"P{stage}", *(f"{peak.parts[part] / GIB:.3g}" for part in used), f"{peak.total / GIB:.3g}"]
        for stage, peak in enumerate(peaks)
    ]
    kind = "a CPU" if plans.device == "cpu" else "a GPU"
    words = f"Planned for {kind}, at the fullest moment of a rank of each stage.{logged}"
    return join(
        [
            paragraph(words),
            Html(
                f'<div class="memory" aria-hidden="true">{"".join(bars)}</div><p class="legend">{legend}</p>'
            ),
            table(["stage", *used, "all, GiB"], rows),
        ]
    )


def layout_name(plans: Plans) -> str:
    """Name a layout in a few words."""
    sizes = plans.sizes
    words = [f"{axis}={size}" for axis, size in sizes.items() if size > 1] or ["one rank"]
    if sizes["pp"] > 1:
        words.append(f"vp={plans.size('vp')} {plans.schedule}")
    return (
        " ".join(words)
        if plans.config is None
        else label(
            Layout.of(
                plans.config.parallel,
                dp=sizes["dp"],
                micro_batch=plans.config.train.micro_batch_size,
                global_batch=plans.config.train.global_batch_size,
            )
        )
    )
