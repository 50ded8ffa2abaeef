"""Tensor against pipeline parallelism on equal numbers of ranks, as in figure 13."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlm.reproduce.conclusion import Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import above, line, model, percent, ratios, seconds, spread, timed_steps
from mlm.reproduce.planned import A100, cluster_command, layout, layout_step, planned, planned_chart
from mlm.reproduce.results import Results

NAME = "ptdp-tp-pp"
SMALL = model(num_layers=4, hidden_size=256, num_heads=8, max_positions=256, vocab_size=128)
LARGE = model(num_layers=32, hidden_size=2048, num_heads=16, max_positions=1024, vocab_size=1024)
PAPER = (
    "model=gpt2_sc21_530b",
    *("model.num_layers=32", "model.hidden_size=20480", "model.num_heads=128"),
)
"""The figure's 162 billion parameters, from memory: 32 layers of the 530 billion model's width."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the comparison."""

    splits: tuple[tuple[int, int], ...]
    """(tp, pp), the most tensor parallelism first."""
    batches: tuple[int, ...]
    """Micro-batches of a step."""

    def names(self, batch: int) -> list[str]:
        """Return the contenders at a batch."""
        return [f"tp{t}-pp{p}-m{batch}" for t, p in self.splits]


def sizes(config: ReproduceConfig) -> Sizes:
    """Return the sizes at a scale."""
    if config.scale == "paper":
        return Sizes(((32, 2), (16, 4), (8, 8), (4, 16), (2, 32)), (32, 128))
    if config.scale == "node":
        return Sizes(((8, 1), (4, 2), (2, 4), (1, 8)), (8, 32))
    return Sizes(((2, 1), (1, 2)), (2, 8))


def contenders(config: ReproduceConfig) -> dict[str, tuple[str, ...]]:
    """Return settings by contender."""
    of, words = sizes(config), LARGE if config.scale == "node" else SMALL
    return {
        f"tp{t}-pp{p}-m{m}": (
            *words,
            *(f"tp={t}", f"pp={p}", "dp=1"),
            *("train.micro_batch_size=2", f"train.global_batch_size={2 * m}"),
        )
        for m in of.batches
        for t, p in of.splits
    }


