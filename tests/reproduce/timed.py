"""Results of steps that nobody ran: their times and memory are functions of their names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment
from mlm.reproduce.results import Record, Results, Times
from mlm.tracking.page.runs import Run

ROUNDS = 3


def wobbling(number: int) -> float:
    """A factor that differs between rounds by a thousandth: a spread that decides nothing."""
    return 1 + (number - 2) / 1000


class Timed(Results):
    """Results of an experiment whose steps took given seconds.

    Args:
        experiment: whose steps.
        seconds: of a contender: `pp2-m4` → 0.5.
        scale: of the command.
        rounds: of the command.
        failed: contenders that did not run.
        found: JSON of steps that plan.
    """

    def __init__(
        self,
        experiment: Experiment,
        seconds: Callable[[str], float] = lambda name: 1.0,
        *,
        scale: Any = "laptop",
        rounds: int = ROUNDS,
        failed: tuple[str, ...] = (),
        found: Mapping[str, Any] | None = None,
    ) -> None:
        config = ReproduceConfig(scale=scale, seeds=rounds, cores=2)
        steps = experiment.steps(config)
        codes = {step.name: int(any(f"-{each}" in step.name for each in failed)) for step in steps}
        records = {name: Record((), code, 1.0, "") for name, code in codes.items()}
        super().__init__(config, steps, records)
        self.experiment, self.seconds, self.found = experiment, seconds, found

    def step_times(self, name: str, warm_up: int = 3) -> Times:
        contender, _, number = name.removeprefix(f"{self.experiment.name}-").rpartition("-round")
        return Times((self.seconds(contender) * wobbling(int(number)),))

    def run(self, name: str) -> Run:
        run = Run(name, Path())
        run.ranks.append({"ranks": [{"computing": 2.0, "waiting over pp": 1.0}] * 2})
        run.tables["step"] = {"memory_bytes": np.array([1.0, 2.0]) * 2**20}
        return run

    def json(self, name: str) -> dict[str, Any]:
        assert self.found is not None
        return dict(self.found)
