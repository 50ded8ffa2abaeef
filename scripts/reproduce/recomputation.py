"""Sequence parallelism and selective recomputation in time and memory: arXiv:2205.05198."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlm.parallel.config import Recompute
from reproduce.counts import Case, kept_per_layer
from reproduce.experiment import Cell, Conclusion, Experiment, Settings, Step, Table, Verdict
from reproduce.results import Results, above, batch, change, ratios, small_gpt2, timed_stages

# Selective against full recomputation in time.

TIME = "sp-recomputation"
SEQ, TP = 2048, 8
CASES: Mapping[str, tuple[Recompute, bool]] = {
    "none": ("none", False),
    "sp": ("none", True),
    "full": ("full", False),
    "selective": ("selective", False),
    "selective-sp": ("selective", True),
}
"""Name → (recompute, sequence parallelism)."""
REMOVED = 0.9
"""Share of the time overhead of full recomputation that both techniques remove, by the abstract."""


def time_stages(settings: Settings) -> list[list[Step]]:
    """Return the runs; with dropout a CPU keeps attention's scores, which selective recomputation is
    about."""
    sizes = {"num_layers": 2, "hidden_size": 512, "num_heads": 8, "max_positions": 128, "vocab_size": 256}
    words = (*small_gpt2(**sizes, hidden_dropout=0.1, attention_dropout=0.1), *batch(4), "tp=2", "dp=1")
    contenders = {
        name: (*words, f"recompute={recompute}", f"sequence_parallel={str(split).lower()}")
        for name, (recompute, split) in CASES.items()
    }
    return timed_stages(TIME, contenders, settings, 0.25)


def time_conclusion(results: Results) -> Conclusion:
    """Compare step times with and without recomputation."""
    none = results.seconds("none")
    over = {name: ratios(results.seconds(name), none) for name in CASES}
    return Conclusion(
        verdict=time_verdict(over["full"], over["selective"], over["selective-sp"]),
        seen=f"Full recomputation changes the step time by {change(over['full'])}, selective by "
        f"{change(over['selective'])}, {change(over['selective-sp'])} with sequence parallelism.",
        limits=[
            "On a CPU attention keeps its scores only with dropout, and draws the masks again when it "
            "recomputes them, in slow integer kernels; on a GPU attention is fused, keeps no scores, and "
            "selective recomputation has nothing left to do.",
            "Ranks exchange tensors through this host's memory (gloo), not over NVLink: what sequence "
            "parallelism costs here says nothing about GPUs.",
        ],
        tables=[
            Table(
                title="Time of forward and backward against no recomputation",
                headings=("technique", "measured here"),
                rows=[(name, change(over[name])) for name in CASES],
                note="Whole steps, median of rounds (least to largest).",
            )
        ],
    )


def time_verdict(full: Sequence[float], selective: Sequence[float], both: Sequence[float]) -> Verdict:
    """Return if selective recomputation costs less than full, and with sequence parallelism a tenth of it.

    Args:
        full: step times over those without recomputation, in each round.
        selective: the same.
        both: the same of selective recomputation with sequence parallelism.
    """
    costs, cheaper = above(full, 1.0), above(ratios(full, selective), 1.0)
    if costs is None or cheaper is None:
        return Verdict.NOTHING
    if not costs or not cheaper:
        return Verdict.CONTRADICTS
    left = [(b - 1) / (f - 1) for f, b in zip(full, both, strict=True)]
    return Verdict.AGREES if above(left, 1 - REMOVED) is False else Verdict.PARTLY


# Memory of activations by technique, counted.

CLOSE = 0.01
"""Error of a count at which it is the formula: table 2 leaves out norms' statistics and rounding."""
SAVED = 4.5
"""Times that the techniques save at least to be `about five`."""


MODEL = {"num_layers": 48, "hidden_size": 6144, "num_heads": 64, "vocab_size": 51200}
"""A shape of 22 billion parameters."""
SCORES = MODEL["num_heads"] * SEQ / MODEL["hidden_size"]
"""The formulas' a s / h."""
SBH = SEQ * 4 * MODEL["hidden_size"]
"""Elements of a boundary tensor."""
COUNTED = {"num_layers": 2, "hidden_size": 96, "num_heads": 16, "vocab_size": 1024}
COUNTED_SEQ = 128
"""A model of the 22 billion one's a s / h, to count attention's scores, which no GPU kernel keeps."""


@dataclass(frozen=True)
class Technique:
    """A row of table 2."""

    name: str
    bytes: Callable[[int, float], float]
    """Bytes per s b h from t and a s / h."""
    formula: str
    parallel: Mapping[str, Any]
    keeps_scores: bool
    """True if attention's scores are kept: counted on a CPU."""


