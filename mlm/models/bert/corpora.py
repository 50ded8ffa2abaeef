"""The corpora of a BERT: samples to train on, samples to score, and what keeps them from being made."""

from collections.abc import Sequence
from pathlib import Path

from mlm.data.config import DataConfig
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.errors import UserError
from mlm.models.bert.masking import BERTVocab
from mlm.models.bert.samples import BERTDataset
from mlm.train.config import PretrainConfig

VALIDATION_SEED = 0
"""Of the masks of samples that are scored."""


def bert_samples(
    data: DataConfig, prefix: Path, vocab: BERTVocab, num_samples: int, *, seed: int, cache: Path | None
) -> BERTDataset:
    """BERT samples of one corpus. Raises UserError as BERTDataset does."""
    return BERTDataset(
        IndexedDataset(prefix),
        seq_length=data.seq_length,
        num_samples=num_samples,
        seed=seed,
        vocab=vocab,
        masked_lm_prob=data.masked_lm_prob,
        short_seq_prob=data.short_seq_prob,
        max_ngram=data.max_ngram,
        cache_dir=cache,
    )


def bert_vocab(path: Path | None) -> BERTVocab:
    """What BERT samples must know of the run's tokenizer. Raises UserError."""
    if path is None:
        raise UserError(
            "data.tokenizer=null, and no tokenizer.json lies beside the corpus: BERT samples need the ids of "
            "[CLS], [SEP], [MASK] and [PAD]; set data.tokenizer=…/tokenizer.json"
        )
    return BERTVocab.of(Tokenizer.load(path))


def bert_windows(data: DataConfig, prefix: Path, vocab: BERTVocab) -> BERTDataset:
    """What a BERT is scored on: one pass over a corpus, masked in one way whatever the run's seed."""
    once = bert_samples(data, prefix, vocab, 1, seed=VALIDATION_SEED, cache=None)
    once.num_samples = once.epoch_samples
    return once


def bert_faults(config: PretrainConfig, prefixes: Sequence[Path], tokenizer: Path | None) -> list[str]:
    """What keeps BERT samples from being made of these corpora, at most one line."""
    if config.model.kind != "bert" or config.data.kind == "synthetic":
        return []
    try:
        size = len(bert_vocab(tokenizer).word_starts)
    except UserError as error:
        return [str(error)]
    if size > config.model.vocab_size:
        return [
            f"model.vocab_size={config.model.vocab_size} is less than the {size} tokens of the tokenizer; "
            f"set model.vocab_size={size}"
        ]
    for prefix in prefixes:
        receipt = read_receipt(prefix.parent) or {}
        if receipt.get("sentences") is False:
            return [
                f"{prefix}: its documents are not split into sentences, as BERT samples need; build it "
                "with `mlm data build sentences=true`"
            ]
    return []
