"""Pipelines (PTD-P, arXiv:2104.04473): bubbles, interleaving, micro-batch sizes."""

from collections.abc import Mapping, Sequence
from statistics import linear_regression, median

from reproduce.experiment import Conclusion, Curves, Experiment, Settings, Step, Table, Verdict
from reproduce.results import (
    MIN_ROUNDS,
    Results,
    above,
    batch,
    change,
    ratios,
    small_gpt2,
    spread,
    timed_stages,
)

SMALL = small_gpt2(num_layers=4, hidden_size=256, num_heads=8, max_positions=256, vocab_size=128)
"""A vocabulary of few tokens: the last stage's projection makes it slower than the others."""
ROUNDS = "Median of rounds (least to largest)."

# The bubble, measured.

BUBBLE = "ptdp-bubble"
COUNTS, ALONE = (1, 2, 4, 8, 16), (1, 4)
"""Micro-batches of a step: in the pipeline, and on one rank, which tells the time outside the pipeline."""
STAGES = 2
CLOSE = 0.25
"""Share by which the idle time may differ from the formula's p - 1 micro-batches."""


def bubble_stages(settings: Settings) -> list[list[Step]]:
    """Return the runs of a pipeline and of one rank."""
    sizes = [(STAGES, m) for m in COUNTS] + [(1, m) for m in ALONE]
    contenders = {f"pp{p}-m{m}": (*SMALL, f"pp={p}", "dp=1", *batch(2, m)) for p, m in sizes}
    return timed_stages(BUBBLE, contenders, settings, 0.4)


def bubbles(
    times: Mapping[int, Sequence[float]], alone: Mapping[int, Sequence[float]]
) -> tuple[dict[int, list[float]], list[float]]:
    """Return idle over ideal time by micro-batches, and the idle time in micro-batches, of each round.

    A step of m micro-batches takes c + (m + p - 1) b: b, a micro-batch's time on one stage, is the slope of
    the times over m. c, the time outside the pipeline (the optimizer's step), is that of one rank, measured
    alike, over p.
    """
    shares: dict[int, list[float]] = {m: [] for m in times}
    idle = list[float]()
    for n in range(len(alone[ALONE[0]])):
        each, start = linear_regression(list(times), [rounds[n] for rounds in times.values()])
        own = linear_regression(list(alone), [rounds[n] for rounds in alone.values()])
        outside = max(own.intercept, 0.0) / STAGES
        idle.append((start - outside) / each)
        for m, rounds in times.items():
            shares[m].append((rounds[n] - outside) / (m * each) - 1)
    return shares, idle


def bubble_conclusion(results: Results) -> Conclusion:
    """Compare measured bubbles with (p-1)/m."""

    def waiting(run: str) -> float:
        ranks = results.rank_seconds(run)
        return sum(rank["waiting over pp"] for rank in ranks) / sum(rank["computing"] for rank in ranks)

    times = {m: results.seconds(f"pp{STAGES}-m{m}") for m in COUNTS}
    shares, idle = bubbles(times, {m: results.seconds(f"pp1-m{m}") for m in ALONE})
    waited = {m: results.rounds(f"pp{STAGES}-m{m}", waiting) for m in COUNTS}
    return Conclusion(
        verdict=bubble_verdict(shares, idle),
        seen=f"{STAGES} stages idle {spread(idle)} micro-batches' time a step, {STAGES - 1} by the formula: "
        f"a bubble of {spread(shares[COUNTS[0]])} at m={COUNTS[0]} and {spread(shares[COUNTS[-1]])} at "
        f"m={COUNTS[-1]}.",
        limits=[
            "Stages are not equal: the first holds the embedding, the last the vocabulary projection (a "
            "table of few tokens here, to keep them close); the slope measures the slower one.",
            "Deeper pipelines are left out: where ranks take turns on a core, a rank that idles costs "
            "nothing, and the step time shows the sharing of cores.",
        ],
        tables=[
            Table(
                title=f"Bubble of pp={STAGES}: idle over ideal time",
                headings=("micro-batches", "by step times", "(p-1)/m", "waiting / computing"),
                rows=[(str(m), spread(shares[m]), (STAGES - 1) / m, spread(waited[m])) for m in COUNTS],
                note=f"{ROUNDS} By step times: c + (m+p-1) b, b from the slope over m, c from the model on "
                "one rank. The last column is what ranks clock themselves while they wait for others, "
                "transfers and the end of the step's slowest rank included, over the time in which they "
                "compute, the optimizer's step included; of the run's newest record.",
            )
        ],
        curves=Curves(
            name="bubble-pp2",
            title=f"Bubble of pp={STAGES}, 1F1B",
            x_label="micro-batches of a step",
            y_label="idle time / ideal time",
            lines={
                "measured": [(m, shares[m]) for m in COUNTS],
                "(p-1)/m": [(m, [(STAGES - 1) / m]) for m in COUNTS],
            },
            log_x=True,
        ),
    )


