"""Figure 7 of arXiv:1909.08053: BERTs of several depths with layer norm in its first and in its new place.

norm=post (after the residual sums) and norm=pre (before attention and MLP) start from the same weights of a
seed and see the same samples. They are compared at one learning rate, and each at the best of the rates that
it was tried at. Weights start with 0.02 · sqrt(1024 / width), the standard deviation of BERT-large: sublayers
then weigh as much beside the residual stream as there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from mlm.data.config import DataConfig
from mlm.data.tokenizer import Tokenizer
from mlm.models.bert.family import SentencePairs, bert_vocab
from mlm.parallel.labels import IGNORE_INDEX
from reproduce.corpus import BERT_CORPUS, BERT_VOCAB_SIZE, corpus_stages
from reproduce.experiment import Conclusion, Curves, Experiment, Settings, Step, Table, Verdict
from reproduce.results import MIN_ROUNDS, Results, is_lower, spread

DEPTHS, ORDERS = (12, 24, 48), ("post", "pre")
DEEP = (24, 48)
"""Depths of the paper's models."""
SHARED = 1e-3
"""Peak learning rate at which both orders are compared."""
BEST = {12: 1e-3, 24: 1e-3, 48: 3e-4}
"""The best rate of each depth, the same for both orders."""
SWEPT = (3e-4, 3e-3)
"""Rates that the first seed tries with the deepest models."""
WIDTH, SEQ, BATCH, STEPS = 64, 64, 16, 1200
TRAINING = (
    *("mlm", "pretrain", "model=bert_tiny", f"model.hidden_size={WIDTH}", "model.num_heads=4"),
    *(f"model.max_positions={SEQ}", f"model.init_std={0.02 * math.sqrt(1024 / WIDTH):.4g}"),
    *(f"model.vocab_size={BERT_VOCAB_SIZE}", f"data.path={BERT_CORPUS}", f"data.seq_length={SEQ}"),
    *(
        "data.max_ngram=1",
        "data.short_seq_prob=0",
        f"train.steps={STEPS}",
        f"train.global_batch_size={BATCH}",
    ),
    *(f"train.micro_batch_size={BATCH}", f"train.validate_every={STEPS // 4}", "train.validate_batches=64"),
    *("optimizer=adamw_bert", "schedule=linear_bert", "schedule.warmup_steps=60"),
    *(f"schedule.decay_steps={STEPS}", f"checkpoint.save_every={STEPS // 3}", "checkpoint.keep_last=1"),
    *("log.every=10", "log.live=off", "dist.device=cpu", "dist.threads_per_rank=1"),
)
CONTEXT = 0.05
"""Nats that a model must come below the entropy of single tokens to have learned from context."""
ROSE = 0.3
"""Nats that a last validation loss may lie above an earlier one; more is divergence."""


@dataclass(frozen=True)
class Trial:
    """One run."""

    layers: int
    order: str
    rate: float
    seed: int

    @property
    def step(self) -> Step:
        """The step that trains it."""
        name = f"figure7-{self.layers}-{self.order}-lr{self.rate:g}-seed{self.seed}"
        own = (f"model.num_layers={self.layers}", f"model.norm={self.order}", f"optimizer.lr={self.rate:g}")
        words = (*TRAINING, *own, f"seed={self.seed}", f"out=runs/{name}")
        return Step(name, words, f"runs/{name}", 0.16 * self.layers, may_diverge=True)


def rates_of(layers: int, seed: int = 1) -> list[float]:
    """Return the learning rates that a seed tries."""
    return sorted({SHARED, BEST[layers], *(SWEPT if seed == 1 and layers == DEPTHS[-1] else ())})


def trials(seeds: int) -> list[Trial]:
    """Return all runs: the first seed's first, of each the deepest models before the others."""
    return [
        Trial(layers, order, rate, seed)
        for seed, layers in product(range(1, seeds + 1), reversed(DEPTHS))
        for order in ORDERS
        for rate in rates_of(layers, seed)
    ]


def stages_of(settings: Settings) -> list[list[Step]]:
    """Return the corpus, and all runs."""
    return [*corpus_stages(settings, is_bert=True), [trial.step for trial in trials(settings.seeds)]]


