"""Throughput with and without activation recomputation against the batch, as in figure 17."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlm.models.config import ModelConfig
from mlm.plan.memory import MemoryModel
from mlm.plan.shape import Layout, Recompute
from mlm.reproduce.conclusion import Chart, Conclusion, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import (
    above,
    line,
    memory,
    model,
    percent,
    ratios,
    seconds,
    spread,
    timed_steps,
)
from mlm.reproduce.planned import A100, cluster_command, layout, layout_step, planned, planned_chart
from mlm.reproduce.results import Results

NAME = "ptdp-recomputation"
KINDS: tuple[Recompute, ...] = ("none", "full")
SMALL = {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "max_positions": 256, "vocab_size": 128}
LARGE = {"num_layers": 16, "hidden_size": 2048, "num_heads": 16, "max_positions": 1024, "vocab_size": 1024}
SIZE = 2
"""Samples of a micro-batch."""
MIB = 2**20
PAPER_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def counts(config: ReproduceConfig) -> tuple[int, ...]:
    """Return the numbers of micro-batches of a step."""
    return (8, 16, 32, 64) if config.scale == "node" else (1, 2, 4, 8)


def stages(config: ReproduceConfig) -> int:
    """Return the depth of the pipeline."""
    return 8 if config.scale == "node" else 2


def sizes(config: ReproduceConfig) -> Mapping[str, int]:
    """Return the model's sizes."""
    return LARGE if config.scale == "node" else SMALL


def contenders(config: ReproduceConfig) -> dict[str, tuple[str, ...]]:
    """Return settings by contender. GPipe's schedule keeps the activations of all micro-batches."""
    return {
        f"{kind}-m{m}": (
            *model(**sizes(config)),
            *(f"pp={stages(config)}", "dp=1", "pipeline=gpipe", f"recompute={kind}"),
            *(f"train.micro_batch_size={SIZE}", f"train.global_batch_size={SIZE * m}"),
        )
        for m in counts(config)
        for kind in KINDS
    }


