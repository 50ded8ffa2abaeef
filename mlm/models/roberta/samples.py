"""RoBERTa samples: [CLS] and a window of consecutive tokens [SEP], of which some are masked.

As in arXiv:1907.11692, section 4.2 (FULL-SENTENCES), a window runs on into the next document, after the token
that ends the one before; and as in section 4.1 a window is masked anew in each epoch. Words are masked as in
BERT's samples.
"""

import numpy as np
from numpy.typing import ArrayLike

from mlm.data.gpt import EvalWindows, GPTDataset
from mlm.models.bert.masking import BERTVocab, mask_tokens
from mlm.models.bert.samples import BERTSamples
from mlm.parallel.config import IGNORE_INDEX
from mlm.util.splitmix import draw, root

FRAME = 2
"""Special tokens of a sample: [CLS] and [SEP]."""
SAMPLES = 1
"""Draw of the seed's stream, as of BERT's samples."""


class MaskedWindows:
    """Windows of S - 2 tokens as samples of S. Neighbouring windows share a token, as GPT-2's do.

    A sample is a function of (windows, settings, seed, its number).
    """

    def __init__(
        self,
        windows: GPTDataset | EvalWindows,
        *,
        seed: int,
        vocab: BERTVocab,
        masked_lm_prob: float,
        max_ngram: int,
    ) -> None:
        self.windows, self.seed, self.vocab = windows, seed, vocab
        self.masked_lm_prob, self.max_ngram = masked_lm_prob, max_ngram

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def epochs(self) -> float:
        """Passes over the corpus in all samples."""
        return len(self) * self.windows.seq_length / self.windows.indexed.num_tokens

    def gather(self, sample_ids: ArrayLike) -> BERTSamples:
        """Samples in bulk. The ids must be in range. Raises UserError on a token outside the vocabulary."""
        windows = self.windows.gather(sample_ids)  # [n, S - 2], -100 after the end of the corpus
        self.vocab.check_tokens(windows, self.windows.indexed.bin_path)
        inside = windows != IGNORE_INDEX
        lengths, vocab = inside.sum(axis=1) + FRAME, self.vocab
        tokens = np.full((len(windows), windows.shape[1] + FRAME), vocab.pad_id, dtype=np.int64)
        tokens[:, 0] = vocab.cls_id
        tokens[:, 1:-1] = np.where(inside, windows, vocab.pad_id)
        tokens[np.arange(len(windows)), lengths - 1] = vocab.sep_id
        states = draw(draw(root(self.seed), SAMPLES), np.asarray(sample_ids, dtype=np.int64))
        masked, labels = mask_tokens(
            tokens, lengths, vocab, states, masked_lm_prob=self.masked_lm_prob, max_ngram=self.max_ngram
        )
        is_swapped = np.full(len(windows), IGNORE_INDEX, dtype=np.int64)
        return BERTSamples(masked, np.zeros_like(masked), lengths, labels, is_swapped)
