"""Results of steps that never ran: run folders with the numbers that a test chooses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment
from mlm.reproduce.results import Record, Results


def made_results(experiment: Experiment, folder: Path, **settings: Any) -> Results:
    """Return results of an experiment whose steps are all done, in a folder that a test fills."""
    config = ReproduceConfig(out=str(folder), **settings)
    steps = experiment.steps(config)
    return Results(config, steps, {step.name: Record(step.words, 0, 1.0, "") for step in steps})


def write_run(
    folder: Path,
    *,
    seconds: float = 0.1,
    steps: int = 12,
    total: int = 0,
    validation: Mapping[int, float] | None = None,
    ranks: Sequence[Sequence[Mapping[str, object]]] = (),
    **numbers: float,
) -> None:
    """Write a run whose steps all take `seconds`, with `numbers` in each of their records.

    Logged are the first `steps`, and the last one of `total` if that is more.
    `ranks` are the times of every rank, of each record of that kind.
    """
    folder.mkdir(parents=True)
    records = [{"kind": "run", "time": 0.0, "start_step": 0, "total_steps": steps}]
    records += [
        {"kind": "step", "time": step * seconds, "step": step, "loss": 1.0, "step_time_s": seconds, **numbers}
        for step in (*range(1, steps + 1), *((total,) if total > steps else ()))
    ]
    records += [
        {"kind": "validation", "time": step * seconds, "step": step, "loss": loss}
        for step, loss in (validation or {}).items()
    ]
    records += [
        {"kind": "ranks", "time": steps * seconds, "step": steps, "ranks": list(times)} for times in ranks
    ]
    records.sort(key=lambda record: record.get("step", 0))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.yaml").write_text("")


def write_result(path: Path, content: object) -> None:
    """Write a result of a step as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
