"""Selective against full activation recomputation in time, as in table 4."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlm.plan.cost import CostModel
from mlm.plan.hardware import preset
from mlm.plan.shape import Layout, Recompute, Shape
from mlm.plan.software import MEGATRON_2021
from mlm.reproduce.conclusion import Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import above, line, model, percent, ratios, seconds, timed_steps
from mlm.reproduce.planned import A100, cluster_command, layout, layout_step, planned
from mlm.reproduce.results import Results

NAME = "sp-recomputation"
SMALL = model(
    num_layers=2,
    hidden_size=512,
    num_heads=8,
    max_positions=128,
    vocab_size=256,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
LARGE = model(
    num_layers=4,
    hidden_size=6144,
    num_heads=64,
    max_positions=2048,
    vocab_size=1024,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
PAPER = ("model=gpt2_sc21_18b", "model.num_layers=48", "model.num_heads=64")
"""The 22 billion model, from memory: the 18 billion one's width in 48 layers."""
SEQ, BATCH, TP = 2048, 4, 8


@dataclass(frozen=True)
class Case:
    """A row of table 4."""

    recompute: Recompute
    is_split: bool
    """True with sequence parallelism."""
    published: float
    """Forward and backward of a layer of the 22 billion model, ms; from memory."""

    def layout(self) -> Layout:
        """Return the layout of the paper's measurement."""
        return Layout(
            tp=TP,
            sequence_parallel=self.is_split,
            recompute=self.recompute,
            micro_batch=BATCH,
            global_batch=BATCH,
        )


CASES = {
    "none": Case("none", False, 19.6),
    "sp": Case("none", True, 19.0),
    "full": Case("full", False, 27.2),
    "selective": Case("selective", False, 20.9),
    "selective-sp": Case("selective", True, 20.3),
}


def contenders(config: ReproduceConfig) -> dict[str, tuple[str, ...]]:
    """Return settings by contender."""
    node = config.scale == "node"
    common = (
        *(LARGE if node else SMALL),
        *(f"tp={TP if node else 2}", "dp=1"),
        *(f"train.micro_batch_size={BATCH}", f"train.global_batch_size={BATCH}"),
        *(("attention=math",) if node else ()),  # a kernel that keeps the scores, as in the paper
    )
    return {
        name: (*common, f"recompute={case.recompute}", f"sequence_parallel={str(case.is_split).lower()}")
        for name, case in CASES.items()
    }


