"""Loss of masked tokens for a model that knows their frequencies and nothing of their context."""

from pathlib import Path

import numpy as np

from mlm.data.config import DataConfig
from mlm.data.tokenizer import Tokenizer
from mlm.models.bert.corpora import SentencePairs, bert_vocab
from mlm.parallel.labels import IGNORE

SAMPLES, CHUNK = 20_000, 4096
"""Samples whose masks are counted, and how many at a time."""


def entropy(corpus: Path, data: DataConfig) -> float:
    """Return the entropy of a masked token of the training text, in nats.

    It is counted over masks: which tokens are masked is not how often they occur, as whole words are chosen.
    Raises UserError for a corpus that gives no BERT samples.
    """
    tokenizer = Tokenizer.load(corpus / "tokenizer.json")
    counts = np.zeros(len(bert_vocab(tokenizer).word_starts), dtype=np.int64)
    samples = SentencePairs().train(data, corpus / "train", tokenizer, SAMPLES, seed=0, cache=None)
    for first in range(0, SAMPLES, CHUNK):
        labels = samples.gather(range(first, min(first + CHUNK, SAMPLES))).labels
        counts += np.bincount(labels[labels != IGNORE], minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
