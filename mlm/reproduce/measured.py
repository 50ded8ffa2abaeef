"""Contenders timed in rounds: short runs that take turns, and how their step times compare.

A round trains each contender once, one after the other, so that a machine that slows down slows all of them.
Ratios are taken within a round; a difference counts if all rounds show it.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlm.reproduce.conclusion import Series
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import NO_MEMORY, Step
from mlm.reproduce.results import Results

LEAST_ROUNDS = 3
"""Rounds from which a difference is claimed."""
TIMED_STEPS = 12
TIMED = (
    "data=synthetic",
    f"train.steps={TIMED_STEPS}",
    "train.validate_every=0",
    "checkpoint.save_every=0",
    "check.every=0",
    f"check.ranks_every={TIMED_STEPS // 2}",
    "log.every=1",
    "log.live=off",
)
"""Settings of a run that is there for its step times: nothing is saved or checked between steps. Ranks record
twice what they waited for, the second time without the first steps."""
ON_CPU = ("dist.device=cpu", "dist.threads_per_rank=1")
ON_GPU = ("precision=bf16",)


@dataclass(frozen=True)
class Spread:
    """Median of the rounds, between the least and the largest."""

    median: float
    least: float
    largest: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.largest:.3g})"


def spread(rounds: Sequence[float]) -> Spread:
    """Return the spread of one value of each round."""
    return Spread(statistics.median(rounds), min(rounds), max(rounds))


def above(rounds: Sequence[float], bound: float) -> bool | None:
    """Return True if a value is above the bound in all rounds, False if below in all; None: not decided."""
    if len(rounds) < LEAST_ROUNDS:
        return None
    if min(rounds) > bound:
        return True
    return False if max(rounds) < bound else None


def model(**sizes: int | float) -> tuple[str, ...]:
    """Return words for a small GPT-2 of these sizes, without dropout unless given."""
    return ("model=gpt2_tiny", *(f"model.{key}={value}" for key, value in sizes.items()))


def timed_steps(
    experiment: str,
    contenders: Mapping[str, Sequence[str]],
    config: ReproduceConfig,
    *,
    minutes: float,
    may_lack_memory: bool = False,
) -> list[Step]:
    """Return runs of all contenders in as many rounds as there are seeds.

    Args:
        experiment: name, before those of the contenders.
        contenders: settings of each beside TIMED.
        config: of the command.
        minutes: that one run takes.
        may_lack_memory: True if on GPUs a contender that does not fit is a result too.
    """
    on_cpu = config.scale == "laptop"
    machine = ON_CPU if on_cpu else ON_GPU
    found = list[Step]()
    for number in range(1, config.seeds + 1):
        for contender, words in contenders.items():
            name = run_name(experiment, contender, number)
            found.append(
                Step(
                    name=name,
                    words=("mlm", "pretrain", *words, *TIMED, *machine, f"out=runs/{name}"),
                    result=f"runs/{name}",
                    minutes=minutes,
                    needs=(found[-1].name,) if found else (),  # in turns
                    may_fail=NO_MEMORY if may_lack_memory and not on_cpu else "",
                )
            )
    return found


def run_name(experiment: str, contender: str, number: int) -> str:
    """Return the name of a contender's run in a round."""
    return f"{experiment}-{contender}-round{number}"


def of_rounds(
    results: Results, experiment: str, contender: str, value: Callable[[str], float]
) -> list[float]:
    """Return a value of a contender's run in each round."""
    return [value(run_name(experiment, contender, number)) for number in results.seeds]


def seconds(results: Results, experiment: str, contender: str) -> list[float]:
    """Return the median step time of a contender in each round."""
    return of_rounds(results, experiment, contender, lambda name: results.step_times(name).median)


def memory(results: Results, experiment: str, contender: str) -> list[float]:
    """Return the largest memory of rank 0 of a contender in each round, bytes."""
    return of_rounds(
        results,
        experiment,
        contender,
        lambda name: float(results.run(name).column("step", "memory_bytes").max()),
    )


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return the ratio of two values in each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def line(name: str, x: Sequence[float], every: Sequence[Sequence[float]]) -> Series:
    """Return a series of medians with their spread, from the rounds of each x."""
    spreads = [spread(rounds) for rounds in every]
    return Series(
        name=name,
        x=x,
        y=[each.median for each in spreads],
        low=[each.least for each in spreads],
        high=[each.largest for each in spreads],
    )


def percent(rounds: Sequence[float]) -> str:
    """Return a change as `+12.0 % (+10.0 to +13.0)`, from ratios; without a spread of a single one."""
    each = spread([100 * (value - 1) for value in rounds])
    between = f" ({each.least:+.1f} to {each.largest:+.1f})" if len(rounds) > 1 else ""
    return f"{each.median:+.1f} %{between}"