SPLIT, SELECTIVE = {"tp": TP, "sequence_parallel": True}, {"recompute": "selective"}
TECHNIQUES = (
    Technique("none", lambda t, r: 34 + 5 * r, "34 + 5as/h", {"tp": 1}, True),
    Technique("tp", lambda t, r: 10 + 24 / t + 5 * r / t, "10 + 24/t + 5as/(ht)", {"tp": TP}, True),
    Technique("tp + sp", lambda t, r: 34 / t + 5 * r / t, "34/t + 5as/(ht)", SPLIT, True),
    Technique("tp + selective", lambda t, r: 10 + 24 / t, "10 + 24/t", {"tp": TP, **SELECTIVE}, False),
    Technique("tp + sp + selective", lambda t, r: 34 / t, "34/t", {**SPLIT, **SELECTIVE}, False),
    Technique("full", lambda t, r: 2.0, "2", {"tp": TP, "recompute": "full"}, False),
)


def count_kept() -> dict[str, float]:
    """Return the counted bytes per s b h by technique."""
    counts = dict[str, float]()
    for each in TECHNIQUES:
        if each.keeps_scores:
            case = Case(model=COUNTED, seq=COUNTED_SEQ, parallel=each.parallel)
            counts[each.name] = kept_per_layer(case, on_cpu=True) / (COUNTED_SEQ * COUNTED["hidden_size"])
        else:
            case = Case(model=MODEL, seq=SEQ, parallel=each.parallel, micro_batch=4, global_batch=4)
            counts[each.name] = kept_per_layer(case) / SBH
    return counts


def memory_conclusion(results: Results) -> Conclusion:
    """Compare counted bytes with table 2."""
    counts = count_kept()
    formulas = {each.name: each.bytes(TP, SCORES) for each in TECHNIQUES}
    errors = {name: counts[name] / formula - 1 for name, formula in formulas.items()}
    worst = max(errors, key=lambda name: abs(errors[name]))
    saved = counts["tp"] / counts["tp + sp + selective"]
    rows: list[Sequence[Cell]] = [
        (
            *(each.name, each.formula, formulas[each.name], counts[each.name]),
            *(f"{errors[each.name]:+.2%}", counts[each.name] * SBH / 2**20),
        )
        for each in TECHNIQUES
    ]
    return Conclusion(
        verdict=memory_verdict(errors, saved),
        seen="Counted bytes of a layer of 22 billion parameters are those of table 2 to "
        f"{abs(errors[worst]):.2%} ({worst} is furthest); sequence parallelism with selective recomputation "
        f"keeps {saved:.2g} times fewer than tensor parallelism alone.",
        limits=[
            "Where scores are kept they were counted on a CPU, at a small model of the same a s / h and t: "
            "on a GPU attention is fused here and keeps no scores, so that without recomputation it keeps "
            "what the paper's selective recomputation keeps.",
            "Counts are of what waits for the backward pass: no workspace, no fragments of the allocator.",
        ],
        tables=[
            Table(
                title=f"Activations of a layer of 22B, t={TP}",
                headings=(
                    *("technique", "formula / sbh", "formula", "counted / sbh", "error"),
                    "MiB of a layer",
                ),
                rows=rows,
                note=f"Bytes of 16-bit activations; s={SEQ}, b=4, h=6144, a=64. Counted: what the trainer's "
                "layer keeps for backward (`mlm plan dry-run`).",
            ),
        ],
    )


def memory_verdict(errors: Mapping[str, float], saved: float) -> Verdict:
    """Return if all counts are the formulas', and if the techniques save about five times."""
    is_close = [abs(error) <= CLOSE for error in errors.values()]
    if all(is_close) and saved >= SAVED:
        return Verdict.AGREES
    return Verdict.PARTLY if any(is_close) else Verdict.CONTRADICTS


EXPERIMENTS = (
    Experiment(
        name="sp-memory",
        title="Activation memory by technique",
        source="arXiv:2205.05198, abstract and table 2",
        claim="A layer keeps sbh(34 + 5as/h) bytes; sequence parallelism and selective recomputation leave "
        "34sbh/t, about five times less than tensor parallelism alone.",
        minutes=1,
        stages=lambda settings: [],
        conclude=memory_conclusion,
    ),
    Experiment(
        name=TIME,
        title="Selective against full activation recomputation",
        source="arXiv:2205.05198, abstract",
        claim="Sequence parallelism and selective recomputation remove over 90 % of the time overhead of "
        "recomputing activations.",
        minutes=3,
        stages=time_stages,
        conclude=time_conclusion,
    ),
)
