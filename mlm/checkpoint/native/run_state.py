"""The state of a training run in a manifest: checks before any of it is believed."""

import math
from collections.abc import Mapping
from pathlib import Path

from mlm.checkpoint.native.format import JSON, RESTORE, Manifest
from mlm.util.errors import CorruptFileError

FINETUNING = "finetuning"
"""Key of the state of a finetuning run."""
INCIDENTS = "incidents"
"""Key of what a run remembers of its incidents, which decides on later ones."""
NOT_FINITE_SINCE = "not_finite_since"
"""Key of a run's incidents: the first of the newest steps that are not finite; 0 if the newest is finite."""
MOST = 1 << 62  # steps, samples
MOST_COUNTED = (1 << 31) - 1  # of the loss scaler's counters: i32 on the device


def check_run_state(manifest: Manifest, path: Path) -> None:
    """Raise CorruptFileError unless the counters and the loss scale are those of a run at this step."""
    state = manifest.state
    problem = (
        f"its state says step {str(state.get('step'))[:40]}, the manifest {manifest.step}"
        if state.get("step") != manifest.step or type(state.get("step")) is not int
        else _out_of_range(state, "consumed_samples", MOST)
        or _out_of_range(state, "applied_steps", float(MOST))
        or _scaler_problem(state.get("scaler"))
    )
    if problem:
        raise CorruptFileError(f"{path}: {problem}. {RESTORE}")


def _scaler_problem(scaler: JSON) -> str | None:
    if not isinstance(scaler, dict):
        return "its scaler is no object"
    limits = {"scale": 2.0**127, "clean_steps": MOST_COUNTED, "skipped": MOST_COUNTED}
    problem = next((why for key, most in limits.items() if (why := _out_of_range(scaler, key, most))), None)
    return problem or (None if scaler["scale"] > 0 else "its scale=0 is out of range")


def _out_of_range(state: Mapping[str, JSON], key: str, most: float) -> str | None:
    value: JSON = state.get(key)
    kinds = (int,) if isinstance(most, int) else (int, float)
    if type(value) in kinds and 0 <= value <= most and math.isfinite(value):
        return None
    return f"its {key}={str(value)[:40]} is out of range"


def not_finite_since(state: Mapping[str, JSON]) -> int:
    """Return the first of the newest steps whose numbers are not finite; 0 if the newest is finite."""
    incidents = state.get(INCIDENTS)
    since = incidents.get(NOT_FINITE_SINCE) if isinstance(incidents, dict) else 0
    return since if type(since) is int else 0


def label_names(state: Mapping[str, JSON]) -> tuple[str, ...]:
    """Return the labels of the task that a checkpoint was finetuned on; empty if it names none."""
    finetuning = state.get(FINETUNING)
    settings = finetuning.get("depends_on") if isinstance(finetuning, dict) else None
    return as_strings(settings.get("task.labels")) if isinstance(settings, dict) else ()


def as_strings(value: JSON) -> tuple[str, ...]:
    """Return a list of strings; empty for anything else."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        return ()
    return tuple(value)
