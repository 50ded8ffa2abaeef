"""The corpora of a BERT: samples to train on, samples to score, and what keeps them from being made."""

from collections.abc import Sequence
from pathlib import Path

from mlm.data.config import DataConfig
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import read_receipt
from mlm.data.sampler import Dataset
from mlm.data.tokenizer import Tokenizer
from mlm.models.bert.masking import BERTVocab
from mlm.models.bert.samples import BERTDataset
from mlm.models.bert.synthetic import SyntheticBERT
from mlm.models.config import ModelConfig
from mlm.util.errors import Problem, UserError

VALIDATION_SEED = 0
"""Of the masks of samples that are scored."""


class SentencePairs:
    """BERT samples of a corpus with one sequence per sentence."""

    def train(
        self,
        data: DataConfig,
        prefix: Path,
        tokenizer: Tokenizer | None,
        num_samples: int,
        *,
        seed: int,
        cache: Path | None,
    ) -> BERTDataset:
        """Return training samples of a corpus. Raises UserError as BERTDataset does."""
        return BERTDataset(
            IndexedDataset(prefix),
            seq_length=data.seq_length,
            num_samples=num_samples,
            seed=seed,
            vocab=bert_vocab(tokenizer),
            masked_lm_prob=data.masked_lm_prob,
            short_seq_prob=data.short_seq_prob,
            max_ngram=data.max_ngram,
            cache_dir=cache,
        )

    def validation(self, data: DataConfig, prefix: Path, tokenizer: Tokenizer | None) -> BERTDataset:
        """Return one pass over a corpus, masked in one way whatever the run's seed."""
        once = self.train(data, prefix, tokenizer, 1, seed=VALIDATION_SEED, cache=None)
        once.num_samples = once.epoch_samples
        return once

    def synthetic(self, data: DataConfig, vocab_size: int, num_samples: int, seed: int) -> Dataset:
        """Return random samples."""
        return SyntheticBERT(vocab_size, data.seq_length, num_samples, seed)


def bert_vocab(tokenizer: Tokenizer | None) -> BERTVocab:
    """Return what BERT samples depend on of the run's tokenizer. Raises UserError."""
    if tokenizer is None:
        raise UserError(
            "data.tokenizer=null, and no tokenizer.json is beside the corpus: BERT samples need the ids of "
            "[CLS], [SEP], [MASK] and [PAD]",
            keys=("data.tokenizer",),
            fix="set data.tokenizer=…/tokenizer.json",
        )
    return BERTVocab.of(tokenizer)


def corpus_problems(model: ModelConfig, prefixes: Sequence[Path], tokenizer: Path | None) -> list[Problem]:
    """Return the problem of making BERT samples of these corpora, at most one."""
    try:
        size = len(bert_vocab(None if tokenizer is None else Tokenizer.load(tokenizer)).word_starts)
    except UserError as error:
        return list(error.problems)
    if size > model.vocab_size:
        problem = f"model.vocab_size={model.vocab_size} is less than the {size} tokens of the tokenizer"
        return [Problem(("model.vocab_size", "data.tokenizer"), problem, f"set model.vocab_size={size}")]
    for prefix in prefixes:
        receipt = read_receipt(prefix.parent) or {}
        if receipt.get("sentences") is False:
            problem = f"{prefix}: its documents are not split into sentences, as BERT samples need"
            return [
                Problem(
                    ("data.path", "data.train", "data.blend"),
                    problem,
                    "build it with `mlm data build sentences=true`",
                )
            ]
    return []
