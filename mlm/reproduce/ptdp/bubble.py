"""The bubble against the number of micro-batches: figure 6's formula, and a pipeline measured."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression

from mlm.reproduce.conclusion import Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import (
    LEAST_ROUNDS,
    above,
    line,
    model,
    of_rounds,
    seconds,
    spread,
    timed_steps,
)
from mlm.reproduce.results import Results

NAME = "ptdp-bubble"
COUNTS = (1, 2, 4, 8, 16)
"""Micro-batches of a step."""
ALONE = (1, 4)
"""Those of the same model on one rank, which tell the time outside the pipeline from that inside."""
CLOSE = 0.25
"""Share by which the idle time may differ from the formula's p - 1 micro-batches."""
SMALL = model(num_layers=4, hidden_size=256, num_heads=8, max_positions=256, vocab_size=128)
LARGE = model(num_layers=16, hidden_size=2048, num_heads=16, max_positions=1024, vocab_size=1024)
PUBLISHED = ((32, 32), (32, 128), (128, 128), (128, 512))
"""(GPUs, micro-batches of all replicas) of figure 6, from memory."""


def stages(config: ReproduceConfig) -> tuple[int, ...]:
    """Return the pipelines that there are cores or GPUs for."""
    if config.scale == "node":
        return (2, 4, 8)
    cores = config.cores or len(os.sched_getaffinity(0))
    return (2, 4) if cores >= 4 else (2,)


def contenders(config: ReproduceConfig) -> dict[str, tuple[str, ...]]:
    """Return settings by contender: pipelines of each depth, and one rank, at each count."""
    node = config.scale == "node"
    words = (*(LARGE if node else SMALL), "train.micro_batch_size=2")
    sizes = {f"pp{p}-m{m}": (p, m) for p in stages(config) for m in COUNTS}
    sizes |= {f"pp1-m{m}": (1, m) for m in ALONE}
    return {
        name: (*words, f"pp={p}", "dp=1", f"train.global_batch_size={2 * m}")
        for name, (p, m) in sizes.items()
    }


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the runs; at scale=paper the schedules of the paper's GPT-3 on 96 GPUs, simulated."""
    if config.scale != "paper":
        return timed_steps(NAME, contenders(config), config, minutes=0.4)
    return [
        Step(
            name=f"{NAME}-plan-m{m}",
            words=("mlm", "plan", "schedule", "pp=12", f"micro_batches={m}", f"out=results/{NAME}-m{m}.json"),
            result=f"results/{NAME}-m{m}.json",
            minutes=0.1,
            cores=1,
        )
        for m in (12, 24, 48, 96)
    ]


@dataclass(frozen=True)
class Measured:
    """Bubbles of a pipeline of p stages in each round."""

    p: int
    shares: Mapping[int, list[float]]
    """Idle over ideal time by the number of micro-batches."""
    idle: list[float]
    """Idle time in units of a micro-batch's; p - 1 by the formula."""
    waited: Mapping[int, list[float]]
    """Time that ranks waited for others over that in which they computed, as they clocked it themselves."""


def measured(results: Results, p: int) -> Measured:
    """Derive the bubbles from step times.

    A step of m micro-batches takes c + (m + p - 1) b: b, a micro-batch's time on one stage, is the slope of
    the times over m. c, the time outside the pipeline (the optimizer's step), is that of one rank, found in
    the same way, over p.
    """
    times = {m: seconds(results, NAME, f"pp{p}-m{m}") for m in COUNTS}
    alone = {m: seconds(results, NAME, f"pp1-m{m}") for m in ALONE}
    shares: dict[int, list[float]] = {m: [] for m in COUNTS}
    idle = list[float]()
    for number in range(len(results.seeds)):
        each, start = linear_regression(COUNTS, [times[m][number] for m in COUNTS])
        outside = max(linear_regression(ALONE, [alone[m][number] for m in ALONE]).intercept, 0.0) / p
        idle.append((start - outside) / each)
        for m in COUNTS:
            shares[m].append((times[m][number] - outside) / (m * each) - 1)
    waited = {m: of_rounds(results, NAME, f"pp{p}-m{m}", lambda run: waiting(results, run)) for m in COUNTS}
    return Measured(p, shares, idle, waited)


def waiting(results: Results, run: str) -> float:
    """Return the time that a run's ranks waited for the pipeline over that in which they computed."""
    records = results.run(run).ranks
    ranks = records[-1]["ranks"] if records else []
    computing = sum(each["computing"] for each in ranks)
    return sum(each["waiting over pp"] for each in ranks) / computing if computing else float("nan")


def conclude(results: Results) -> Conclusion:
    """Compare measured bubbles with (p-1)/m."""
    if results.config.scale == "paper":
        return planned(results)
    every = [measured(results, p) for p in stages(results.config)]
    return Conclusion(
        verdict=verdict(every),
        seen=" ".join(seen(each) for each in every),
        limits=limits(results.config),
        tables=[table(each) for each in every],
        charts=[*(chart(each) for each in every), published()],
        commands=commands(),
    )