def paper_words(case: Case) -> tuple[str, ...]:
    """Return the settings of a row's plan."""
    of_layout = layout(
        tp=TP,
        sequence_parallel=case.is_split,
        recompute=case.recompute,
        micro_batch=BATCH,
        global_batch=BATCH,
    )
    return (*PAPER, *A100, *of_layout)


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the runs; at scale=paper the plans of the 22 billion model."""
    if config.scale != "paper":
        return timed_steps(NAME, contenders(config), config, minutes=0.25, may_lack_memory=True)
    return [layout_step(f"{NAME}-plan-{name}", *paper_words(case)) for name, case in CASES.items()]


def modelled() -> dict[str, float]:
    """Return the ms of a layer's forward and backward by the time model, as the paper's program works."""
    shape = Shape(layers=48, hidden=6144, heads=64, ffn=4 * 6144, seq=SEQ, vocab=51200)
    cost = CostModel(shape, preset("dgx_a100_80g"), "fp16", MEGATRON_2021)
    layers = {name: cost.layer(case.layout()) for name, case in CASES.items()}
    return {name: 1e3 * (each.forward + each.backward) for name, each in layers.items()}


def conclude(results: Results) -> Conclusion:
    """Compare step times with and without recomputation."""
    if results.config.scale == "paper":
        return conclude_plan(results)
    ran = [
        name
        for name in CASES
        if not any(results.failed(f"{NAME}-{name}-round{number}") for number in results.seeds)
    ]
    if not {"none", "full", "selective"} <= set(ran):
        return conclude_from({})
    times = {name: seconds(results, NAME, name) for name in ran}
    return conclude_from({name: ratios(times[name], times["none"]) for name in ran})


def conclude_from(over: Mapping[str, Sequence[float]]) -> Conclusion:
    """Conclude from the step times of cases over those of none, in each round; empty if runs failed."""
    return Conclusion(
        verdict=verdict(over["full"], over["selective"]) if over else Verdict.OPEN,
        seen=seen(over),
        limits=[
            "On a CPU attention keeps its scores only with dropout, and draws the masks again when it "
            "recomputes them, in slow integer kernels; on a GPU attention is fused, keeps no scores, and "
            "selective recomputation has nothing left to do.",
            "The table's milliseconds are from memory; a layer's share of attention is chosen alike (a "
            "sixth of s/h), no other of its numbers can be compared with those of a small CPU.",
        ],
        tables=[table(over)],
        charts=[chart(over)] if over else [],
        commands=commands(),
    )


def seen(over: Mapping[str, Sequence[float]]) -> str:
    """Return the sentence on the overheads."""
    if not over:
        return "Runs failed that the comparison needs."
    split = f", {percent(over['selective-sp'])} with sequence parallelism" if "selective-sp" in over else ""
    return (
        f"Full recomputation changes the step time by {percent(over['full'])}, selective by "
        f"{percent(over['selective'])}{split}."
    )


def verdict(full: Sequence[float], selective: Sequence[float]) -> Verdict:
    """Return if full recomputation costs time, and if selective costs less than half of that.

    Args:
        full: step times over those without recomputation, in each round.
        selective: the same.
    """
    costs = above(full, 1.0)
    cheaper = above(ratios(full, selective), 1.0)
    if costs is None or cheaper is None:
        return Verdict.OPEN
    if not costs or not cheaper:
        return Verdict.CONTRADICTS
    less_than_half = above([(f - 1) / 2 - (s - 1) for f, s in zip(full, selective, strict=True)], 0.0)
    return Verdict.AGREES if less_than_half else Verdict.PARTLY


def table(over: Mapping[str, Sequence[float]]) -> Table:
    """Return the overheads beside those of table 4 and of the time model."""
    ours, base = modelled(), CASES["none"].published
    return Table(
        title="Time of forward and backward against no recomputation",
        headings=("technique", "measured here", "published", "published, ms", "modelled, ms", "modelled"),
        rows=[
            (
                name,
                percent(over[name]) if name in over else "",
                f"{100 * (case.published / base - 1):+.0f} %",
                case.published,
                ours[name],
                f"{100 * (ours[name] / ours['none'] - 1):+.0f} %",
            )
            for name, case in CASES.items()
        ],
        note="Measured: whole steps, median of rounds (least to largest). Published: a layer of the 22 "
        "billion model on 8 A100, from memory. Modelled: the same layer by the formulas of `mlm plan` with "
        "the habits of the paper's program.",
    )


def chart(over: Mapping[str, Sequence[float]]) -> Chart:
    """Return the overheads as bars."""
    names = [name for name in CASES if name in over and name != "none"]
    base = CASES["none"].published
    here = line("measured here", [], [[100 * (value - 1) for value in over[name]] for name in names])
    return Chart(
        name="overhead",
        title="Time of forward and backward against no recomputation",
        x_label="",
        y_label="%",
        series=[
            Series(name=here.name, x=names, y=here.y, low=here.low, high=here.high),
            Series(
                name="table 4",
                x=names,
                y=[100 * (CASES[name].published / base - 1) for name in names],
                published=True,
            ),
        ],
    )


def conclude_plan(results: Results) -> Conclusion:
    """Tabulate the plans, which have this toolkit's fused attention."""
    found = {name: planned(results, f"{NAME}-plan-{name}") for name in CASES}
    times = {name: float(each["step_s"]) for name, each in found.items() if each is not None}
    base = times.get("none")
    rows = [
        (
            name,
            "does not fit" if each is None else 1e3 * each["step_s"],
            f"{100 * (times[name] / base - 1):+.1f} %" if base and name in times else "",
            "" if each is None else each["memory_bytes"] / 2**30,
        )
        for name, each in found.items()
    ]
    full = f"{100 * (times['full'] / base - 1):+.1f} %" if base and "full" in times else "an unknown share"
    return Conclusion(
        verdict=Verdict.PLANNED,
        seen=f"Planned, full recomputation changes the step time of the 22 billion model by {full}; "
        "selective has nothing to do, as fused attention keeps no scores.",
        limits=["Nothing was measured.", "The model's shape and the table's milliseconds are from memory."],
        tables=[
            Table(
                title="Planned: 22 billion parameters on 8 A100",
                headings=("technique", "step, ms", "against none", "GiB"),
                rows=rows,
            ),
            table({}),
        ],
        commands=commands(),
    )


def commands() -> list[tuple[str, str]]:
    """Return the runs of the 22 billion model."""
    return [
        (f"22 billion parameters on 8 GPUs: {name}", cluster_command(paper_words(case)))
        for name, case in CASES.items()
    ]


EXPERIMENT = Experiment(
    name=NAME,
    title="Selective against full activation recomputation",
    source="arXiv:2205.05198, table 4",
    claim="Full recomputation adds 39 % to the time of a layer of the 22 billion model; selective "
    "recomputation adds 7 %, and 4 % with sequence parallelism (numbers from memory).",
    minutes=4,
    steps=steps,
    conclude=conclude,
)
