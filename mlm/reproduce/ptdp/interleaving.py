"""Interleaved against plain 1F1B, as in figure 12."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlm.reproduce.conclusion import Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import LEAST_ROUNDS, above, line, model, percent, ratios, seconds, timed_steps
from mlm.reproduce.planned import A100, cluster_command, layout, layout_step, planned
from mlm.reproduce.results import Results

NAME = "ptdp-interleaving"
CHUNKS = 2
SMALL = model(num_layers=4, hidden_size=256, num_heads=8, max_positions=256, vocab_size=128)
LARGE = model(num_layers=32, hidden_size=2048, num_heads=16, max_positions=1024, vocab_size=1024)
GPT3 = ("model=gpt2_sc21_145b", "model.num_layers=96")
"""GPT-3 of 175 billion parameters: the 145 billion model's width in 96 layers."""
PAPER_BATCHES = (12, 24, 36, 48, 60)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the comparison."""

    p: int
    counts: tuple[int, ...]
    """Micro-batches of a step, multiples of p."""


def sizes(config: ReproduceConfig) -> Sizes:
    """Return the sizes at a scale."""
    if config.scale == "paper":
        return Sizes(12, PAPER_BATCHES)
    return Sizes(8, (8, 16, 32)) if config.scale == "node" else Sizes(2, (2, 4, 8))


def contenders(config: ReproduceConfig) -> dict[str, tuple[str, ...]]:
    """Return settings by contender."""
    of, words = sizes(config), LARGE if config.scale == "node" else SMALL
    return {
        f"vp{v}-m{m}": (
            *words,
            *(f"pp={of.p}", f"vp={v}", "dp=1"),
            *("train.micro_batch_size=2", f"train.global_batch_size={2 * m}"),
        )
        for m in of.counts
        for v in (1, CHUNKS)
    }


def paper_words(chunks: int, batch: int) -> tuple[str, ...]:
    """Return the settings of a layout of the paper's figure."""
    of_layout = layout(
        tp=8, pp=12, vp=chunks, sequence_parallel=True, recompute="full", micro_batch=1, global_batch=batch
    )
    return (*GPT3, *A100, *of_layout)


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the runs; at scale=paper the plans of GPT-3 on 96 GPUs."""
    if config.scale != "paper":
        return timed_steps(NAME, contenders(config), config, minutes=0.3)
    return [
        layout_step(f"{NAME}-plan-vp{v}-m{m}", *paper_words(v, m)) for m in PAPER_BATCHES for v in (1, CHUNKS)
    ]


def predicted(p: int, m: int) -> float:
    """Return the ratio of plain to interleaved step times by the bubbles' formulas."""
    return (1 + (p - 1) / m) / (1 + (p - 1) / (CHUNKS * m))


def conclude(results: Results) -> Conclusion:
    """Compare the schedules' step times at each number of micro-batches."""
    of = sizes(results.config)
    gains = gains_of(results, of)
    of = Sizes(of.p, tuple(gains))  # what fits
    if not gains:
        return Conclusion(
            verdict=Verdict.PLANNED, seen="No planned layout fits.", limits=limits(results.config)
        )
    rows = [(str(m), percent(gains[m]), f"{100 * (predicted(of.p, m) - 1):+.1f} %") for m in of.counts]
    first, last = gains[of.counts[0]], gains[of.counts[-1]]
    is_plan = results.config.scale == "paper"
    return Conclusion(
        verdict=Verdict.PLANNED if is_plan else verdict(first, last),
        seen=f"{'Planned, interleaving' if is_plan else 'Interleaving'} {CHUNKS} chunks on each of {of.p} "
        f"ranks changes throughput by {percent(first)} at m={of.counts[0]}, where the bubbles' formulas "
        f"give {100 * (predicted(of.p, of.counts[0]) - 1):+.1f} %, and by {percent(last)} at "
        f"m={of.counts[-1]}.",
        limits=limits(results.config),
        tables=[
            Table(
                title=f"Throughput of vp={CHUNKS} over vp=1, pp={of.p}",
                headings=("micro-batches", "planned" if is_plan else "measured", "by the bubbles' formulas"),
                rows=rows,
                note="Median of rounds (least to largest)." if not is_plan else "",
            )
        ],
        charts=[chart(of, gains)],
        commands=[
            (f"GPT-3 on 96 GPUs, vp={v}, batch {m}", cluster_command(paper_words(v, m)))
            for m in (PAPER_BATCHES[0], PAPER_BATCHES[-1])
            for v in (1, CHUNKS)
        ],
    )


def gains_of(results: Results, of: Sizes) -> dict[int, list[float]]:
    """Return the ratio of plain to interleaved step times in each round, by the number of micro-batches."""
    if results.config.scale == "paper":
        times = {m: [step_s(results, v, m) for v in (1, CHUNKS)] for m in of.counts}
        return {m: [plain / chunked] for m, (plain, chunked) in times.items() if plain and chunked}
    return {
        m: ratios(seconds(results, NAME, f"vp1-m{m}"), seconds(results, NAME, f"vp{CHUNKS}-m{m}"))
        for m in of.counts
    }


def step_s(results: Results, chunks: int, batch: int) -> float | None:
    """Return the planned step time; None where the layout does not fit."""
    found = planned(results, f"{NAME}-plan-vp{chunks}-m{batch}")
    return None if found is None else float(found["step_s"])


def verdict(first: Sequence[float], last: Sequence[float]) -> Verdict:
    """Return if interleaving gains at the fewest micro-batches, and if the gain falls with their number."""
    gains = above(first, 1.0)
    if gains is None or len(first) < LEAST_ROUNDS:
        return Verdict.OPEN
    if not gains:
        return Verdict.CONTRADICTS
    falls = above([a - b for a, b in zip(first, last, strict=True)], 0.0)
    return Verdict.AGREES if falls else Verdict.PARTLY


def chart(of: Sizes, gains: dict[int, list[float]]) -> Chart:
    """Return measured and predicted gains."""
    return Chart(
        name="interleaving",
        title=f"Throughput of vp={CHUNKS} over vp=1, pp={of.p}",
        x_label="micro-batches of a step",
        y_label="ratio",
        series=[
            line("here", of.counts, [gains[m] for m in of.counts]),
            Series(
                name="bubbles' formulas",
                x=of.counts,
                y=[predicted(of.p, m) for m in of.counts],
                published=True,
            ),
        ],
        log_x=True,
    )


def limits(config: ReproduceConfig) -> list[str]:
    """Return what cannot be concluded."""
    if config.scale == "paper":
        return [
            "Nothing was measured. Transfers are split by sequence parallelism, which stands in for the "
            "paper's scatter/gather.",
            "The paper's number of chunks is not remembered; two are planned.",
        ]
    return [
        "Transfers between processes on one host are fast beside a network's; interleaving sends as many "
        "more as there are chunks, so that a slower network would gain less.",
        "The paper's figure has 12 stages and GPT-3; only the sign of the gain and its trend carry over.",
    ]


EXPERIMENT = Experiment(
    name=NAME,
    title="Interleaved against plain 1F1B",
    source="PTD-P, arXiv:2104.04473, figure 12",
    claim="Interleaving shrinks the bubble by the number of chunks: throughput of GPT-3 on 96 GPUs rises by "
    "more than 10 % at small batches, and the gap closes as the batch grows.",
    minutes=5,
    steps=steps,
    conclude=conclude,
)