def bubble_verdict(shares: Mapping[int, Sequence[float]], idle: Sequence[float]) -> Verdict:
    """Return if the bubble falls with m, and if the idle time is p - 1 micro-batches."""
    falls = above(ratios([1 + a for a in shares[COUNTS[0]]], [1 + b for b in shares[COUNTS[-1]]]), 1.0)
    if falls is None:
        return Verdict.NOTHING
    if not falls:
        return Verdict.CONTRADICTS
    is_close = abs(median(idle) / (STAGES - 1) - 1) <= CLOSE
    return Verdict.AGREES if is_close else Verdict.PARTLY


# Interleaved against plain 1F1B.

INTERLEAVING = "ptdp-interleaving"
CHUNKS = 2
INTERLEAVED_COUNTS = (2, 4, 8)


def interleaving_stages(settings: Settings) -> list[list[Step]]:
    """Return the runs of both schedules."""
    contenders = {
        f"vp{v}-m{m}": (*SMALL, "pp=2", f"vp={v}", "dp=1", *batch(2, m))
        for m in INTERLEAVED_COUNTS
        for v in (1, CHUNKS)
    }
    return timed_stages(INTERLEAVING, contenders, settings, 0.3)


def interleaving_conclusion(results: Results) -> Conclusion:
    """Compare the schedules' step times at each number of micro-batches."""
    counts = INTERLEAVED_COUNTS
    gains = {m: ratios(results.seconds(f"vp1-m{m}"), results.seconds(f"vp{CHUNKS}-m{m}")) for m in counts}
    formula = {m: f"{100 * ((1 + 1 / m) / (1 + 1 / (CHUNKS * m)) - 1):+.1f} %" for m in counts}
    first, last = gains[counts[0]], gains[counts[-1]]
    return Conclusion(
        verdict=interleaving_verdict(first, last),
        seen=f"Interleaving {CHUNKS} chunks on each of 2 ranks changes throughput by {change(first)} at "
        f"m={counts[0]}, where the bubbles' formulas give {formula[counts[0]]}, and by {change(last)} at "
        f"m={counts[-1]}.",
        limits=[
            "Transfers between processes on one host are fast beside a network's; interleaving sends as "
            "many more as there are chunks, so that a slower network would gain less.",
            "The paper's pipelines are deeper; only the sign of the gain and its trend carry over.",
        ],
        tables=[
            Table(
                title=f"Throughput of vp={CHUNKS} over vp=1, pp=2",
                headings=("micro-batches", "measured", "by the bubbles' formulas"),
                rows=[(str(m), change(gains[m]), formula[m]) for m in counts],
                note=ROUNDS,
            )
        ],
    )


def interleaving_verdict(first: Sequence[float], last: Sequence[float]) -> Verdict:
    """Return if interleaving gains at the fewest micro-batches, and if the gain falls with their number."""
    gains = above(first, 1.0)
    if gains is None:
        return Verdict.NOTHING
    if not gains:
        return Verdict.CONTRADICTS
    return Verdict.AGREES if above(ratios(first, last), 1.0) else Verdict.PARTLY


# Micro-batch sizes.

MICRO_BATCH = "ptdp-micro-batch"
MICRO_BATCHES, SAMPLES = (1, 2, 4, 8), 16


