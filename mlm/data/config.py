"""Settings of the data that a run reads."""

from dataclasses import dataclass
from typing import Annotated

from mlm.config.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SHARE,
    Aliases,
    BlendEntry,
    CacheFolder,
    ImportPath,
    InputPath,
    OnlyIf,
    Role,
)

SOURCES = ImportPath("indexed", "synthetic")
SPLITS = ("train", "validation", "test")
"""Parts of a corpus."""
MASKED = 0.15
"""Share of the tokens that a BERT predicts (arXiv:1810.04805, section 3.1)."""

BERT = OnlyIf("model.kind", "bert")
MASKING = OnlyIf("model.kind", "bert", "roberta")
DATA_NAMES = Aliases("dataset", "data_dir", "data_path", "train_file")
DataPath = Annotated[InputPath, DATA_NAMES]
StoredPath = Annotated[str, Role.STORED, DATA_NAMES]
StoredPrefix = Annotated[str, Role.STORED]
SeqLength = Annotated[
    int,
    POSITIVE,
    Aliases("block_size", "context_length", "context_size", "max_seq_len", "max_seq_length", "n_ctx"),
]
MicroBatchSize = Annotated[
    int,
    POSITIVE,
    Aliases(
        "batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu", "micro_batch_size"
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Source of the training tokens."""

    kind: Annotated[str, SOURCES] = "indexed"
    """indexed reads Megatron's .bin/.idx; synthetic draws random tokens, for throughput runs; or a function
    of your own by its import path, my_package.my_module:dataset, which is called as dataset(data,
    vocab_size=…, num_samples=…, seed=…, validation=…) and returns a Dataset (mlm/data/sampler.py): ids
    from 0 to vocab_size - 1, or -100 where there is no token."""
    path: StoredPath | None = None
    """Corpus folder written by `mlm data build`: train.bin/.idx, validation.bin/.idx, tokenizer.json; or the
    prefix of another .bin/.idx pair, which is then the training part. s3://BUCKET/NAME is one in an
    S3-compatible store, whose tokens are read as they are needed."""
    train: StoredPrefix | None = None
    """Prefix of the training .bin/.idx; null means {path}/train. s3://BUCKET/NAME as for path."""
    validation: StoredPrefix | None = None
    """Prefix of the validation .bin/.idx; null means {path}/validation, if it exists. s3://BUCKET/NAME as for
    path."""
    tokenizer: InputPath | None = None
    """tokenizer.json the corpus was written with; null means {path}/tokenizer.json, if it exists."""
    cache: CacheFolder | None = None
    """Folder of cached sample indices, and of what is kept of a corpus in a store; null means a folder next
    to the corpus."""
    cache_gb: Annotated[float, POSITIVE] = 32.0
    """Most that is kept of each .bin in a store, in GB of 10^9 bytes; the oldest is deleted first."""
    seq_length: SeqLength = 1024
    """Tokens per sample, S. At most model.max_positions."""
    blend: tuple[BlendEntry, ...] = ()
    """Corpora to mix, each `WEIGHT FOLDER` such as [0.3 corpora/wiki, 0.7 s3://bucket/web], in place of path
    and train. Weights are scaled to sum to 1."""
    change: bool = False
    """Allow a resumed run other corpora or weights than before, which is recorded; and a new one with the
    weights of ckpt=… tokens of another tokenizer than these were trained on. Not kept for the next resume."""
    reset_positions: bool = False
    """Restart positions after every end-of-document token."""
    reset_attention: bool = False
    """Let tokens attend only to their own document."""
    mask_eod_loss: bool = False
    """Do not score what follows an end-of-document token: the first token of the next document."""
    masked_lm_prob: Annotated[float, PROBABILITY, MASKING] = MASKED
    """bert and roberta: share of a sample's tokens that are to be predicted."""
    short_seq_prob: Annotated[float, SHARE, BERT] = 0.1
    """bert: share of samples made shorter than seq_length, so that the model learns to read such."""
    max_ngram: Annotated[int, POSITIVE, MASKING] = 3
    """bert and roberta: most words masked together; n with probability proportional to 1/n."""
    eod_id: Annotated[int | None, NOT_NEGATIVE] = None
    """The end-of-document token, for these three; null takes the corpus's receipt's or tokenizer's."""
