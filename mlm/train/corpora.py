"""The datasets a run spec names."""

from pathlib import Path

from mlm.config.schema import DataConfig, PretrainConfig
from mlm.data.gpt import EvalWindows, GPTDataset
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import check_corpus
from mlm.data.sampler import Dataset
from mlm.data.synthetic import SyntheticDataset
from mlm.parallel.collectives import barrier
from mlm.parallel.mesh import ParallelContext

SYNTHETIC_VALIDATION_SAMPLES = 256


def train_prefix(data: DataConfig) -> Path:
    """Prefix of the training .bin/.idx."""
    assert data.train is not None or data.path is not None, "checked with the configuration"
    return Path(data.train) if data.train is not None else Path(str(data.path), "train")


def validation_prefix(data: DataConfig) -> Path | None:
    """Prefix of the validation .bin/.idx, None where there is none."""
    if data.validation is not None:
        return Path(data.validation)
    prefix = Path(data.path, "validation") if data.path is not None else None
    return prefix if prefix is not None and prefix.with_name("validation.idx").exists() else None


def tokenizer_path(data: DataConfig) -> Path | None:
    """tokenizer.json of the corpus, None where there is none."""
    if data.tokenizer is not None:
        return Path(data.tokenizer)
    path = Path(data.path, "tokenizer.json") if data.path is not None else None
    return path if path is not None and path.exists() else None


def corpus_faults(config: PretrainConfig) -> list[str]:
    """What is wrong with the corpora of a run, a line each; read before any rank starts."""
    if config.data.kind == "synthetic":
        return []
    vocab_size, seq_length = config.model.vocab_size, config.data.seq_length
    faults = check_corpus(
        train_prefix(config.data),
        vocab_size=vocab_size,
        seq_length=seq_length,
        min_samples=config.train.global_batch_size,
    )
    validation = validation_prefix(config.data)
    if validation is not None and config.train.validate_every:
        faults += check_corpus(validation, vocab_size=vocab_size, seq_length=1, min_samples=1)
    return faults


def train_dataset(config: PretrainConfig, ctx: ParallelContext, num_samples: int) -> Dataset:
    """The first `num_samples` training samples of the run. Collective: rank 0 builds the index first."""
    data = config.data
    if data.kind == "synthetic":
        return SyntheticDataset(config.model.vocab_size, data.seq_length, num_samples, config.seed)
    prefix = train_prefix(data)
    cache = Path(data.cache) if data.cache is not None else prefix.parent / "index-cache"
    if not ctx.is_main:
        barrier(ctx.world)
    dataset = GPTDataset(
        IndexedDataset(prefix),
        seq_length=data.seq_length,
        num_samples=num_samples,
        seed=config.seed,
        cache_dir=cache,
    )
    if ctx.is_main:
        barrier(ctx.world)
    return dataset


def validation_windows(config: PretrainConfig) -> Dataset | None:
    """Windows to validate on, None where there is no validation set."""
    data = config.data
    if data.kind == "synthetic":
        samples = SYNTHETIC_VALIDATION_SAMPLES
        return SyntheticDataset(config.model.vocab_size, data.seq_length, samples, config.seed + 1)
    prefix = validation_prefix(data)
    return None if prefix is None else EvalWindows(IndexedDataset(prefix), seq_length=data.seq_length)
