"""Inputs of a BERT benchmark: shapes, random weights and micro-batches, the same for every contender."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bench.shapes import NUM_BATCHES, Shape
from mlm.data.config import DataConfig
from mlm.data.sampler import as_batch
from mlm.data.tokenizer import Tokenizer
from mlm.models.bert.corpora import SentencePairs, bert_vocab
from mlm.models.bert.samples import BERTBatch
from mlm.models.bert.synthetic import SyntheticBERT
from mlm.models.config import ModelConfig
from mlm.util.errors import UserError

WORDPIECES = 30522
"""Tokens of the vocabulary of bert-base-uncased. `mlm` pads its table to 30,592 rows, others do not."""


@dataclass(frozen=True)
class BertShape(Shape):
    """Sizes of a BERT and of the micro-batch of one step; vocab_size is not padded."""

    norm: Literal["pre", "post"] = "post"
    corpus: str | None = None
    """Folder that `mlm data build sentences=true` wrote; None for random tokens, a tenth of the samples
    short."""

    def model(self) -> ModelConfig:
        """The configuration of `mlm`: that of model=bert_base but for its sizes."""
        return ModelConfig(
            kind="bert",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            max_positions=self.seq_length,
            vocab_size=self.vocab_size,
            token_types=2,
            norm=self.norm,
            activation="gelu",
            layer_norm_eps=1e-12,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
        )

    def describe(self) -> str:
        """The sizes in words."""
        return f"{super().describe()}, norm={self.norm}, dropout {self.dropout:g}"


BERT_NAMED: Mapping[str, tuple[int, int, int, int, int, int]] = {
    "tiny": (2, 64, 4, 128, 512, 8),
    "base-128": (12, 768, 12, 128, WORDPIECES, 8),
    "base-512": (12, 768, 12, 512, WORDPIECES, 4),
    "tune-128": (2, 768, 12, 128, WORDPIECES, 8),
    "tune-512": (2, 768, 12, 512, WORDPIECES, 4),
}
"""L, H, N, S, V, B: model=bert_tiny, model=bert_base at the two lengths it is trained at (arXiv:1810.04805,
appendix A.2), and two layers of it to tune on."""


def bert_shape(
    word: str,
    norm: Literal["pre", "post"],
    dropout: float,
    corpus: Path | None,
    layers: int | None = None,
) -> BertShape:
    """The shape that a word of --shape names, or L,H,N,S,V,B; `layers` replaces L. Raises UserError."""
    sizes = BERT_NAMED.get(word) or tuple(int(x) if x.isdecimal() else 0 for x in word.split(","))
    if len(sizes) != 6 or min(sizes) < 1:
        raise UserError(
            f"--shape {word}: use one of {', '.join(BERT_NAMED)}, or six whole numbers L,H,N,S,V,B"
        )
    num_layers, hidden, heads, seq, vocab, batch = sizes
    if hidden % heads:
        raise UserError(f"--shape {word}: H={hidden} must be a multiple of N={heads}")
    if seq < 8:
        raise UserError(f"--shape {word}: S={seq} must be at least 8")
    return BertShape(
        word,
        layers or num_layers,
        hidden,
        heads,
        seq,
        vocab,
        batch,
        norm=norm,
        dropout=dropout,
        corpus=None if corpus is None else str(corpus),
    )


def bert_batches(shape: BertShape, seed: int) -> list[BERTBatch]:
    """Micro-batches for NUM_BATCHES steps, on the CPU, the one with most padding first.

    Raises UserError for a corpus that does not fit.
    """
    dataset = SyntheticBERT(shape.vocab_size, shape.seq_length, NUM_BATCHES * shape.batch_size, seed)
    samples = dataset.gather(range(len(dataset)))
    # 0 is [PAD], which no text holds: the input table of transformers would not learn it
    samples.tokens[samples.padding_mask & (samples.tokens == 0)] = 1
    if shape.corpus is not None:
        folder = Path(shape.corpus)
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
        vocab = bert_vocab(tokenizer)
        if len(vocab.word_starts) > shape.vocab_size:
            raise UserError(f"--corpus {folder}: {len(vocab.word_starts)} tokens, more than V of --shape")
        real = SentencePairs().train(
            DataConfig(seq_length=shape.seq_length),
            folder / "train",
            tokenizer,
            len(dataset),
            seed=seed,
            cache=None,
        )
        samples = real.gather(range(len(dataset)))
    out = []
    for first in range(0, len(dataset), shape.batch_size):
        batch = as_batch(samples[first : first + shape.batch_size], first)
        assert isinstance(batch, BERTBatch)
        out.append(batch)
    return sorted(out, key=lambda batch: int(batch.lengths.sum()))  # losses are compared where padding is


def bert_state(shape: BertShape, seed: int) -> dict[str, Tensor]:
    """Random float32 weights in the names of transformers' BertForPreTraining, or MegatronBertForPreTraining
    with norm=pre; nothing is zero, so all of it shows."""
    generator = torch.Generator().manual_seed(seed)
    h, f, state = shape.hidden_size, shape.model().ffn_size, dict[str, Tensor]()

    def normal(*size: int, mean: float = 0.0) -> Tensor:
        return torch.empty(size).normal_(mean, 0.02, generator=generator)

    def add(name: str, *size: int, mean: float = 0.0) -> None:
        state[f"{name}.weight"], state[f"{name}.bias"] = normal(*size, mean=mean), normal(size[0])

    tables = {"word": shape.vocab_size, "position": shape.seq_length, "token_type": 2}
    for table, rows in tables.items():
        state[f"bert.embeddings.{table}_embeddings.weight"] = normal(rows, h)
    norms = ("attention.output.LayerNorm", "output.LayerNorm")
    if shape.norm == "pre":
        norms = ("attention.ln", "ln")
    add("bert.encoder.ln" if shape.norm == "pre" else "bert.embeddings.LayerNorm", h, mean=1.0)
    for n in range(shape.num_layers):
        layer = f"bert.encoder.layer.{n}"
        for part in ("query", "key", "value"):
            add(f"{layer}.attention.self.{part}", h, h)
        add(f"{layer}.attention.output.dense", h, h)
        add(f"{layer}.intermediate.dense", f, h)
        add(f"{layer}.output.dense", h, f)
        for norm in norms:
            add(f"{layer}.{norm}", h, mean=1.0)
    add("bert.pooler.dense", h, h)
    add("cls.predictions.transform.dense", h, h)
    add("cls.predictions.transform.LayerNorm", h, mean=1.0)
    add("cls.seq_relationship", 2, h)
    state["cls.predictions.bias"] = normal(shape.vocab_size)
    return state
