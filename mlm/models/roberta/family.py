"""RoBERTa as a model family: BERT without sentence pairs. DistilBERT is one, too."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from mlm.data.config import DataConfig
from mlm.data.gpt import EvalWindows, GPTDataset
from mlm.data.indexed import IndexedDataset
from mlm.data.sampler import Dataset
from mlm.data.tokenizer import Tokenizer
from mlm.models.bert import family as bert
from mlm.models.bert.samples import SyntheticBERT
from mlm.models.config import ModelConfig
from mlm.models.family import Architecture, option, option_problem
from mlm.models.roberta.samples import FRAME, MaskedWindows
from mlm.util.errors import Problem

POOLERS = ("tanh", "relu")


@dataclass(frozen=True, kw_only=True, slots=True)
class RobertaSettings:
    """model.options.NAME: differences between RoBERTa and DistilBERT; the defaults are a BERT's."""

    position_offset: int = 0
    """Row of the position table for the first token of a text. RoBERTa and XLM-R: 2, one after the id of
    padding; the table has so many rows more."""
    pooler_activation: str = "tanh"
    """Activation of the pooler of head=classification: tanh, or relu as DistilBERT's."""


DEFAULTS: dict[str, bool | int | float | str] = {
    field.name: field.default  # type: ignore[misc]
    for field in fields(RobertaSettings)
}


def position_offset(model: ModelConfig) -> int:
    offset = option(model, "position_offset")
    assert type(offset) is int, "checked with the configuration"
    return offset


def architecture(model: ModelConfig) -> Architecture:
    return Architecture(
        head_dim=model.hidden_size // model.num_heads,
        kv_heads=model.num_heads,
        position_offset=position_offset(model),
    )


class FullSentences:
    """Masked windows of a corpus of concatenated documents."""

    def train(
        self,
        data: DataConfig,
        prefix: Path,
        tokenizer: Tokenizer | None,
        num_samples: int,
        *,
        seed: int,
        cache: Path | None,
    ) -> MaskedWindows:
        length = data.seq_length - FRAME - 1  # windows have one more token
        windows = GPTDataset(
            IndexedDataset(prefix), seq_length=length, num_samples=num_samples, seed=seed, cache_dir=cache
        )
        return mask_windows(windows, data, tokenizer, seed)

    def validation(self, data: DataConfig, prefix: Path, tokenizer: Tokenizer | None) -> MaskedWindows:
        """Return one pass over a corpus, masked independently of the run's seed."""
        windows = EvalWindows(IndexedDataset(prefix), seq_length=data.seq_length - FRAME - 1)
        return mask_windows(windows, data, tokenizer, seed=0)

    def synthetic(self, data: DataConfig, vocab_size: int, num_samples: int, seed: int) -> Dataset:
        return SyntheticBERT(vocab_size, data.seq_length, num_samples, seed)


def mask_windows(
    windows: GPTDataset | EvalWindows, data: DataConfig, tokenizer: Tokenizer | None, seed: int
) -> MaskedWindows:
    return MaskedWindows(
        windows,
        seed=seed,
        vocab=bert.bert_vocab(tokenizer),
        masked_lm_prob=data.masked_lm_prob,
        max_ngram=data.max_ngram,
    )


def model_problem(model: ModelConfig) -> Problem | None:
    if problem := bert.activation_problem(model):
        return problem
    for name, value in model.options.items():
        if problem := option_problem(DEFAULTS, name, value):
            return problem
    if (offset := position_offset(model)) > model.vocab_size:
        key = "model.options.position_offset"
        why = f"{key}={offset} is one after the id of padding, and model.vocab_size={model.vocab_size}"
        return Problem((key, "model.vocab_size"), why, f"use {key}=2")
    pooler, key = option(model, "pooler_activation"), "model.options.pooler_activation"
    if pooler not in POOLERS:
        return Problem((key,), f"{key}={pooler} is not supported", f"use {' or '.join(POOLERS)}")
    return None


def padding_problem(model: ModelConfig, tokenizer: Tokenizer) -> Problem | None:
    """Return the problem of a model whose first position is not one after the id of padding.

    `transformers` derives the first row of the position table from that id.
    """
    offset, pad = position_offset(model), tokenizer.pad_id
    if not offset or pad is None or offset == pad + 1:
        return None
    key = "model.options.position_offset"
    why = f"{key}={offset}: positions of a RoBERTa begin after the id of padding, {pad} in the tokenizer"
    return Problem((key, "data.tokenizer"), why, f"set {key}={pad + 1}, or 0 with model.token_types=0")


def corpus_problems(model: ModelConfig, prefixes: Sequence[Path], tokenizer: Path | None) -> list[Problem]:
    if problems := bert.vocabulary_problems(model, tokenizer):
        return problems
    assert tokenizer is not None, "checked with the vocabulary"
    problem = padding_problem(model, Tokenizer.load(tokenizer))
    return [problem] if problem else []


FAMILY = replace(
    bert.FAMILY,
    model="mlm.models.roberta.model:RoBERTa",
    objective="mlm.models.bert.model:MaskedTokens",
    samples=FullSentences(),
    data_keys=("data.masked_lm_prob", "data.max_ngram"),
    options=DEFAULTS,
    settings=RobertaSettings,
    architecture=architecture,
    loss_unit="nats per masked token",
    protocol="consecutive windows, masks of a fixed seed",
    model_problem=model_problem,
    corpus_problems=corpus_problems,
    converts_as="roberta",
)
