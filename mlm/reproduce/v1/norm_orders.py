"""BERTs of several depths in both orders of layer norm: the runs that figure 7 compares, and their corpus."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from mlm.data.receipt import RECEIPT
from mlm.reproduce import corpus
from mlm.reproduce.config import ReproduceConfig, Scale
from mlm.reproduce.corpus import BERT_CORPUS, DOCUMENTS
from mlm.reproduce.experiment import ALL_CORES, DIVERGED, Step
from mlm.reproduce.text import SOURCES

CORPUS, TOKENIZER = "corpora/figure7", "text/wordpiece-2048.json"
VOCAB_SIZE = 2048
"""A small vocabulary: a model knows the frequencies of its tokens soon, and then learns from context."""
ORDERS = ("post", "pre")
PAPER_STD, PAPER_WIDTH, PAPER_DEPTH = 0.02, 1024, 24
"""Initial weights and width of the paper's models, and the depth of the shallower one."""
SAMPLES = 1024
"""Of the validation part, on which losses are compared: some 10,000 masked tokens."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of all runs of a scale."""

    depths: tuple[int, ...]
    """Ascending; those of the paper are 24 and 48."""
    width: int
    heads: int
    seq: int
    batch: int
    steps: int
    warm_up: int
    shared: float
    """Peak learning rate at which both orders are compared."""
    best: Mapping[str, Mapping[int, float]]
    """The rate of each order and depth that is best for it, as far as it was swept."""
    swept: tuple[float, ...]
    """Rates that the first seed tries with the deepest models."""
    machine: tuple[str, ...]
    cores: int
    minutes_per_layer: float
    """Of a run."""

    @property
    def init_std(self) -> float:
        """Standard deviation of initial weights."""
        return PAPER_STD * math.sqrt(PAPER_WIDTH / self.width)

    @property
    def words(self) -> tuple[str, ...]:
        """Settings that all runs share."""
        return (
            *("model=bert_tiny", f"model.hidden_size={self.width}", f"model.num_heads={self.heads}"),
            *(f"model.max_positions={self.seq}", f"model.init_std={self.init_std:.4g}"),
            *(f"data.seq_length={self.seq}", "data.max_ngram=1", "data.short_seq_prob=0"),
            *(f"train.steps={self.steps}", f"train.global_batch_size={self.batch}"),
            *(f"train.validate_every={self.steps // 4}", f"train.validate_batches={SAMPLES // self.batch}"),
            *("optimizer=adamw_bert", "schedule=linear_bert", f"schedule.warmup_steps={self.warm_up}"),
            *(f"schedule.decay_steps={self.steps}", f"checkpoint.save_every={self.steps // 3}"),
            *("checkpoint.keep_last=1", "log.every=10", "log.live=off", *self.machine),
        )


TRAININGS: dict[Scale, Training] = {
    "laptop": Training(
        depths=(12, 24, 48),
        width=64,
        heads=4,
        seq=64,
        batch=16,
        steps=1200,
        warm_up=60,
        shared=1e-3,
        best={order: {12: 1e-3, 24: 1e-3, 48: 3e-4} for order in ORDERS},
        swept=(3e-4, 3e-3),
        machine=("train.micro_batch_size=16", "dist.device=cpu", "dist.threads_per_rank=1"),
        cores=1,
        minutes_per_layer=0.16,
    ),
    "node": Training(
        depths=(12, 24, 48),
        width=512,
        heads=8,
        seq=128,
        batch=256,
        steps=10_000,
        warm_up=500,
        shared=5e-4,
        best={order: dict.fromkeys((12, 24, 48), 5e-4) for order in ORDERS},
        swept=(1e-4, 2e-3),
        machine=("precision=bf16", "dp=8", "train.micro_batch_size=32"),
        cores=ALL_CORES,
        minutes_per_layer=0.5,
    ),
}
"""By scale; at scale=paper nothing is trained. Those of a node have not been run."""


@dataclass(frozen=True)
class Trial:
    """One run."""

    layers: int
    order: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Of its step and folder."""
        return f"figure7-{self.layers}-{self.order}-lr{self.rate:g}-seed{self.seed}"


def trials(training: Training, seeds: int) -> list[Trial]:
    """Return all runs: the first seed's first, of each the deepest models before the others."""
    return [
        Trial(layers, order, rate, seed)
        for seed, layers in product(range(1, seeds + 1), reversed(training.depths))
        for order in ORDERS
        for rate in rates_of(training, layers, order, seed)
    ]


def rates_of(training: Training, layers: int, order: str, seed: int) -> list[float]:
    """Return the learning rates that a seed tries."""
    swept = training.swept if seed == 1 and layers == training.depths[-1] else ()
    return sorted({training.shared, training.best[order][layers], *swept})


def training_step(training: Training, trial: Trial, config: ReproduceConfig) -> Step:
    """Return the step of a run."""
    folder, vocab_size = data_of(config)
    return Step(
        name=trial.name,
        words=(
            *("mlm", "pretrain", f"model.num_layers={trial.layers}", f"model.norm={trial.order}"),
            *(f"data.path={folder}", f"model.vocab_size={vocab_size}", *training.words),
            *(f"optimizer.lr={trial.rate:g}", f"seed={trial.seed}"),
            f"out=runs/{trial.name}",
        ),
        result=f"runs/{trial.name}",
        minutes=trial.layers * training.minutes_per_layer,
        cores=training.cores,
        needs=("figure7-corpus",) if folder == CORPUS else (),
        may_fail=DIVERGED,
    )


def data_of(config: ReproduceConfig) -> tuple[str, int]:
    """Return the corpus and its vocabulary: our own, or that of the user's corpus."""
    return (CORPUS, VOCAB_SIZE) if config.corpus in SOURCES else (BERT_CORPUS, corpus.VOCAB_SIZE)


def text_steps(config: ReproduceConfig) -> list[Step]:
    """Return the steps that make our corpus: the other experiments' text in fewer types of tokens."""
    if config.corpus not in SOURCES:
        return []  # the user's is linked
    text = corpus.corpus_steps(config, BERT_CORPUS)[0]
    tokenizer = Step(
        name="figure7-tokenizer",
        words=(
            *("mlm", "data", "tokenizer", f"input={DOCUMENTS}", f"out={TOKENIZER}"),
            *(f"vocab_size={VOCAB_SIZE}", "kind=wordpiece"),
        ),
        result=TOKENIZER,
        minutes=0.3,
        needs=(text.name,),
    )
    tokens = Step(
        name="figure7-corpus",
        words=(
            *("mlm", "data", "build", f"input={DOCUMENTS}", f"tokenizer={TOKENIZER}", f"out={CORPUS}"),
            *("recipe=plain", "sentences=true", "append_eod=false"),
        ),
        result=f"{CORPUS}/{RECEIPT}",
        minutes=1.5,
        needs=(tokenizer.name,),
    )
    return [text, tokenizer, tokens]
