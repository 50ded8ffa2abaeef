"""Layers of pipeline stages."""

import re
from dataclasses import dataclass

HEAD_MODULES = ("final_norm", "output", "pooler", "mlm_head", "sop_head", "classifier")
"""Modules of a model after its layers: they are in the last stage."""


@dataclass(frozen=True)
class PipelineStage:
    """A run of consecutive layers, with the embedding before the first and the head after the last."""

    layers: range
    """Global layer numbers."""
    is_first: bool
    is_last: bool


def split_layers(num_layers: int, num_stages: int) -> list[PipelineStage]:
    """Return the stages of a model, in order.

    Remaining layers go to the stages without embedding or head, then to the first: the last stage computes
    the vocabulary projection. Raises ValueError if there are more stages than layers.
    """
    if num_layers < num_stages:
        raise ValueError(f"num_layers={num_layers} must be at least the {num_stages} stages of pp * vp")
    share, remainder = divmod(num_layers, num_stages)
    counts = [share] * num_stages
    for stage in [*range(1, num_stages - 1), 0][:remainder]:
        counts[stage] += 1
    stages, first = [], 0
    for number, count in enumerate(counts):
        stages.append(PipelineStage(range(first, first + count), number == 0, number == num_stages - 1))
        first += count
    return stages


def parameter_home(name: str) -> int | str:
    """Return a parameter's global layer number, else "first" or "last" stage (tied tables: first)."""
    if match := re.match(r"layers\.(\d+)\.", name):
        return int(match[1])
    return "last" if name.split(".")[0] in HEAD_MODULES else "first"


def assign_stages(num_layers: int, pp: int, vp: int) -> dict[int | str, int]:
    """Return the pipeline rank of each layer, "first" and "last". Stage number s is on rank s modulo pp."""
    ranks: dict[int | str, int] = {"first": 0, "last": pp - 1}
    for number, stage in enumerate(split_layers(num_layers, pp * vp)):
        ranks.update(dict.fromkeys(stage.layers, number % pp))
    return ranks
