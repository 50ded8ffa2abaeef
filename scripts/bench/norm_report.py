"""Report on the experiment on the order of layer norm: a row for each run, a picture, a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench.norm_runs import ENDED, Trial
from mlm.data.config import DataConfig
from mlm.data.tokenizer import Tokenizer
from mlm.files.atomic import write_atomic
from mlm.models.bert.corpora import SentencePairs, bert_vocab
from mlm.parallel.labels import IGNORE
from mlm.report.curves import running_mean, tidy
from mlm.report.history import FILE_NAME, read_records

TAIL = 0.05
"""Share of the logged steps, the last, whose mean is a final loss."""
LEAST = 20
"""Logged steps below which a mean is no measure: a step's loss is of some hundred tokens only."""
SAMPLES, CHUNK = 100_000, 4096
"""Samples whose masks are counted, and how many at a time."""
KEPT = 300
"""Points of a curve in the record."""
ROSE = 0.3
"""Nats that a final loss may lie above the lowest tail before it; more is divergence."""
WORDS_ALONE = 0.05
"""Nats that a model must come below the entropy of single tokens to have learned from context."""
COLOURS = ("#2b6cb0", "#c05621", "#4a7c59", "#805ad5")


@dataclass(frozen=True)
class Row:
    """One run. Losses are of masked tokens, in nats."""

    layers: int
    norm: str
    lr: float
    seed: int
    steps: int
    """Steps it did."""
    verdict: str
    """learns, single tokens (their frequencies, nothing of the context), or diverged."""
    training_loss: float | None
    """Mean over the last twentieth of the logged steps, LEAST at the least; None where one is not finite."""
    validation_loss: float | None
    validation_accuracy: float | None
    sop_loss: float | None
    """Of the sentence order, on the validation samples."""
    first_norm: float | None
    median_norm: float | None
    highest_norm: float | None
    """Gradient norms before clipping: of step 1, and over the run."""
    ended: str
    """The error of a run that could not continue."""


Curve = dict[str, list[Any]]


