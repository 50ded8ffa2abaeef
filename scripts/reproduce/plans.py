"""Layouts on the papers' clusters: planned by `mlm plan layouts`, and by the time model of the papers'
programs."""

import csv
from collections.abc import Mapping
from typing import Any

from plan_published import MEGATRON_2019

from mlm.models.config import ModelConfig
from mlm.plan.cost import CostModel
from mlm.plan.hardware import preset
from mlm.plan.shape import PlannedLayout, Shape
from reproduce.experiment import SCRIPTS, Step
from reproduce.results import Results

DGX2H, A100 = "dgx2h_v100_32g", "dgx_a100_80g"
SCALING_BATCH = 8
"""Samples of a replica in the scaling study of arXiv:1909.08053."""
NOT_FITTED = (
    "The plan's constants are fitted on table 1 and figure 5 of the paper (scripts/plan_published.py): that "
    "it comes close to them is no evidence."
)


def published_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a published table in scripts/results/published, each with its source."""
    text = (SCRIPTS / "results" / "published" / f"{name}.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def layout_step(name: str, model: tuple[str, ...], layout: PlannedLayout, hardware: str) -> Step:
    """Return a step that plans this layout alone."""
    result = f"results/{name}.json"
    words = {
        **{key: getattr(layout, key) for key in ("tp", "pp", "vp", "dp", "sequence_parallel", "pipeline")},
        **{"zero": 0, "recompute": layout.recompute},
        **{f"train.{key}_size": getattr(layout, key) for key in ("micro_batch", "global_batch")},
        **{"gpus": layout.gpus, "hardware": hardware, "precision": "fp16", "out": result},
    }
    settings = (f"{key}={str(value).lower()}" for key, value in words.items())
    return Step(name, ("mlm", "plan", "layouts", *model, *settings), result, 0.1)


def planned(results: Results, name: str) -> Mapping[str, Any]:
    """Return the numbers of a planned layout."""
    layout: Mapping[str, Any] = results.json(name)["layouts"][0]
    return layout


def gpt_shape(*, layers: int, hidden: int, heads: int, seq: int = 1024) -> Shape:
    """Return the shape of a GPT-2 with the papers' vocabulary."""
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=51200, vocab_multiple=1
    )
    return Shape(model, seq)


def scaling_layout(tp: int, dp: int = 1) -> PlannedLayout:
    """Return a layout of the scaling study: layers recomputed, a micro-batch for each replica."""
    return PlannedLayout(
        tp=tp, dp=dp, recompute="full", micro_batch=SCALING_BATCH, global_batch=SCALING_BATCH * dp
    )


def tflops_2019(shape: Shape, tp: int, dp: int = 1) -> float:
    """Return the TFLOP/s per GPU of DGX-2H by the time model of the program of 2019.

    Recomputed operations count, as in the paper.
    """
    layout = scaling_layout(tp, dp)
    seconds = CostModel(shape, preset(DGX2H), "fp16", MEGATRON_2019).step(layout).total
    return shape.hardware_flops("full", layout.global_batch) / (layout.gpus * seconds * 1e12)
