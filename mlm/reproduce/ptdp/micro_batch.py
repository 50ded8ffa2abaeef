"""Micro-batch size: larger ones compute faster and make a larger bubble, as in figures 7, 8 and 16."""

from collections.abc import Sequence

from mlm.reproduce.conclusion import Chart, Conclusion, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import (
    LEAST_ROUNDS,
    above,
    line,
    model,
    percent,
    ratios,
    seconds,
    spread,
    timed_steps,
)
from mlm.reproduce.planned import A100, cluster_command, layout, layout_step, planned, planned_chart
from mlm.reproduce.results import Results

NAME = "ptdp-micro-batch"
MICRO_BATCHES = (1, 2, 4, 8)
SMALL = model(num_layers=4, hidden_size=256, num_heads=8, max_positions=64, vocab_size=128)
LARGE = model(num_layers=16, hidden_size=2048, num_heads=16, max_positions=512, vocab_size=1024)
PAPER = (
    "model=gpt2_sc21_76b",
    "model.num_layers=72",
)
"""91 billion parameters as in figure 16; the shape is chosen to have as many."""
PAPER_BATCHES = (128, 512)


def stages(config: ReproduceConfig) -> int:
    """Return the depth of the pipeline."""
    return 8 if config.scale == "node" else 2


def batch(config: ReproduceConfig) -> int:
    """Return the samples of a step."""
    return 64 if config.scale == "node" else 16


def contenders(config: ReproduceConfig) -> dict[str, tuple[str, ...]]:
    """Return settings by contender: one rank and a pipeline at each micro-batch size."""
    words = LARGE if config.scale == "node" else SMALL
    return {
        f"pp{p}-b{b}": (
            *words,
            *(f"pp={p}", "dp=1"),
            *(f"train.micro_batch_size={b}", f"train.global_batch_size={batch(config)}"),
        )
        for p in (1, stages(config))
        for b in MICRO_BATCHES
    }