def masked_entropy(corpus: Path, seq_length: int) -> float:
    """Nats of a masked token of the training text for who knows how often each is masked, and no context.

    Counted over the masks of SAMPLES: which tokens are masked is not how often they occur, as whole
    words are chosen. Raises UserError for a corpus that gives no BERT samples.
    """
    tokenizer = Tokenizer.load(corpus / "tokenizer.json")
    vocab = bert_vocab(tokenizer)
    data = DataConfig(seq_length=seq_length)
    dataset = SentencePairs().train(data, corpus / "train", tokenizer, SAMPLES, seed=0, cache=None)
    counts = np.zeros(len(vocab.word_starts), dtype=np.int64)
    for first in range(0, SAMPLES, CHUNK):
        labels = dataset.gather(range(first, min(first + CHUNK, SAMPLES))).labels
        counts += np.bincount(labels[labels != IGNORE], minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def curve_of(run: Path) -> Curve:
    """The logged steps of a run: step, mlm_loss, grad_norm; None where a number is not finite."""
    records = {r["step"]: r for r in read_records(run / FILE_NAME) if r.get("kind") == "step"}
    steps = sorted(records)
    out: Curve = {"step": steps}
    for name in ("mlm_loss", "grad_norm"):
        out[name] = [records[step].get(name) for step in steps]
    return out


def row_of(trial: Trial, run: Path, curve: Curve, entropy: float) -> Row:
    """A run in numbers."""
    validations = [r for r in read_records(run / FILE_NAME) if r.get("kind") == "validation"]
    last = validations[-1] if validations else {}
    ended = (run / ENDED).read_text().strip() if (run / ENDED).exists() else ""
    losses, norms = curve["mlm_loss"], [x for x in curve["grad_norm"] if x is not None]
    training = final_loss(losses)
    return Row(
        **asdict(trial),
        steps=curve["step"][-1],
        verdict=verdict(losses, entropy, ended=bool(ended)),
        training_loss=training,
        validation_loss=last.get("validation/mlm_loss"),
        validation_accuracy=last.get("validation/mlm_accuracy"),
        sop_loss=last.get("validation/sop_loss"),
        first_norm=curve["grad_norm"][0],
        median_norm=median(norms) if norms else None,
        highest_norm=max(norms, default=None),
        ended=ended,
    )


def final_loss(losses: Sequence[float | None]) -> float | None:
    """Mean of the last logged steps; None where one is not finite."""
    return mean_of(losses[-tail_size(losses) :])


def tail_size(losses: Sequence[float | None]) -> int:
    """Number of logged steps that a final loss averages."""
    return max(LEAST, round(TAIL * len(losses)))


def mean_of(values: Sequence[float | None]) -> float | None:
    """Their mean; None where one is not finite."""
    finite = [value for value in values if value is not None]
    return mean(finite) if len(finite) == len(values) else None


def thinned(curve: Curve) -> Curve:
    """A curve of KEPT points at the most, each the mean of a block of logged steps."""
    size = -(-len(curve["step"]) // KEPT)
    starts = range(0, len(curve["step"]), size)
    return {
        "step": [curve["step"][min(at + size, len(curve["step"])) - 1] for at in starts],
        **{
            name: [rounded(mean_of(curve[name][at : at + size])) for at in starts]
            for name in ("mlm_loss", "grad_norm")
        },
    }


def rounded(value: float | None) -> float | None:
    """Five digits of it."""
    return None if value is None else float(f"{value:.5g}")


def verdict(losses: Sequence[float | None], entropy: float, *, ended: bool) -> str:
    """Outcome of a run, by its training losses alone."""
    final = final_loss(losses)
    if ended or final is None:
        return "diverged"
    size = tail_size(losses)
    chunks = [mean_of(losses[i : i + size]) for i in range(0, len(losses) - size + 1, size)]
    if final > min(part for part in [*chunks, final] if part is not None) + ROSE:
        return "diverged"
    return "learns" if final < entropy - WORDS_ALONE else "single tokens"


def markdown(rows: Sequence[Row], entropy: float, note: str) -> str:
    """The table, with what it is of."""
    head = [
        "layers",
        "norm",
        "lr",
        "training loss",
        "validation loss",
        "accuracy",
        "order loss",
        "gradient norm: first, median, highest",
        "verdict",
    ]
    seeds = len({row.seed for row in rows}) > 1
    lines = [note, "", f"Entropy of masked tokens without their context: {entropy:.3f} nats.", ""]
    columns = head[:3] + ["seed"] * seeds + head[3:]
    lines += ["| " + " | ".join(columns) + " |", "|" + " ---: |" * (len(columns) - 1) + " --- |"]
    for row in rows:
        norms = ", ".join(number(x, ".3g") for x in (row.first_norm, row.median_norm, row.highest_norm))
        cells = [
            str(row.layers),
            row.norm,
            f"{row.lr:g}",
            *[str(row.seed)] * seeds,
            number(row.training_loss, ".3f"),
            number(row.validation_loss, ".3f"),
            number(row.validation_accuracy, ".1%"),
            number(row.sop_loss, ".3f"),
            norms,
            row.verdict + (f" (step {row.steps})" if row.ended else ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def number(value: float | None, form: str) -> str:
    """A number, or a dash for one that is not finite or not there."""
    return "–" if value is None else format(value, form)


def draw(curves: Mapping[Trial, Curve], entropy: float, png: Path) -> None:
    """Training losses by depth, post at the left and pre at the right, gradient norms below."""
    lrs, depths = sorted({t.lr for t in curves}), sorted({t.layers for t in curves})
    norms = [norm for norm in ("post", "pre") if any(t.norm == norm for t in curves)]
    figure = Figure(
        figsize=(4.8 * len(norms), 1 + 5.2 * len(lrs)), dpi=150, layout="constrained", facecolor="white"
    )
    axes = figure.subplots(2 * len(lrs), len(norms), sharex=True, sharey="row", squeeze=False)
    for trial, curve in curves.items():
        at, column = 2 * lrs.index(trial.lr), norms.index(trial.norm)
        colour = COLOURS[depths.index(trial.layers) % len(COLOURS)]
        for line, name in enumerate(("mlm_loss", "grad_norm")):
            values = [math.nan if value is None else value for value in curve[name]]
            smooth = running_mean(values, reach=len(values) // 60)
            label = f"{trial.layers} layers" if trial.seed == min(t.seed for t in curves) else None
            axes[at + line, column].plot(curve["step"], smooth, color=colour, linewidth=1.4, label=label)
    for at, lr in enumerate(lrs):
        axes[2 * at, 0].set_ylabel("training loss of masked tokens (nats)")
        axes[2 * at + 1, 0].set_ylabel("gradient norm")
        for column, norm in enumerate(norms):
            loss, norm_axes = axes[2 * at, column], axes[2 * at + 1, column]
            loss.set_title(f"layer norm {'after' if norm == 'post' else 'before'} (norm={norm}), lr {lr:g}")
            loss.axhline(entropy, color="#333333", linewidth=0.8, linestyle=":", label="single tokens")
            norm_axes.set_yscale("log")
            norm_axes.set_xlabel("step")
            tidy(loss)
            tidy(norm_axes)
        axes[2 * at, 0].legend(frameon=False)
    write_atomic(png, lambda file: figure.savefig(file, format="png"))
