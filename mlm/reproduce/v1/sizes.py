"""Three sizes of GPT-2 trained on one corpus at equal tokens: figure 6, whose runs table 3 evaluates."""

from dataclasses import dataclass

from mlm.reproduce.config import ReproduceConfig, Scale
from mlm.reproduce.experiment import ALL_CORES, Step
from mlm.reproduce.measured import LEAST_ROUNDS, Spread

CORPUS = "corpus"


def parameters_of(layers: int, hidden: int) -> int:
    """Return the weights of the layers' products, embeddings left out: 12 L H²."""
    return 12 * layers * hidden**2


def millions(parameters: int) -> str:
    """Return a number of parameters in words: `3.1M`."""
    return f"{parameters / 1e6:.2g}M" if parameters < 1e8 else f"{parameters / 1e6:.0f}M"


@dataclass(frozen=True)
class Size:
    """A model of the comparison."""

    name: str
    layers: int
    hidden: int
    heads: int
    lr: float
    """Peak learning rate: the best of a short sweep."""
    minutes: float
    """Minutes of one run."""

    @property
    def parameters(self) -> int:
        """Weights of the layers' products, embeddings left out."""
        return parameters_of(self.layers, self.hidden)

    @property
    def label(self) -> str:
        """Its parameters in words: `3.1M`."""
        return millions(self.parameters)

    @property
    def words(self) -> tuple[str, ...]:
        """Settings of its model and learning rate, which decays to a tenth."""
        return (
            "model=gpt2_tiny",
            f"model.num_layers={self.layers}",
            f"model.hidden_size={self.hidden}",
            f"model.num_heads={self.heads}",
            "model.vocab_size=8192",
            "optimizer=adamw_demo",
            f"optimizer.lr={self.lr:g}",
            f"schedule.min_lr={self.lr / 10:g}",
        )


@dataclass(frozen=True)
class Training:
    """Settings that all sizes share."""

    sizes: tuple[Size, ...]
    """Ascending."""
    steps: int
    seq: int
    batch: int
    words: tuple[str, ...]
    cores: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks."""
        return self.batch * self.seq


TRAININGS: dict[Scale, Training] = {
    "laptop": Training(
        sizes=(
            Size("small", 2, 64, 2, 4e-3, 4),
            Size("medium", 4, 128, 4, 2e-3, 8),
            Size("large", 4, 256, 8, 1e-3, 16),
        ),
        steps=2500,
        seq=128,
        batch=4,
        words=("dist.device=cpu", "dist.threads_per_rank=1", "tp=1", "dp=1", "train.micro_batch_size=4"),
        cores=1,
    ),
    "node": Training(
        sizes=(
            Size("small", 6, 384, 6, 1e-3, 5),
            Size("medium", 12, 768, 12, 6e-4, 10),
            Size("large", 24, 1024, 16, 3e-4, 25),
        ),
        steps=1200,
        seq=512,
        batch=64,
        words=("precision=bf16", "tp=1", "dp=8", "train.micro_batch_size=8"),
        cores=ALL_CORES,
    ),
}
"""By scale; at scale=paper nothing is trained. Those of a node have not been run."""
VALIDATIONS = 20
"""Validations of a run, the last one included."""


def run_name(size: Size, seed: int) -> str:
    """Return the name of a size's step and run."""
    return f"figure6-{size.name}-seed{seed}"


def training_steps(config: ReproduceConfig) -> list[Step]:
    """Return the runs of all sizes, one seed after the other; none at scale=paper."""
    training = TRAININGS.get(config.scale)
    if training is None:
        return []
    return [
        Step(
            name=run_name(size, seed),
            words=(*("mlm", "pretrain"), *words(training, size), f"seed={seed}", f"out={folder(size, seed)}"),
            result=folder(size, seed),
            minutes=size.minutes,
            cores=training.cores,
        )
        for seed in range(1, config.seeds + 1)
        for size in reversed(training.sizes)  # the longest first: the others fill the cores beside it
    ]


def folder(size: Size, seed: int) -> str:
    """Return the run folder of a size."""
    return f"runs/{run_name(size, seed)}"


def words(training: Training, size: Size) -> tuple[str, ...]:
    """Return the settings of a run but for its seed and folder."""
    return (
        *size.words,
        f"model.max_positions={training.seq}",
        f"data.path={CORPUS}",
        "schedule=cosine",
        "schedule.warmup=0.05",
        f"train.steps={training.steps}",
        f"train.global_batch_size={training.batch}",
        f"train.validate_every={training.steps // VALIDATIONS}",
        "train.validate_batches=20",
        "checkpoint.save_every=500",
        "checkpoint.keep_last=1",
        "check.every=0",
        "log.every=5",
        "log.live=off",
        *training.words,
    )


def order(seeds: int, larger: Spread, smaller: Spread) -> int:
    """Compare two sizes: -1 if the larger model has less in all seeds, 1 if more in all, 0 if not decided."""
    if seeds < LEAST_ROUNDS:
        return 0
    return -1 if larger.largest < smaller.least else int(larger.least > smaller.largest)