def micro_batch_stages(settings: Settings) -> list[list[Step]]:
    """Return the runs of one rank and of a pipeline at each micro-batch size."""
    words = small_gpt2(num_layers=4, hidden_size=256, num_heads=8, max_positions=64, vocab_size=128)
    contenders = {
        f"pp{p}-b{b}": (*words, f"pp={p}", "dp=1", *batch(b, SAMPLES // b))
        for p in (1, 2)
        for b in MICRO_BATCHES
    }
    return timed_stages(MICRO_BATCH, contenders, settings, 0.25)


def micro_batch_conclusion(results: Results) -> Conclusion:
    """Compare micro-batch sizes on one rank and in the pipeline, and the paper's estimate with the latter."""
    alone, piped = ({b: results.seconds(f"pp{p}-b{b}") for b in MICRO_BATCHES} for p in (1, 2))
    estimated = {
        b: [(SAMPLES // b + 1) * each / (SAMPLES // b * 2) for each in alone[b]] for b in MICRO_BATCHES
    }
    best, guess = (min(times, key=lambda b: median(times[b])) for times in (piped, estimated))
    least, most = MICRO_BATCHES[0], MICRO_BATCHES[-1]
    gain, loss = ratios(alone[least], alone[most]), ratios(piped[most], piped[best])
    return Conclusion(
        verdict=micro_batch_verdict(gain, loss, best),
        seen=f"On one rank micro-batches of {most} change throughput by {change(gain)} against {least}. In "
        f"pp=2, batch {SAMPLES}, {best} is fastest: {change(loss)} against {most}, "
        f"{change(ratios(piped[least], piped[best]))} against {least}. The estimate of the paper's section "
        f"3.4 from one rank's times finds {guess}.",
        limits=[
            "The best size is that of this machine, model and batch alone; the paper says the same of its "
            "own.",
            "A small processor is busy with a short sequence already, so that larger micro-batches gain "
            "less than on a GPU; sequences are short here for that reason.",
        ],
        tables=[
            Table(
                title=f"Samples/s at a batch of {SAMPLES}",
                headings=("micro-batch size", "one rank", "pp=2", "pp=2, estimated"),
                rows=[
                    (
                        str(b),
                        *(spread([SAMPLES / t for t in times[b]]) for times in (alone, piped, estimated)),
                    )
                    for b in MICRO_BATCHES
                ],
                note=f"{ROUNDS} Estimated: (m + p - 1) times a micro-batch's time on one rank over p, "
                "section 3.4.",
            )
        ],
    )


def micro_batch_verdict(gain: Sequence[float], loss: Sequence[float], best: int) -> Verdict:
    """Return if larger micro-batches compute faster, while the largest is not the best of the pipeline.

    Args:
        gain: throughput of the largest on one rank over that of the least.
        loss: time of the largest in the pipeline over that of the best.
        best: size in the pipeline.
    """
    if len(gain) < MIN_ROUNDS:
        return Verdict.NOTHING
    gains = above(gain, 1.0)
    loses = False if best == MICRO_BATCHES[-1] else above(loss, 1.0)
    if gains and loses:
        return Verdict.AGREES
    if gains is False and loses is False:
        return Verdict.CONTRADICTS
    return Verdict.PARTLY if gains or loses else Verdict.NOTHING


EXPERIMENTS = (
    Experiment(
        name=BUBBLE,
        title="Pipeline bubble against micro-batches",
        source="PTD-P, arXiv:2104.04473, section 2.2.1",
        claim="A pipeline of p stages idles (p-1)/m of the ideal time: the time of p-1 micro-batches in "
        "each step, however many micro-batches m there are.",
        minutes=5,
        stages=bubble_stages,
        conclude=bubble_conclusion,
    ),
    Experiment(
        name=INTERLEAVING,
        title="Interleaved against plain 1F1B",
        source="PTD-P, arXiv:2104.04473, abstract and figure 12",
        claim="Interleaving shrinks the bubble by the number of chunks, which raises throughput by more "
        "than 10 % at best; the gain falls as the batch grows.",
        minutes=4,
        stages=interleaving_stages,
        conclude=interleaving_conclusion,
    ),
    Experiment(
        name=MICRO_BATCH,
        title="Micro-batch size",
        source="PTD-P, arXiv:2104.04473, figures 7, 8 and 16",
        claim="Larger micro-batches make faster products and fewer of them, so a larger bubble: the best "
        "size lies between and depends on the model, the pipeline and the batch.",
        minutes=4,
        stages=micro_batch_stages,
        conclude=micro_batch_conclusion,
    ),
)