def masked_entropy(corpus: Path) -> float:
    """Return the entropy of a masked token of the training text, in nats: the loss of knowing no context.

    It is counted over masks: which tokens are masked is not how often they occur, as whole words are chosen.
    """
    tokenizer = Tokenizer.load(corpus / "tokenizer.json")
    counts = np.zeros(len(bert_vocab(tokenizer).word_starts), dtype=np.int64)
    data, size, chunk = DataConfig(seq_length=SEQ, max_ngram=1, short_seq_prob=0.0), 20_000, 4096
    samples = SentencePairs().train(data, corpus / "train", tokenizer, size, seed=0, cache=None)
    for first in range(0, size, chunk):
        labels = samples.gather(range(first, min(first + chunk, size))).labels
        counts += np.bincount(labels[labels != IGNORE_INDEX], minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@dataclass(frozen=True)
class Outcome:
    """A run in numbers."""

    loss: float
    """The last validation loss of masked tokens; infinite for a run that diverged."""
    largest_norm: float
    """Largest logged gradient norm before clipping."""
    kind: str
    """learns, stays at token frequencies, or diverges."""


def outcome(losses: Sequence[float], norms: Sequence[float], single: float, *, failed: bool) -> Outcome:
    """Judge a run by its validation losses, against the entropy of single tokens."""
    largest, last = max(norms, default=math.nan), losses[-1] if losses else math.inf
    if failed or not math.isfinite(last) or last > min(losses) + ROSE:
        return Outcome(math.inf, largest, "diverge")
    return Outcome(last, largest, "learn" if last < single - CONTEXT else "stay at token frequencies")


Outcomes = Mapping[tuple[int, str, float], Sequence[Outcome]]
"""(layers, order, learning rate) → outcomes of the seeds."""


def read_outcomes(results: Results, single: float) -> Outcomes:
    """Read all runs."""
    outcomes: dict[tuple[int, str, float], list[Outcome]] = {}
    for trial in sorted(
        trials(results.settings.seeds), key=lambda trial: (trial.layers, trial.order, trial.rate)
    ):
        name = trial.step.name
        losses = [loss for _, loss in results.validation(name, "validation/mlm_loss")]
        norms, failed = results.column(name, "step", "grad_norm"), results.records[name].code != 0
        each = outcome(losses, norms, single, failed=failed)
        outcomes.setdefault((trial.layers, trial.order, trial.rate), []).append(each)
    return outcomes


def losses_of(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the last losses."""
    return [each.loss for each in outcomes]


def counted(outcomes: Sequence[Outcome]) -> str:
    """Return `2 learn, 1 diverge`."""
    kinds = [each.kind for each in outcomes]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def verdict(outcomes: Outcomes) -> Verdict:
    """Return the verdict on `norm=pre is stable where norm=post is not, and better`, at the paper's depths.

    It agrees if both hold at the deepest model: the first at the shared learning rate, the second at its
    best. It agrees in part if one of them holds at any depth, and contradicts if none does and norm=post is
    better at one.
    """
    unstable, better = {}, {}
    for layers in DEEP:
        post, pre = ({each.kind for each in outcomes[layers, order, SHARED]} for order in ORDERS)
        has_rounds = len(outcomes[layers, "post", SHARED]) >= MIN_ROUNDS
        unstable[layers] = has_rounds and "learn" not in post and pre == {"learn"}
        post_best, pre_best = (outcomes[layers, order, BEST[layers]] for order in ORDERS)
        lower = is_lower(losses_of(pre_best), losses_of(post_best))
        winner = {True: pre_best, False: post_best}.get(lower, []) if lower is not None else []
        better[layers] = lower if winner and all(each.kind == "learn" for each in winner) else None
    if unstable[DEEP[-1]] and better[DEEP[-1]]:
        return Verdict.AGREES
    if any(unstable.values()) or True in better.values():
        return Verdict.PARTLY
    return Verdict.CONTRADICTS if False in better.values() else Verdict.NOTHING


def conclude(results: Results) -> Conclusion:
    """Compare the orders at each depth."""
    single = masked_entropy(results.settings.out / BERT_CORPUS)
    outcomes = read_outcomes(results, single)
    shared, own = list[str](), list[str]()
    for layers in DEPTHS:
        post, pre = (counted(outcomes[layers, order, SHARED]) for order in ORDERS)
        shared.append(f"{layers} layers: {post} with post, {pre} with pre")
        post, pre = (spread(losses_of(outcomes[layers, order, BEST[layers]])) for order in ORDERS)
        own.append(f"{layers} layers {post} with post, {pre} with pre")
    lines = {
        f"{order}, {name}": [
            (layers, losses_of(outcomes[layers, order, rates[layers]]))
            for layers in DEPTHS
            if all(map(math.isfinite, losses_of(outcomes[layers, order, rates[layers]])))
        ]
        for order in ORDERS
        for name, rates in ((f"{SHARED:g}", dict.fromkeys(DEPTHS, SHARED)), ("its best", BEST))
    }
    return Conclusion(
        verdict=verdict(outcomes),
        seen=f"norm=post and pre, {len(results.seeds)} seeds at learning rate {SHARED:g}: "
        f"{'; '.join(shared)}. Loss of masked tokens, each at the best of its rates, median (least to "
        f"largest seed): {'; '.join(own)}; token frequencies alone give {single:.3f}",
        limits=[
            f"Models are {WIDTH} wide and see {STEPS * BATCH * SEQ / 1e6:.2g}M tokens: this is the "
            "beginning of training, and says nothing about its end.",
            f"Learning rates were swept at {DEPTHS[-1]} layers, with one seed, in factors of three.",
            "Sentence order is learned beside masked tokens, as in the paper; masked tokens alone are "
            "compared.",
        ],
        tables=[
            Table(
                title="Validation loss of masked tokens after all steps",
                headings=("layers, norm", "learning rate", "loss, nats", "seeds", "largest gradient norm"),
                rows=[
                    (
                        f"{layers}, {order}",
                        f"{rate:g}{' (best)' if len(rates_of(layers)) > 1 and rate == BEST[layers] else ''}",
                        *(spread(losses_of(runs)), counted(runs), spread([run.largest_norm for run in runs])),
                    )
                    for (layers, order, rate), runs in outcomes.items()
                ],
                note=f"Median, least to largest seed. Token frequencies alone give {single:.3f}; a run "
                f"learns if it comes {CONTEXT} below. A run that diverged has an infinite loss.",
            )
        ],
        curves=Curves(
            name="depth",
            title="Loss of masked tokens by depth",
            x_label="layers",
            y_label="validation loss, nats",
            lines={**lines, "token frequencies": [(layers, [single]) for layers in DEPTHS]},
        ),
    )


EXPERIMENT = Experiment(
    name="v1-figure7",
    title="Position of layer norm in deep BERTs: training loss by depth",
    source="Megatron-LM, arXiv:1909.08053, figure 7 and section 5.3",
    claim="With layer norm after the residual sums, as in the first BERT, deep models are unstable; with "
    "layer norm before attention and MLP they train, and to a lower loss.",
    minutes=110,
    stages=stages_of,
    conclude=conclude,
)
