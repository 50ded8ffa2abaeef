"""Model size against what is learned (arXiv:1909.08053, figure 6)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

import numpy as np

from reproduce.corpus import CORPUS, VOCAB_SIZE, corpus_stages
from reproduce.experiment import Cell, Conclusion, Curves, Experiment, Settings, Step, Table, Verdict
from reproduce.results import Results, is_lower, spread

STEPS, SEQ, BATCH, VALIDATIONS = 2500, 128, 4, 20
TRAINING = (
    *(f"model.max_positions={SEQ}", f"model.vocab_size={VOCAB_SIZE}", f"data.path={CORPUS}"),
    *("schedule=cosine", "schedule.warmup=0.05", f"train.steps={STEPS}", f"train.global_batch_size={BATCH}"),
    *(f"train.micro_batch_size={BATCH}", f"train.validate_every={STEPS // VALIDATIONS}"),
    *("train.validate_batches=20", "checkpoint.save_every=500", "checkpoint.keep_last=1", "check.every=0"),
    *("log.every=5", "log.live=off", "dist.device=cpu", "dist.threads_per_rank=1", "tp=1", "dp=1"),
)
SEEDS = "Median of the seeds, least to largest."


@dataclass(frozen=True)
class Size:
    """A model of the comparison."""

    name: str
    layers: int
    hidden: int
    heads: int
    lr: float
    """Peak learning rate, the best of a short sweep; it decays to a tenth."""
    minutes: float

    @property
    def label(self) -> str:
        """Weights of its layers' products, 12 L H²: `3.1M`."""
        return f"{12 * self.layers * self.hidden**2 / 1e6:.2g}M"

    def run(self, seed: int) -> str:
        """Return the name of its step and run."""
        return f"figure6-{self.name}-seed{seed}"

    def step(self, seed: int) -> Step:
        """Return the step that trains it."""
        name = self.run(seed)
        words = (
            *("mlm", "pretrain", "model=gpt2_tiny", f"model.num_layers={self.layers}"),
            *(f"model.hidden_size={self.hidden}", f"model.num_heads={self.heads}", "optimizer=adamw_demo"),
            *(f"optimizer.lr={self.lr:g}", f"schedule.min_lr={self.lr / 10:g}", *TRAINING),
            *(f"seed={seed}", f"out=runs/{name}"),
        )
        return Step(name, words, f"runs/{name}", self.minutes)


MODELS = (
    Size("small", 2, 64, 2, 4e-3, 4),
    Size("medium", 4, 128, 4, 2e-3, 8),
    Size("large", 4, 256, 8, 1e-3, 16),
)
"""Ascending."""


def training_stages(settings: Settings) -> list[list[Step]]:
    """Return the corpus, and the runs of all sizes and seeds; the longest first."""
    seeds = range(1, settings.seeds + 1)
    return [*corpus_stages(settings), [size.step(seed) for seed in seeds for size in reversed(MODELS)]]


@dataclass(frozen=True)
class Curve:
    """The runs of a size."""

    size: Size
    steps: Sequence[int]
    """Of the validations."""
    losses: Sequence[Sequence[float]]
    """A row per seed."""

    @cached_property
    def final(self) -> list[float]:
        """Perplexity of each seed at the last step."""
        return self.at(self.steps[-1])

    def at(self, step: float) -> list[float]:
        """Return each seed's perplexity at a step, its logarithm interpolated between validations."""
        return [math.exp(float(np.interp(step, self.steps, losses))) for losses in self.losses]

    def steps_to(self, other: "Curve") -> list[float] | None:
        """Return the steps after which each seed is as low as the other's last; None if one never is."""
        pairs = zip(self.losses, other.losses, strict=True)
        reached = [first_below(self.steps, losses, last[-1]) for losses, last in pairs]
        return None if None in reached else [step for step in reached if step is not None]