def paper_words(kind: str, batch: int) -> tuple[str, ...]:
    """Return the settings of a layout of the paper's figure."""
    of_layout = layout(tp=8, pp=16, recompute=kind, micro_batch=1, global_batch=batch)
    return ("model=gpt2_sc21_145b", *A100, *of_layout)


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the runs; at scale=paper the plans of 145 billion parameters on 128 GPUs."""
    if config.scale != "paper":
        return timed_steps(NAME, contenders(config), config, minutes=0.3, may_lack_memory=True)
    return [
        layout_step(f"{NAME}-plan-{kind}-batch{batch}", *paper_words(kind, batch))
        for batch in PAPER_BATCHES
        for kind in KINDS
    ]


def activations(config: ReproduceConfig, kind: Recompute, count: int) -> float:
    """Return the bytes of activations of the first stage at its fullest moment, by formula."""
    whole, is_cpu = sizes(config), config.scale == "laptop"
    shape = ModelConfig(
        **whole,  # type: ignore[arg-type]
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    device, dtype = ("cpu", "fp32") if is_cpu else ("gpu", "bf16")
    planned_layout = Layout(
        pp=stages(config), pipeline="gpipe", recompute=kind, micro_batch=SIZE, global_batch=SIZE * count
    )
    return (
        MemoryModel(shape, whole["max_positions"], dtype, device=device)
        .peak(planned_layout)
        .parts["activations"]
    )


@dataclass(frozen=True)
class Measured:
    """Step times and memory of contenders."""

    counts: tuple[int, ...]
    rates: Mapping[tuple[str, int], list[float]]
    """Samples/s in each round, by (recompute, micro-batches); of those that ran."""
    planned: Mapping[tuple[str, int], float]
    """Bytes of activations by formula."""
    used: Mapping[tuple[str, int], list[float]]
    """Bytes that rank 0 used at most, in each round."""

    def affordable(self, count: int) -> int:
        """Return the most micro-batches that full recomputation has room for where none has for `count`."""
        room = self.planned["none", count]
        return max((m for m in self.counts if self.planned["full", m] <= room), default=count)


def measured(results: Results) -> Measured:
    """Read the runs; a contender that failed in a round is left out."""
    config = results.config
    ran = [
        (kind, m)
        for m in counts(config)
        for kind in KINDS
        if not any(results.failed(f"{NAME}-{kind}-m{m}-round{number}") for number in results.seeds)
    ]
    return Measured(
        counts=counts(config),
        rates={
            (kind, m): [SIZE * m / each for each in seconds(results, NAME, f"{kind}-m{m}")] for kind, m in ran
        },
        planned={(kind, m): activations(config, kind, m) for m in counts(config) for kind in KINDS},
        used={(kind, m): memory(results, NAME, f"{kind}-m{m}") for kind, m in ran},
    )


def conclude(results: Results) -> Conclusion:
    """Compare both at equal batches, and at equal memory."""
    if results.config.scale == "paper":
        return conclude_plan(results)
    found = measured(results)
    first = found.counts[0]
    afforded = found.affordable(first)
    pairs = [m for m in found.counts if ("none", m) in found.rates and ("full", m) in found.rates]
    if first not in pairs or ("full", afforded) not in found.rates:
        slower = gain = list[float]()
    else:
        slower = ratios(found.rates["full", first], found.rates["none", first])
        gain = ratios(found.rates["full", afforded], found.rates["none", first])
    return Conclusion(
        verdict=verdict(slower, gain),
        seen=seen(slower, gain, first, afforded),
        limits=limits(),
        tables=[table(found)],
        charts=[chart(found, pairs)],
        commands=commands(),
    )


def verdict(slower: Sequence[float], gain: Sequence[float]) -> Verdict:
    """Return if recomputation is slower at equal batches, and faster at equal memory.

    Args:
        slower: throughput with it over that without, at equal batches, in each round.
        gain: the same with the batch for which its memory suffices.
    """
    if not slower:
        return Verdict.OPEN
    is_faster, gains = above(slower, 1.0), above(gain, 1.0)
    if is_faster is None or gains is None:
        return Verdict.OPEN
    if is_faster:
        return Verdict.CONTRADICTS
    return Verdict.AGREES if gains else Verdict.PARTLY


def seen(slower: Sequence[float], gain: Sequence[float], first: int, afforded: int) -> str:
    """Return the sentence on both."""
    if not slower:
        return "Runs failed that the comparison needs."
    return (
        f"In steps of {of_micro_batches(first)} recomputation changes throughput by {percent(slower)}. In "
        f"the memory of that step's activations without it, it has room for {of_micro_batches(afforded)}, "
        f"where throughput is {percent(gain)} against that step without it."
    )


def of_micro_batches(count: int) -> str:
    """Return `1 micro-batch` or `4 micro-batches`."""
    return f"{count} micro-batch{'es' * (count > 1)}"


def table(found: Measured) -> Table:
    """Return throughput and memory of each contender."""
    return Table(
        title="Throughput and memory",
        headings=(
            "recompute, micro-batches",
            "samples/s",
            "activations by formula, MiB",
            "used by rank 0, MiB",
        ),
        rows=[
            (
                f"{kind}, {m}",
                str(spread(rates)),
                found.planned[kind, m] / MIB,
                str(spread([used / MIB for used in found.used[kind, m]])),
            )
            for (kind, m), rates in found.rates.items()
        ],
        note="Median of rounds (least to largest). By formula: of the first stage when it is fullest, as in "
        "`mlm plan memory`. Used: the process's memory with PyTorch itself on a CPU.",
    )


def chart(found: Measured, pairs: Sequence[int]) -> Chart:
    """Return throughput against memory of activations."""
    return Chart(
        name="throughput",
        title="Throughput against the memory of activations, a point per batch",
        x_label="activations of the first stage, MiB",
        y_label="samples/s",
        series=[
            line(
                f"recompute={kind}",
                [found.planned[kind, m] / MIB for m in pairs],
                [found.rates[kind, m] for m in pairs],
            )
            for kind in KINDS
        ],
        log_x=True,
        from_zero=True,
    )


def limits() -> list[str]:
    """Return what cannot be concluded."""
    return [
        "The schedule is GPipe's, of which the memory grows with the batch at any depth; the paper's 1F1B "
        "grows up to as many micro-batches as there are stages (16).",
        "A batch is taken to be free: that a larger one trains as well per sample is not tested.",
        "Nothing runs out of memory here; the limit is what the smallest batch needs without recomputation.",
    ]


def conclude_plan(results: Results) -> Conclusion:
    """Tabulate the plans of figure 17."""
    found = {
        (kind, batch): planned(results, f"{NAME}-plan-{kind}-batch{batch}")
        for batch in PAPER_BATCHES
        for kind in KINDS
    }
    fits = {key: each for key, each in found.items() if each is not None}
    most = max((batch for kind, batch in fits if kind == "none"), default=0)
    best = {
        kind: max((each["tokens_per_s"] for key, each in fits.items() if key[0] == kind), default=0.0)
        for kind in KINDS
    }
    ratio = f" ({best['full'] / best['none']:.2f} times)" if best["none"] else ""
    return Conclusion(
        verdict=Verdict.PLANNED,
        seen=f"Planned, a batch of {most} is the largest tried that fits without recomputation; best "
        f"tokens/s: {best['none']:.4g} without, {best['full']:.4g} with it{ratio}.",
        limits=[
            "Nothing was measured.",
            "Attention is fused here: no scores are kept, so that more fits without recomputation than the "
            "paper's program had room for.",
        ],
        tables=[
            Table(
                title="Planned: 145 billion parameters on 128 A100, tp=8 pp=16",
                headings=("recompute, batch", "tokens/s", "bubble", "GiB"),
                rows=[
                    (f"{kind}, {batch}", "does not fit", "", "")
                    if each is None
                    else (
                        f"{kind}, {batch}",
                        each["tokens_per_s"],
                        each["bubble"],
                        each["memory_bytes"] / 2**30,
                    )
                    for (kind, batch), each in found.items()
                ],
            )
        ],
        charts=planned_chart(
            {
                f"recompute={kind}": {
                    batch: each["tokens_per_s"] for (of, batch), each in fits.items() if of == kind
                }
                for kind in KINDS
            },
            name="throughput",
            title="Planned: 145 billion parameters on 128 A100",
            x_label="batch",
            y_label="tokens/s",
            log_x=True,
            from_zero=True,
        ),
        commands=commands(),
    )


def commands() -> list[tuple[str, str]]:
    """Return two runs of figure 17."""
    return [
        (
            f"145 billion parameters on 128 GPUs, recompute={kind}, batch {batch}",
            cluster_command(paper_words(kind, batch)),
        )
        for kind, batch in (("none", 8), ("full", 8), ("full", 256))
    ]


EXPERIMENT = Experiment(
    name=NAME,
    title="Activation recomputation against batch size",
    source="PTD-P, arXiv:2104.04473, figure 17",
    claim="Recomputation costs up to 33 % of throughput at small batches; its memory allows larger ones, "
    "whose smaller bubble makes up to twice the best throughput without it.",
    minutes=7,
    steps=steps,
    conclude=conclude,
)
