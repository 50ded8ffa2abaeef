"""Figure 6 of arXiv:1909.08053: validation perplexity by model size, at equal tokens and at equal time."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from mlm.reproduce.conclusion import Cell, Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import Spread, spread
from mlm.reproduce.results import Results
from mlm.reproduce.v1 import trained_models
from mlm.reproduce.v1.sizes import TRAININGS, Size, Training, order, run_name, training_steps

PARTS = (0.25, 0.5, 1.0)
"""Shares of the tokens at which sizes are compared."""


@dataclass(frozen=True)
class Measured:
    """The runs of a size, a row per seed."""

    size: Size
    steps: Sequence[int]
    """Of the validations."""
    losses: Sequence[Sequence[float]]
    seconds: float
    """Per step, validation and saving left out: the median of all seeds' medians."""
    flops: float
    """Operations of the model per step."""

    @classmethod
    def of(cls, results: Results, size: Size) -> "Measured":
        """Read the runs of a size."""
        names = [run_name(size, seed) for seed in results.seeds]
        curves = [results.validation(name) for name in names]
        times = spread([results.step_times(name).median for name in names])
        losses = [[loss for _, loss in curve] for curve in curves]
        flops = spread([flops_of_step(results, name) for name in names])
        return cls(size, [step for step, _ in curves[0]], losses, times.median, flops.median)

    @cached_property
    def final(self) -> Spread:
        """Perplexity at the last step."""
        return self.at(self.steps[-1])

    def at(self, step: float) -> Spread:
        """Return the perplexity at a step, its logarithm interpolated between validations."""
        return spread([math.exp(float(np.interp(step, self.steps, losses))) for losses in self.losses])

    def reaching(self, finals: Sequence[float]) -> Spread | None:
        """Return the steps after which each seed's loss is as low as that given; None if one never is."""
        pairs = zip(self.losses, finals, strict=True)
        found = [first_below(self.steps, losses, final) for losses, final in pairs]
        reached = [step for step in found if step is not None]
        return spread(reached) if len(reached) == len(found) else None


def flops_of_step(results: Results, name: str) -> float:
    """Return the operations of a step of one rank's run, which are the same in each."""
    table = results.run(name).tables["step"]
    return 1e12 * statistics.median(map(float, table["tflops"] * table["step_time_s"]))


@dataclass(frozen=True)
class Cost:
    """A measure by which sizes are compared: what a step of each takes."""

    name: str
    of_step: Callable[[Measured], float]
    words: Callable[[float], str]
    note: str

    def of(self, found: Measured, steps: float | None = None) -> float:
        """Return what a number of steps takes; all steps unless given."""
        return self.of_step(found) * (found.steps[-1] if steps is None else steps)


COSTS = (
    Cost(
        name="time",
        of_step=lambda found: found.seconds,
        words=lambda cost: f"{cost / 60:.1f} min",
        note="Time is a run's median step time times its steps, of runs that share this machine with others.",
    ),
    Cost(
        name="computation",
        of_step=lambda found: found.flops,
        words=lambda cost: f"{cost / 1e12:.3g} TFLOP",
        note="Operations of the model, the vocabulary's included; no machine changes them.",
    ),
)


def first_below(steps: Sequence[int], losses: Sequence[float], bound: float) -> float | None:
    """Return the step at which a loss is first at most the bound, interpolated; None if it never is."""
    if losses[0] <= bound:
        return float(steps[0])
    for (start, before), (end, after) in pairwise(zip(steps, losses, strict=True)):
        if after <= bound:
            return start + (end - start) * (before - bound) / (before - after)
    return None


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the runs of all sizes and seeds; at scale=paper the plans of the paper's models."""
    return training_steps(config) or trained_models.plan_steps()


def conclude(results: Results) -> Conclusion:
    """Compare the sizes at equal tokens and at equal time."""
    training = TRAININGS.get(results.config.scale)
    if training is None:
        return trained_models.conclusion(results)
    found = [Measured.of(results, size) for size in training.sizes]
    return Conclusion(
        verdict=verdict(len(results.seeds), [each.final for each in found]),
        seen=seen(found),
        limits=limits(training, found),
        tables=(equal_tokens(training, found), *(equal_cost(cost, found) for cost in COSTS), reaching(found)),
        charts=charts(training, found),
        curves=[run_name(size, 1) for size in training.sizes],
    )


def verdict(seeds: int, finals: Sequence[Spread]) -> Verdict:
    """Return the verdict on `larger models reach lower perplexities`, sizes ascending."""
    orders = [order(seeds, larger, smaller) for smaller, larger in pairwise(finals)]
    if all(each == -1 for each in orders):
        return Verdict.AGREES
    if any(each == 1 for each in orders):
        return Verdict.PARTLY if any(each == -1 for each in orders) else Verdict.CONTRADICTS
    return Verdict.PARTLY if any(each == -1 for each in orders) else Verdict.OPEN


def seen(found: Sequence[Measured]) -> str:
    """Return what was measured, in a sentence."""
    each = ", ".join(f"{one.size.label}: {one.final}" for one in found)
    small, large = found[0], found[-1]
    line = f"validation perplexity at equal tokens, median (least to largest seed), by parameters: {each}"
    steps = large.reaching([losses[-1] for losses in small.losses])
    if steps is None:
        return f"{line}; the largest model does not reach the smallest's in all seeds."
    share = steps.median / small.steps[-1]
    times, operations = (cost.of(large, steps.median) / cost.of(small) for cost in COSTS)
    return (
        f"{line}; the largest reaches the smallest's last perplexity with {100 * share:.0f} % of its tokens, "
        f"in {times:.2g} times its time and with {operations:.2g} times its computation."
    )


