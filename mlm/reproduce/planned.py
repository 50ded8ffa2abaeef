"""Steps that plan by formulas, and what they found."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlm.reproduce.conclusion import Chart, Series
from mlm.reproduce.experiment import NO_LAYOUT, Step
from mlm.reproduce.results import Results

A100 = ("hardware=dgx_a100_80g", "precision=fp16")
"""The hardware and number format of PTD-P."""
PLAN_MINUTES = 0.1


def layout_step(name: str, *words: str) -> Step:
    """Return a step that plans the layout of these settings; it fails if that does not fit."""
    result = f"results/{name}.json"
    return Step(
        name=name,
        words=("mlm", "plan", "layouts", *words, f"out={result}"),
        result=result,
        minutes=PLAN_MINUTES,
        cores=1,
        may_fail=NO_LAYOUT,
    )


def layout(**fields: int | str | bool) -> tuple[str, ...]:
    """Return words that leave nothing of a layout to search.

    Args:
        fields: those that are not at their defaults; micro_batch and global_batch among them.
    """
    fixed: dict[str, Any] = {
        **{"tp": 1, "pp": 1, "vp": 1, "dp": 1, "sequence_parallel": False, "pipeline": "1f1b"},
        **{"zero": 0, "recompute": "none", "micro_batch": 1, "global_batch": 1},
        **fields,
    }
    sizes = [f"train.{key}_size={fixed.pop(key)}" for key in ("micro_batch", "global_batch")]
    gpus = fixed["tp"] * fixed["pp"] * fixed["dp"]
    return (f"gpus={gpus}", *(f"{key}={word(value)}" for key, value in fixed.items()), *sizes)


def word(value: object) -> str:
    """Return a value as a command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def planned(results: Results, name: str) -> dict[str, Any] | None:
    """Return the numbers of a planned layout; None if it does not fit."""
    if results.failed(name):
        return None
    found: dict[str, Any] = results.json(name)["layouts"][0]
    return found


def planned_chart(lines: Mapping[str, Mapping[Any, float]], **axes: Any) -> list[Chart]:
    """Return a chart with a series for each line that has points; none if nothing fits.

    Args:
        lines: points by name of the line.
        axes: fields of the chart but for its series.
    """
    series = [Series(name=name, x=list(its), y=list(its.values())) for name, its in lines.items() if its]
    return [Chart(series=series, **axes)] if series else []


def tflops(results: Results, names: Sequence[str]) -> list[float]:
    """Return the planned TFLOP/s per GPU, recomputed operations left out; NaN where a layout does not fit."""
    found = [planned(results, name) for name in names]
    return [float("nan") if each is None else float(each["model_tflops"]) for each in found]


def cluster_command(words: Sequence[str]) -> str:
    """Return the training run that a planned layout's settings mean."""
    kept = [each for each in words if not each.startswith(("gpus=", "hardware="))]
    return " ".join(("mlm pretrain", *kept, "data=synthetic"))