def verdict(every: Sequence[Measured]) -> Verdict:
    """Return if the bubble falls with m, and if the idle time is p - 1 micro-batches."""
    if any(len(each.idle) < LEAST_ROUNDS for each in every):
        return Verdict.OPEN
    falls = [
        above([a - b for a, b in zip(each.shares[1], each.shares[16], strict=True)], 0) for each in every
    ]
    if not all(falls):
        return Verdict.CONTRADICTS if False in falls else Verdict.OPEN
    close = [abs(spread(each.idle).median / (each.p - 1) - 1) <= CLOSE for each in every]
    return Verdict.AGREES if all(close) else Verdict.PARTLY


def seen(each: Measured) -> str:
    """Return the sentence on one pipeline."""
    first, last = (spread(each.shares[m]) for m in (COUNTS[0], COUNTS[-1]))
    return (
        f"{each.p} stages idle {spread(each.idle)} micro-batches' time a step, {each.p - 1} by the formula: "
        f"a bubble of {first} at m={COUNTS[0]} and {last} at m={COUNTS[-1]}."
    )


def table(each: Measured) -> Table:
    """Return the bubbles of a pipeline at each number of micro-batches."""
    rows = [
        (str(m), str(spread(each.shares[m])), (each.p - 1) / m, str(spread(each.waited[m]))) for m in COUNTS
    ]
    return Table(
        title=f"Bubble of pp={each.p}: idle over ideal time",
        headings=("micro-batches", "by step times", "(p-1)/m", "waiting / computing"),
        rows=rows,
        note="Median of rounds (least to largest). By step times: c + (m+p-1) b, b from the slope over m, c "
        "from the model on one rank. The last column is what ranks clock themselves while they wait for "
        "others, transfers and the end of the step's slowest rank included, over the time in which they "
        "compute, the optimizer's step included; of the run's newest record.",
    )


def chart(each: Measured) -> Chart:
    """Return measured and predicted bubbles of a pipeline."""
    return Chart(
        name=f"bubble-pp{each.p}",
        title=f"Bubble of pp={each.p}, 1F1B",
        x_label="micro-batches of a step",
        y_label="idle time / ideal time",
        series=[line("measured", COUNTS, [each.shares[m] for m in COUNTS]), formula(each.p)],
        log_x=True,
        from_zero=True,
    )


def formula(p: int) -> Series:
    """Return the paper's (p-1)/m."""
    return Series(name="(p-1)/m", x=COUNTS, y=[(p - 1) / m for m in COUNTS], published=True)


def published() -> Chart:
    """Return figure 6: the bubble against the number of replicas, (n - d) / b'."""
    series = []
    for gpus, batches in PUBLISHED:
        replicas = [2**k for k in range(gpus.bit_length()) if 2**k <= min(gpus, batches)]
        series.append(
            Series(
                name=f"n={gpus}, b'={batches}",
                x=replicas,
                y=[(gpus - d) / batches for d in replicas],
                published=True,
            )
        )
    return Chart(
        name="figure6",
        title="Figure 6: bubble of n GPUs, b' micro-batches over all replicas, tp=1",
        x_label="replicas d",
        y_label="(n - d) / b'",
        series=series,
        log_x=True,
        from_zero=True,
    )


def limits(config: ReproduceConfig) -> list[str]:
    """Return what cannot be concluded."""
    found = [
        "Stages are not equal: the first holds the embedding, the last the vocabulary projection (a table "
        "of few tokens here, to keep them close); the slope measures the slower one.",
        "Figure 6 is a formula in the paper too; its pairs of n and b' are from memory.",
    ]
    if config.scale == "laptop" and 4 not in stages(config):
        found.append(
            "pp=4 is left out: with fewer than 4 cores its ranks take turns on a core, so that a rank that "
            "idles costs nothing and the step time shows the sharing of cores, not the bubble."
        )
    return found


def commands() -> list[tuple[str, str]]:
    """Return the paper's GPT-3 on 96 GPUs at two batch sizes."""
    words = (
        "mlm pretrain model=gpt2_sc21_145b model.num_layers=96 tp=8 pp=12 dp=1 precision=bf16 data=synthetic"
    )
    batches = "train.micro_batch_size=1 recompute=full train.global_batch_size"
    return [
        (f"GPT-3 of 175 billion parameters on 96 GPUs, m={m}", f"{words} {batches}={m}") for m in (12, 96)
    ]


def planned(results: Results) -> Conclusion:
    """Tabulate the simulated schedules."""
    found = [results.json(name) for name in results.steps]
    rows = [
        (str(each["settings"]["micro_batches"]), each["bubble"], each["bubble_formula"]["value"])
        for each in found
    ]
    return Conclusion(
        verdict=Verdict.PLANNED,
        seen=f"Simulated, 12 stages idle {rows[0][1]:.3g} of the ideal time at m={rows[0][0]} and "
        f"{rows[-1][1]:.3g} at m={rows[-1][0]}.",
        limits=["Nothing was measured."],
        tables=[
            Table(title="Bubble of pp=12", headings=("micro-batches", "simulated", "(p-1)/m"), rows=rows)
        ],
        charts=[published()],
        commands=commands(),
    )


EXPERIMENT = Experiment(
    name=NAME,
    title="Pipeline bubble against micro-batches",
    source="PTD-P, arXiv:2104.04473, section 2.2.1 and figure 6",
    claim="A pipeline of p stages idles (p-1)/m of the ideal time: the time of p-1 micro-batches in each "
    "step, however many micro-batches m there are.",
    minutes=6,
    steps=steps,
    conclude=conclude,
)