def paper_words(size: int, samples: int) -> tuple[str, ...]:
    """Return the settings of a layout of figure 16."""
    return (*PAPER, *A100, *layout(tp=8, pp=8, recompute="full", micro_batch=size, global_batch=samples))


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the runs; at scale=paper the plans of figure 16."""
    if config.scale != "paper":
        return timed_steps(NAME, contenders(config), config, minutes=0.25)
    return [
        layout_step(f"{NAME}-plan-b{b}-batch{samples}", *paper_words(b, samples))
        for samples in PAPER_BATCHES
        for b in MICRO_BATCHES
    ]


def conclude(results: Results) -> Conclusion:
    """Compare micro-batch sizes on one rank and in the pipeline, and the paper's estimate with the latter."""
    if results.config.scale == "paper":
        return conclude_plan(results)
    p, samples = stages(results.config), batch(results.config)
    alone = {b: seconds(results, NAME, f"pp1-b{b}") for b in MICRO_BATCHES}
    piped = {b: seconds(results, NAME, f"pp{p}-b{b}") for b in MICRO_BATCHES}
    estimated = {b: [estimate(each, samples // b, p) for each in alone[b]] for b in MICRO_BATCHES}
    best, guess = fastest(piped), fastest(estimated)
    least, most = MICRO_BATCHES[0], MICRO_BATCHES[-1]
    gain = ratios(alone[least], alone[most])
    return Conclusion(
        verdict=verdict(gain, ratios(piped[most], piped[best]), best),
        seen=f"On one rank micro-batches of {most} change throughput by {percent(gain)} against {least}. In "
        f"pp={p}, batch {samples}, {best} is fastest: {percent(ratios(piped[most], piped[best]))} against "
        f"{most}, {percent(ratios(piped[least], piped[best]))} against {least}. The estimate of the paper's "
        f"section 3.4 from one rank's times finds {guess}.",
        limits=[
            "The best size is that of this machine, model and batch alone; the paper says the same of its "
            "own.",
            "A small processor is busy with a short sequence already, so that larger micro-batches gain "
            "less than on a GPU; sequences are short here for that reason.",
        ],
        tables=[table(samples, p, alone, piped, estimated)],
        charts=[chart(samples, p, alone, piped, estimated)],
        commands=commands(),
    )


def estimate(seconds: float, count: int, p: int) -> float:
    """Return (m + p - 1) (t_f + t_b): section 3.4, with the time of a micro-batch on one rank over p."""
    return (count + p - 1) * seconds / (count * p)


def fastest(times: dict[int, list[float]]) -> int:
    """Return the size of the least median time."""
    return min(times, key=lambda size: spread(times[size]).median)


def verdict(gain: Sequence[float], loss: Sequence[float], best: int) -> Verdict:
    """Return if larger micro-batches compute faster, while the largest is not the best of the pipeline.

    Args:
        gain: of the largest on one rank, over the least.
        loss: time of the largest in the pipeline, over that of the best.
        best: size in the pipeline.
    """
    if len(gain) < LEAST_ROUNDS:
        return Verdict.OPEN
    gains = above(gain, 1.0)
    loses = False if best == MICRO_BATCHES[-1] else above(loss, 1.0)
    if gains and loses:
        return Verdict.AGREES
    if gains is False and loses is False:
        return Verdict.CONTRADICTS
    return Verdict.PARTLY if gains or loses else Verdict.OPEN


Times = dict[int, list[float]]


def table(samples: int, p: int, alone: Times, piped: Times, estimated: Times) -> Table:
    """Return the throughput at each size."""
    return Table(
        title=f"Samples/s at a batch of {samples}",
        headings=("micro-batch size", "one rank", f"pp={p}", f"pp={p}, estimated"),
        rows=[
            (str(b), *(str(spread(rates(times[b], samples))) for times in (alone, piped, estimated)))
            for b in MICRO_BATCHES
        ],
        note="Median of rounds (least to largest). Estimated: (m + p - 1) times a micro-batch's time on one "
        "rank over p, section 3.4.",
    )


def rates(times: Sequence[float], samples: int) -> list[float]:
    """Return samples/s of each round."""
    return [samples / each for each in times]


def chart(samples: int, p: int, alone: Times, piped: Times, estimated: Times) -> Chart:
    """Return throughput per rank against the micro-batch size."""
    lines = {"one rank": (alone, 1), f"pp={p}": (piped, p), f"pp={p}, estimated": (estimated, p)}
    return Chart(
        name="throughput",
        title=f"Throughput per rank at a batch of {samples}",
        x_label="micro-batch size",
        y_label="samples/s per rank",
        series=[
            line(
                name,
                MICRO_BATCHES,
                [[each / ranks for each in rates(times[b], samples)] for b in MICRO_BATCHES],
            )
            for name, (times, ranks) in lines.items()
        ],
        log_x=True,
        from_zero=True,
    )


def conclude_plan(results: Results) -> Conclusion:
    """Tabulate the plans of figure 16."""
    found = {
        (samples, b): each
        for samples in PAPER_BATCHES
        for b in MICRO_BATCHES
        if (each := planned(results, f"{NAME}-plan-b{b}-batch{samples}")) is not None
    }
    best = {
        samples: max(
            (b for of, b in found if of == samples),
            key=lambda b: found[samples, b]["hardware_tflops"],
            default=0,
        )
        for samples in PAPER_BATCHES
    }
    said = ", ".join(f"{b} at a batch of {samples}" for samples, b in best.items() if b)
    return Conclusion(
        verdict=Verdict.PLANNED,
        seen=f"The plan finds the best micro-batch size: {said or 'none fits'}; the paper measured 2.",
        limits=["Nothing was measured.", "The model's shape is chosen to have 91 billion parameters."],
        tables=[
            Table(
                title="Planned: 91 billion parameters, tp=8 pp=8",
                headings=("micro-batch size", "batch", "TFLOP/s per GPU", "bubble", "GiB"),
                rows=[
                    (str(b), str(of), its["hardware_tflops"], its["bubble"], its["memory_bytes"] / 2**30)
                    for (of, b), its in found.items()
                ],
            )
        ],
        charts=planned_chart(
            {
                f"batch {samples}": {
                    b: its["hardware_tflops"] for (of, b), its in found.items() if of == samples
                }
                for samples in PAPER_BATCHES
            },
            name="throughput",
            title="Planned: 91 billion parameters, tp=8 pp=8",
            x_label="micro-batch size",
            y_label="TFLOP/s per GPU",
            log_x=True,
        ),
        commands=commands(),
    )


def commands() -> list[tuple[str, str]]:
    """Return the runs of figure 16."""
    return [
        (f"91 billion parameters on 64 GPUs, micro-batches of {b}", cluster_command(paper_words(b, 128)))
        for b in MICRO_BATCHES
    ]


EXPERIMENT = Experiment(
    name=NAME,
    title="Micro-batch size",
    source="PTD-P, arXiv:2104.04473, figures 7, 8 and 16",
    claim="Larger micro-batches make faster products and fewer of them, so a larger bubble: the best size "
    "lies between and depends on the model, the pipeline and the batch (2 for 91 billion parameters on 64 "
    "GPUs).",
    minutes=6,
    steps=steps,
    conclude=conclude,
)
