"""Results of an experiment's steps, for the functions that conclude from them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.logged import steps_of
from mlm.tracking.history import FILE_NAME
from mlm.tracking.page.runs import Run, read_run
from mlm.util.bounded import parse_json, read_bounded
from mlm.util.errors import CorruptFileError

if TYPE_CHECKING:
    from mlm.reproduce.experiment import Step

LARGEST = 1 << 28  # bytes of a result
REMOVE = "delete it, and the step runs again"
WARM_UP = 3
"""Steps of a run whose times do not count: caches, allocator and threads warm up."""


class Fields(dict[str, Any]):
    """Fields of a JSON file, of which a missing one is an error of that file."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise CorruptFileError(f"{self.path} is damaged: it has no {key}; {REMOVE}")


def read_object(path: Path, most: int) -> Fields:
    """Read a JSON object of at most `most` bytes. Raises OSError, CorruptFileError."""
    content = read_bounded(path, most, REMOVE)
    try:
        found = parse_json(content, foreign=True)
    except ValueError as error:
        raise CorruptFileError(f"{path} is damaged: {error}; {REMOVE}") from error
    if not isinstance(found, dict):
        raise CorruptFileError(f"{path} is damaged: it is no JSON object; {REMOVE}")
    return Fields(path, found)


@dataclass(frozen=True)
class Times:
    """Seconds of steps."""

    every: tuple[float, ...]

    @property
    def median(self) -> float:
        """Their median."""
        return statistics.median(self.every)

    @property
    def least(self) -> float:
        """Their minimum: the time with the least disturbance by others."""
        return min(self.every)


@dataclass(frozen=True)
class Record:
    """Record of a step that is done."""

    words: tuple[str, ...]
    code: int
    """Exit code; not 0 only for steps that may fail."""
    seconds: float
    said: str
    """The last line of a failed step."""
    hardware: str = ""
    """Of the machine that it ran on."""
    versions: str = ""
    """Of the programs that it ran with."""


class Results:
    """Results of steps by name.

    Args:
        config: of the command.
        steps: of the experiment, all done.
        records: of each step.
    """

    def __init__(
        self, config: ReproduceConfig, steps: Sequence["Step"], records: Mapping[str, Record]
    ) -> None:
        self.config = config
        self.folder = Path(config.out)
        self.steps = {step.name: step for step in steps}
        self.records = records
        self._runs = dict[str, Run]()

    @cached_property
    def seeds(self) -> range:
        """The seeds of runs that are compared."""
        return range(1, self.config.seeds + 1)

    def path(self, name: str) -> Path:
        """Return the result of a step."""
        return self.folder / self.steps[name].result

    def failed(self, name: str) -> bool:
        """True for a step that may fail, and did."""
        return self.records[name].code != 0

    def json(self, name: str) -> Fields:
        """Return the JSON object that a step left.

        Raises OSError, CorruptFileError, the latter for a missing key too.
        """
        return read_object(self.path(name), LARGEST)

    def run(self, name: str) -> Run:
        """Return the run that a step left. Raises UserError, CorruptFileError."""
        if name not in self._runs:
            found = read_run(self.path(name), name)
            if not self.failed(name) and (lost := lost_steps(found, steps_of(self.steps[name].words))):
                raise CorruptFileError(
                    f"{self.path(name) / FILE_NAME} is damaged: {lost}; delete {self.path(name)}, and the "
                    "step runs again"
                )
            self._runs[name] = found
        return self._runs[name]

    def validation(self, name: str) -> list[tuple[int, float]]:
        """Return (step, validation loss) pairs of a run, in order."""
        table = self.run(name).tables.get("validation", {})
        if not table:
            return []
        return [(int(step), float(loss)) for step, loss in zip(table["step"], table["loss"], strict=True)]

    def final_loss(self, name: str) -> float:
        """Return the last validation loss of a run; NaN without one."""
        found = self.validation(name)
        return found[-1][1] if found else float("nan")

    def step_times(self, name: str, warm_up: int = WARM_UP) -> Times:
        """Return the seconds of a run's steps without the first; it must log every step (log.every=1)."""
        times = self.run(name).column("step", "step_time_s")[warm_up:]
        return Times(tuple(map(float, times)))


def lost_steps(run: Run, total: int) -> str:
    """Describe what is missing in the history of a run that was to take `total` steps; "" if it is whole.

    Medians and last losses of what is left would be those of another run.
    """
    steps = [0, *(int(step) for step in run.tables.get("step", {}).get("step", ()))]
    if steps[-1] < total:
        return f"it ends at step {steps[-1]} of {total}"
    every = run.settings.get("log.every")
    gaps = pairwise(steps)
    if isinstance(every, int) and (gap := next((gap for gap in gaps if gap[1] - gap[0] > every), None)):
        return f"steps between {gap[0]} and {gap[1]} are missing"
    return f"{run.damaged} of its lines are no records" if run.damaged else ""
