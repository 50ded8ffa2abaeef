"""The length of a run whose cooldown begins at a checkpoint: `resume=RUN schedule.cooldown=STEPS`."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.folders import CHECKPOINTS, latest_checkpoint, step_of
from mlm.config.plain_yaml import parse, read_text
from mlm.training.resume import continued_candidates
from mlm.util.errors import UserError
from mlm.util.ownership import RUN_SETTINGS


def settle_cooldown(values: dict[str, Any], typed: Collection[str]) -> str | None:
    """Set train.steps of composed settings to the end of the cooldown; return what to print.

    Only where neither the user nor the run's own settings, of a cooldown that is under way, say it; None
    then. Raises UserError for a run to continue that holds no state, CorruptFileError where none is whole.
    """
    cooldown, origin = values["schedule"].get("cooldown"), values["checkpoint"].get("from_run")
    if not isinstance(cooldown, int) or cooldown <= 0 or "train.steps" in typed:
        return None
    out = Path(str(values["out"]))
    own = latest_checkpoint(out / CHECKPOINTS)
    if values["checkpoint"].get("from_mirror"):
        raise UserError(
            f"schedule.cooldown={cooldown}: its steps from a mirror are not known; set train.steps too"
        )
    if own is None and not isinstance(origin, str):
        return None
    start = step_of(own or continued_candidates(str(origin))[0])
    steps = _steps_of_cooldown(out / RUN_SETTINGS, cooldown) if own else None
    if steps is None or not steps - cooldown <= start <= steps:
        steps = start + cooldown
    values["train"]["steps"] = steps
    return f"schedule.cooldown={cooldown}: steps {steps - cooldown + 1:,} to {steps:,} of train.steps={steps}"


def _steps_of_cooldown(path: Path, cooldown: int) -> int | None:
    saved: Mapping[str, Any] = parse(read_text(path), path) if path.is_file() else {}
    schedule, train = saved.get("schedule"), saved.get("train")
    if not isinstance(schedule, dict) or not isinstance(train, dict) or schedule.get("cooldown") != cooldown:
        return None
    steps = train.get("steps")
    return steps if type(steps) is int else None
