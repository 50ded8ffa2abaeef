"""Results of an experiment's steps, and how numbers of several rounds compare.

Timed runs take turns: a round trains each contender once, so that a machine that slows down slows all of
them. Ratios are taken within a round, and a difference counts if all of at least three rounds show it.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from reproduce.experiment import Settings, Stages, Step

MIN_ROUNDS = 3
"""Rounds or seeds from which a difference is claimed."""
WARM_UP = 3
"""First steps of a run whose times do not count."""
TIMED_STEPS = 12
TIMED = (
    *("data=synthetic", f"train.steps={TIMED_STEPS}", "train.validate_every=0", "checkpoint.save_every=0"),
    *("check.every=0", f"check.ranks_every={TIMED_STEPS // 2}", "log.every=1", "log.live=off"),
    *("dist.device=cpu", "dist.threads_per_rank=1"),
)
"""Settings of a run that is there for its step times. Ranks record their waiting twice, the second time
without
the first steps."""


@dataclass(frozen=True)
class Record:
    """Record of a finished step."""

    words: tuple[str, ...]
    code: int
    """Exit code; not 0 for a run that diverged."""
    seconds: float
    hardware: str
    versions: str


@cache
def read_metrics(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return a run's records by kind, in order of steps; those that a resumed run repeats replace older
    ones."""
    kinds: dict[str, dict[int, dict[str, Any]]] = {}
    for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
        record = json.loads(line)
        kinds.setdefault(record["kind"], {})[record.get("step", 0)] = record
    return {kind: [records[step] for step in sorted(records)] for kind, records in kinds.items()}


class Results:
    """Results of the steps of one experiment.

    Args:
        name: of the experiment.
        settings: of the command line.
        stages: of the experiment, all done.
        records: of each step.
    """

    def __init__(self, name: str, settings: Settings, stages: Stages, records: Mapping[str, Record]) -> None:
        self.name, self.settings, self.records = name, settings, records
        self.steps = {step.name: step for stage in stages for step in stage}
        self.seeds = range(1, settings.seeds + 1)

    def path(self, step: str) -> Path:
        """Return the result of a step."""
        return self.settings.out / self.steps[step].result

    def json(self, step: str) -> Any:
        """Return the JSON that a step left."""
        return json.loads(self.path(step).read_text("utf-8"))

    def column(self, step: str, kind: str, key: str) -> list[float]:
        """Return a number of each record of a kind in a run that have it."""
        return [record[key] for record in read_metrics(self.path(step)).get(kind, []) if key in record]

    def validation(self, step: str, key: str = "loss") -> list[tuple[int, float]]:
        """Return (step, validation loss) pairs of a run."""
        records = read_metrics(self.path(step)).get("validation", [])
        return [(record["step"], record[key]) for record in records]

    def step_seconds(self, step: str) -> float:
        """Return the median step time of a run that logs every step."""
        return statistics.median(self.column(step, "step", "step_time_s")[WARM_UP:])

    def rounds(self, contender: str, value: Callable[[str], float]) -> list[float]:
        """Return a value of a contender's run in each round."""
        return [value(run_name(self.name, contender, number)) for number in self.seeds]

    def seconds(self, contender: str) -> list[float]:
        """Return the median step time of a contender in each round."""
        return self.rounds(contender, self.step_seconds)

    def tflops(self, contender: str) -> list[float]:
        """Return the median model TFLOP/s of one rank in each round."""
        return self.rounds(
            contender, lambda run: statistics.median(self.column(run, "step", "tflops")[WARM_UP:])
        )

    def waiting(self, contender: str) -> list[float]:
        """Return the share of all ranks' time in which they wait for each other, in each round."""

        def share(run: str) -> float:
            ranks = [each for each in self.rank_seconds(run) if each]
            waited = sum(value for rank in ranks for key, value in rank.items() if key.startswith("waiting"))
            total = sum(value for rank in ranks for value in rank.values())
            return waited / total if total else 0.0

        return self.rounds(contender, share)

    def rank_seconds(self, run: str) -> list[dict[str, float]]:
        """Return what each rank spent its time on, in the last record of a run; none of a single rank."""
        records = read_metrics(self.path(run)).get("ranks", [])[1:]
        ranks = records[-1]["ranks"] if records else []
        return [{key: value for key, value in rank.items() if key != "host"} for rank in ranks]


def run_name(experiment: str, contender: str, number: int) -> str:
    """Return the name of a contender's run in a round."""
    return f"{experiment}-{contender}-round{number}"


def timed_stages(
    experiment: str, contenders: Mapping[str, Sequence[str]], settings: Settings, minutes: float
) -> list[list[Step]]:
    """Return runs of all contenders in turns, each alone on the machine, a round for each seed."""
    names = [
        (run_name(experiment, contender, n), words)
        for n in range(1, settings.seeds + 1)
        for contender, words in contenders.items()
    ]
    return [
        [Step(name, ("mlm", "pretrain", *words, *TIMED, f"out=runs/{name}"), f"runs/{name}", minutes)]
        for name, words in names
    ]


def small_gpt2(**sizes: int | float) -> tuple[str, ...]:
    """Return words for a small GPT-2 of these sizes."""
    return ("model=gpt2_tiny", *(f"model.{key}={value}" for key, value in sizes.items()))


def batch(micro: int, count: int = 1) -> tuple[str, ...]:
    """Return words for `count` micro-batches of `micro` samples in a step."""
    return (f"train.micro_batch_size={micro}", f"train.global_batch_size={micro * count}")


def spread(rounds: Sequence[float], digits: str = ".3g", unit: str = "") -> str:
    """Return `median (least to largest)`; without a spread of a single value."""
    median = f"{statistics.median(rounds):{digits}}{unit}"
    return median + (f" ({min(rounds):{digits}} to {max(rounds):{digits}})" if len(rounds) > 1 else "")


def share(ratios: Sequence[float]) -> str:
    """Return shares of 1 as `82.1 % (81.5 to 82.9)`."""
    return spread([100 * ratio for ratio in ratios], ".1f", " %")


def change(ratios: Sequence[float]) -> str:
    """Return ratios as a change: `+12.0 % (+10.0 to +13.0)`."""
    return spread([100 * (ratio - 1) for ratio in ratios], "+.1f", " %")


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return the ratio of two values in each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def above(rounds: Sequence[float], bound: float) -> bool | None:
    """Return True if all rounds are above the bound, False if all are below; None: not decided."""
    if len(rounds) < MIN_ROUNDS:
        return None
    if min(rounds) > bound:
        return True
    return False if max(rounds) < bound else None


def is_lower(values: Sequence[float], others: Sequence[float]) -> bool | None:
    """Return True if all seeds of one are below all of the other, False if above; None: not decided."""
    if min(len(values), len(others)) < MIN_ROUNDS:
        return None
    if max(values) < min(others):
        return True
    return False if min(values) > max(others) else None