def paper_words(tp: int, pp: int, batch: int) -> tuple[str, ...]:
    """Return the settings of a layout of the paper's figure."""
    return (*PAPER, *A100, *layout(tp=tp, pp=pp, recompute="full", micro_batch=1, global_batch=batch))


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the runs; at scale=paper the plans on 64 GPUs."""
    if config.scale != "paper":
        return timed_steps(NAME, contenders(config), config, minutes=0.3)
    of = sizes(config)
    return [
        layout_step(f"{NAME}-plan-tp{t}-pp{p}-m{m}", *paper_words(t, p, m))
        for m in of.batches
        for t, p in of.splits
    ]


def conclude(results: Results) -> Conclusion:
    """Compare the layouts at each batch."""
    of = sizes(results.config)
    if results.config.scale == "paper":
        return conclude_plan(results, of)
    times = {name: seconds(results, NAME, name) for m in of.batches for name in of.names(m)}
    against = {m: ratios(times[of.names(m)[0]], times[of.names(m)[-1]]) for m in of.batches}
    few, many = of.batches[0], of.batches[-1]
    t, p = of.splits[0][0], of.splits[-1][1]
    rows = [
        (name.rsplit("-", 1)[0].replace("-", " "), str(m), *rates(times[name], m), percent(shares))
        for m in of.batches
        for name in of.names(m)
        for shares in [ratios(times[of.names(m)[0]], times[name])]
    ]
    return Conclusion(
        verdict=verdict(against[few], against[many]),
        seen=f"Pipeline parallelism alone (pp={p}) against tensor parallelism alone (tp={t}): throughput "
        f"{percent(against[few])} at {few} micro-batches, {percent(against[many])} at {many}.",
        limits=limits(results.config),
        tables=[
            Table(
                title="Throughput of layouts of equal numbers of ranks",
                headings=("layout", "micro-batches", "samples/s", "least to most", f"against tp={t}"),
                rows=rows,
                note="Median of rounds (least to largest).",
            )
        ],
        charts=[chart(of, {name: [2 * m_of(name) / each for each in times[name]] for name in times})],
        commands=commands(),
    )


def m_of(name: str) -> int:
    """Return the micro-batches of a contender."""
    return int(name.rpartition("-m")[2])


def rates(times: Sequence[float], micro_batches: int) -> tuple[float, str]:
    """Return samples/s, and their spread in words."""
    each = spread([2 * micro_batches / seconds for seconds in times])
    return each.median, f"{each.least:.4g} to {each.largest:.4g}"


def verdict(few: Sequence[float], many: Sequence[float]) -> Verdict:
    """Return if the pipeline is slower at few micro-batches, and if it gains with more of them.

    Args:
        few: throughput of the deepest pipeline over that of tensor parallelism alone, in each round.
        many: the same at more micro-batches.
    """
    slower, gains = above(few, 1.0), above([a / b for a, b in zip(many, few, strict=True)], 1.0)
    if slower is None or gains is None:
        return Verdict.OPEN
    if not gains:
        return Verdict.CONTRADICTS
    return Verdict.PARTLY if slower else Verdict.AGREES


def chart(of: Sizes, values: dict[str, list[float]]) -> Chart:
    """Return the throughput of the layouts at each batch."""
    labels = [f"tp={t} pp={p}" for t, p in of.splits]
    series = []
    for m in of.batches:
        plain = line(f"{m} micro-batches", [], [values[name] for name in of.names(m)])
        series.append(Series(name=plain.name, x=labels, y=plain.y, low=plain.low, high=plain.high))
    return Chart(
        name="layouts",
        title="Throughput of layouts of equal numbers of ranks",
        x_label="",
        y_label="samples/s",
        series=series,
        from_zero=True,
    )


def conclude_plan(results: Results, of: Sizes) -> Conclusion:
    """Tabulate the plans of the paper's layouts."""
    found = {
        (t, p, m): each
        for m in of.batches
        for t, p in of.splits
        if (each := planned(results, f"{NAME}-plan-tp{t}-pp{p}-m{m}")) is not None
    }
    best = {
        m: max(
            (key for key in found if key[2] == m), key=lambda key: found[key]["model_tflops"], default=None
        )
        for m in of.batches
    }
    said = [f"tp={key[0]} pp={key[1]} at batch {m}" for m, key in best.items() if key is not None]
    return Conclusion(
        verdict=Verdict.PLANNED,
        seen=f"The plan finds fastest: {', '.join(said) or 'none that fits'}; the paper measured tp=8 pp=8.",
        limits=["Nothing was measured.", "The model's shape is from memory."],
        tables=[
            Table(
                title="Planned layouts of 64 A100",
                headings=("layout", "batch", "TFLOP/s per GPU", "bubble", "GiB"),
                rows=[
                    (
                        f"tp{t} pp{p}",
                        str(m),
                        its["hardware_tflops"],
                        its["bubble"],
                        its["memory_bytes"] / 2**30,
                    )
                    for (t, p, m), its in found.items()
                ],
                note="TFLOP/s count recomputed operations, as the paper's do. Left out: what does not fit.",
            )
        ],
        charts=planned_chart(
            {
                f"batch {m}": {
                    f"tp={t} pp={p}": its["hardware_tflops"]
                    for (t, p, batch), its in found.items()
                    if batch == m
                }
                for m in of.batches
            },
            name="layouts",
            title="Planned: 162 billion parameters on 64 A100",
            x_label="",
            y_label="TFLOP/s per GPU",
            from_zero=True,
        ),
        commands=commands(),
    )


def limits(config: ReproduceConfig) -> list[str]:
    """Return what cannot be concluded."""
    found = [
        "The paper's peak, tensor parallelism as wide as a node and pipelines between nodes, needs several "
        "nodes: here all ranks are on one host, and all links are alike.",
    ]
    if config.scale == "laptop":
        found.append(
            "Two ranks allow the two extremes only; sums over tp pass through memory, far faster relative to "
            "these processors than a network between nodes is relative to GPUs."
        )
    return found


def commands() -> list[tuple[str, str]]:
    """Return the paper's best layout and its neighbours."""
    return [
        (
            f"162 billion parameters on 64 GPUs, tp={t} pp={p}, batch 128",
            cluster_command(paper_words(t, p, 128)),
        )
        for t, p in ((16, 4), (8, 8), (4, 16))
    ]


EXPERIMENT = Experiment(
    name=NAME,
    title="Tensor against pipeline parallelism at equal ranks",
    source="PTD-P, arXiv:2104.04473, figure 13",
    claim="On 64 GPUs tensor parallelism as wide as a node (8) with a pipeline between nodes is fastest; "
    "deep pipelines suffer from the bubble at a batch of 32 and recover at 128.",
    minutes=4,
    steps=steps,
    conclude=conclude,
)