def equal_tokens(training: Training, found: Sequence[Measured]) -> Table:
    """Return perplexities after shares of the tokens."""
    rows = [
        [
            f"{part * one.steps[-1] * training.tokens_per_step / 1e6:.2f}M tokens",
            *(str(each.at(part * each.steps[-1])) for each in found),
        ]
        for part in PARTS
        for one in found[:1]
    ]
    rows.append(["peak learning rate", *(f"{each.size.lr:g}" for each in found)])
    names = [f"{each.size.label} ({each.size.layers} x {each.size.hidden})" for each in found]
    return Table(
        title="Validation perplexity at equal tokens",
        headings=["after", *names],
        rows=rows,
        note="Parameters without embeddings (layers x hidden size). Median of the seeds, least to largest.",
    )


def equal_cost(cost: Cost, found: Sequence[Measured]) -> Table:
    """Return perplexities at the moments at which each size has cost as much as another's whole run."""
    rows = list[Sequence[Cell]]()
    for moment in found:
        whole = cost.of(moment)
        cells = list[Cell]()
        for each in found:
            step = whole / cost.of_step(each)
            if step < each.steps[0]:
                cells.append("not validated yet")
            else:
                ended = ", ended" if step > each.steps[-1] * 1.001 else ""
                cells.append(f"{each.at(step)}{ended}")
        rows.append([f"{cost.words(whole)}, the {moment.size.label} model's whole run", *cells])
    return Table(
        title=f"Validation perplexity at equal {cost.name}",
        headings=["after", *(each.size.label for each in found)],
        rows=rows,
        note=f"Read from the validations of the same runs, interpolated. {cost.note} `ended`: the model had "
        "taken all its steps before.",
    )


def reaching(found: Sequence[Measured]) -> Table:
    """Return what a larger model needs for a smaller one's last perplexity."""
    rows = list[Sequence[Cell]]()
    for smaller, larger in pairwise(found):
        steps = larger.reaching([losses[-1] for losses in smaller.losses])
        name = f"{larger.size.label} to the last of {smaller.size.label}"
        if steps is None:
            rows.append([name, *["not reached"] * (1 + len(COSTS))])
            continue
        ends = (steps.median, steps.least, steps.largest)
        shares = Spread(*(100 * step / smaller.steps[-1] for step in ends))
        times = [Spread(*(cost.of(larger, step) / cost.of(smaller) for step in ends)) for cost in COSTS]
        rows.append([name, str(shares), *map(str, times)])
    return Table(
        title="What a larger model needs for a smaller one's last perplexity",
        headings=["model", "% of its tokens", *(f"times its {cost.name}" for cost in COSTS)],
        rows=rows,
        note="Median of the seeds, least to largest.",
    )


def charts(training: Training, found: Sequence[Measured]) -> list[Chart]:
    """Return perplexity over tokens, time and computation."""
    tokens = training.tokens_per_step / 1e6

    def series(each: Measured, unit: float) -> Series:
        curve = [each.at(step) for step in each.steps]
        return Series(
            name=f"{each.size.label} parameters",
            x=[step * unit for step in each.steps],
            y=[point.median for point in curve],
            low=[point.least for point in curve],
            high=[point.largest for point in curve],
        )

    return [
        Chart(
            name="perplexity-tokens",
            title="Validation perplexity over tokens",
            x_label="tokens, millions",
            y_label="perplexity",
            series=[series(each, tokens) for each in found],
            log_y=True,
        ),
        Chart(
            name="perplexity-time",
            title="Validation perplexity over time",
            x_label="minutes of training",
            y_label="perplexity",
            series=[series(each, each.seconds / 60) for each in found],
            log_y=True,
        ),
        Chart(
            name="perplexity-computation",
            title="Validation perplexity over computation",
            x_label="TFLOP",
            y_label="perplexity",
            series=[series(each, each.flops / 1e12) for each in found],
            log_x=True,
            log_y=True,
        ),
    ]


def limits(training: Training, found: Sequence[Measured]) -> list[str]:
    """Return what cannot be concluded."""
    tokens = found[0].steps[-1] * training.tokens_per_step / 1e6
    return [
        f"{tokens:.1f}M tokens and a context of {training.seq}; the paper's models read 157,000M tokens with "
        "a context of 1,024. The perplexities themselves are not comparable: corpus and tokenizer differ.",
        "The paper gives larger models more GPUs, and compares at equal steps; it makes no claim about equal "
        "time on equal hardware. Here all sizes have the same cores.",
        "At equal time before its end a run's learning rate has not decayed yet, which makes larger models "
        "look worse there than runs planned for that time would.",
        "Learning rates come from a short sweep with one seed.",
    ]


EXPERIMENT = Experiment(
    name="v1-figure6",
    title="Validation perplexity against model size, at equal tokens and equal time",
    source="Megatron-LM, arXiv:1909.08053, figure 6",
    claim="Over 300,000 steps larger models (355M, 2.5B, 8.3B) converge faster and to lower validation "
    "perplexities; the 8.3B model reaches 9.27.",
    minutes=75,
    steps=steps,
    conclude=conclude,
)