def read_curve(results: Results, size: Size) -> Curve:
    """Read the runs of a size."""
    curves = [results.validation(size.run(seed)) for seed in results.seeds]
    return Curve(size, [step for step, _ in curves[0]], [[loss for _, loss in curve] for curve in curves])


def first_below(steps: Sequence[int], losses: Sequence[float], bound: float) -> float | None:
    """Return the step at which a loss is first at most the bound, interpolated; None if it never is."""
    if losses[0] <= bound:
        return float(steps[0])
    for (start, before), (end, after) in pairwise(zip(steps, losses, strict=True)):
        if after <= bound:
            return start + (end - start) * (before - bound) / (before - after)
    return None


def figure6_conclusion(results: Results) -> Conclusion:
    """Compare the sizes at equal tokens."""
    curves = [read_curve(results, size) for size in MODELS]
    tokens = BATCH * SEQ / 1e6
    return Conclusion(
        verdict=figure6_verdict([curve.final for curve in curves]),
        seen=figure6_seen(curves),
        limits=[
            f"{STEPS * tokens:.1f}M tokens and a context of {SEQ}: far fewer than the paper's. The "
            "perplexities themselves are not comparable: corpus and tokenizer differ.",
            "The paper compares at equal steps: a larger model costs more time for each.",
            "Learning rates come from a short sweep with one seed.",
        ],
        tables=(equal_tokens(curves),),
        curves=Curves(
            name="perplexity-tokens",
            title="Validation perplexity over tokens",
            x_label="tokens, millions",
            y_label="perplexity",
            lines={
                f"{curve.size.label} parameters": [(step * tokens, curve.at(step)) for step in curve.steps]
                for curve in curves
            },
        ),
    )


def figure6_verdict(finals: Sequence[Sequence[float]]) -> Verdict:
    """Return the verdict on `larger models reach lower perplexities`, sizes ascending."""
    lower = [is_lower(larger, smaller) for smaller, larger in pairwise(finals)]
    if all(lower):
        return Verdict.AGREES
    if True in lower:
        return Verdict.PARTLY
    return Verdict.CONTRADICTS if False in lower else Verdict.NOTHING


def figure6_seen(curves: Sequence[Curve]) -> str:
    """Return what was measured, in a sentence."""
    each = ", ".join(f"{curve.size.label}: {spread(curve.final)}" for curve in curves)
    small, large = curves[0], curves[-1]
    line = f"validation perplexity at equal tokens, median (least to largest seed), by parameters: {each}"
    steps = large.steps_to(small)
    if steps is None:
        return f"{line}; the largest model does not reach the smallest's in all seeds."
    part = 100 * median(steps) / small.steps[-1]
    return f"{line}; the largest reaches the smallest's last perplexity with {part:.0f} % of its tokens."


def equal_tokens(curves: Sequence[Curve]) -> Table:
    """Return perplexities after shares of the tokens."""
    rows: list[list[Cell]] = [
        [
            f"{part * STEPS * BATCH * SEQ / 1e6:.2f}M tokens",
            *(spread(each.at(part * each.steps[-1])) for each in curves),
        ]
        for part in (0.25, 0.5, 1.0)
    ]
    rows.append(["peak learning rate", *(f"{each.size.lr:g}" for each in curves)])
    names = [f"{each.size.label} ({each.size.layers} x {each.size.hidden})" for each in curves]
    return Table(
        title="Validation perplexity at equal tokens",
        headings=["after", *names],
        rows=rows,
        note=f"Parameters without embeddings (layers x hidden size). {SEEDS}",
    )


EXPERIMENT = Experiment(
    name="v1-figure6",
    title="Validation perplexity against model size at equal tokens",
    source="Megatron-LM, arXiv:1909.08053, figure 6",
    claim="At equal steps larger models converge faster and to lower validation perplexities.",
    minutes=75,
    stages=training_stages,
    conclude=figure6_conclusion,
)
