"""Layouts on the papers' clusters, planned by `mlm plan layouts`."""

import csv
from collections.abc import Mapping
from typing import Any

from mlm.plan.shape import Layout, Shape
from reproduce.experiment import SCRIPTS, Step
from reproduce.results import Results

A100 = "dgx_a100_80g"


def published_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a published table in scripts/results/published, each with its source."""
    text = (SCRIPTS / "results" / "published" / f"{name}.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))


def layout_step(name: str, model: tuple[str, ...], layout: Layout, hardware: str) -> Step:
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
    return Shape(layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, seq=seq, vocab=51200)
