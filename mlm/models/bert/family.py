"""BERT as a model family."""

from collections.abc import Sequence
from pathlib import Path

from mlm.data.config import MASKED, DataConfig
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import read_receipt
from mlm.data.sampler import Dataset
from mlm.data.tokenizer import Tokenizer
from mlm.models.bert.masking import BERTVocab
from mlm.models.bert.samples import BERTDataset, SyntheticBERT
from mlm.models.config import ModelConfig
from mlm.models.family import ModelFamily
from mlm.util.errors import Problem, UserError

SHORTEST = 8
"""Minimum tokens of a BERT sample: [CLS], two [SEP] and some text."""


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
        """Return one pass over a corpus, masked independently of the run's seed."""
        samples = self.train(data, prefix, tokenizer, 1, seed=0, cache=None)
        samples.num_samples = samples.epoch(0).shape[1]
        return samples

    def synthetic(self, data: DataConfig, vocab_size: int, num_samples: int, seed: int) -> Dataset:
        return SyntheticBERT(vocab_size, data.seq_length, num_samples, seed)


def bert_vocab(tokenizer: Tokenizer | None) -> BERTVocab:
    if tokenizer is None:
        raise UserError(
            "data.tokenizer=null, and no tokenizer.json is beside the corpus: BERT samples need the ids of "
            "[CLS], [SEP], [MASK] and [PAD]",
            keys=("data.tokenizer",),
            fix="set data.tokenizer=…/tokenizer.json",
        )
    return BERTVocab.of(tokenizer)


def vocabulary_problems(model: ModelConfig, tokenizer: Path | None) -> list[Problem]:
    try:
        size = len(bert_vocab(None if tokenizer is None else Tokenizer.load(tokenizer)).word_starts)
    except UserError as error:
        return list(error.problems)
    if size > model.vocab_size:
        problem = f"model.vocab_size={model.vocab_size} is less than the {size} tokens of the tokenizer"
        return [Problem(("model.vocab_size", "data.tokenizer"), problem, f"set model.vocab_size={size}")]
    return []


def corpus_problems(model: ModelConfig, prefixes: Sequence[Path], tokenizer: Path | None) -> list[Problem]:
    if problems := vocabulary_problems(model, tokenizer):
        return problems
    for prefix in prefixes:
        receipt = read_receipt(prefix.parent) or {}
        if receipt.get("sentences") is False:
            keys = ("data.path", "data.train", "data.blend")
            problem = f"{prefix}: its documents are not split into sentences, as BERT samples need"
            return [Problem(keys, problem, "build it with `mlm data build sentences=true`")]
    return []


def activation_problem(model: ModelConfig) -> Problem | None:
    if model.activation in ("silu", "relu2"):
        owner = "llama" if model.activation == "silu" else "gpt2"
        problem = f"model.activation={model.activation} is {owner}'s, and model.kind={model.kind} has a GELU"
        return Problem(("model.activation", "model.kind"), problem, "use model.activation=gelu")
    return None


def model_problem(model: ModelConfig) -> Problem | None:
    if model.token_types >= 2 or model.activation in ("silu", "relu2"):
        return activation_problem(model)
    problem = f"model.token_types={model.token_types}: model.kind={model.kind} distinguishes two segments"
    return Problem(("model.token_types", "model.kind"), problem, "use model.token_types=2")


def data_problem(data: DataConfig) -> Problem | None:
    for name in ("reset_positions", "reset_attention", "mask_eod_loss"):
        if getattr(data, name):
            key = f"data.{name}"
            problem = f"{key}=true is for samples of several documents, and a BERT sample is of one"
            return Problem((key, "model.kind"), problem, f"use {key}=false")
    if data.seq_length < SHORTEST:
        problem = f"data.seq_length={data.seq_length} holds no two segments with [CLS] and two [SEP]"
        return Problem(("data.seq_length",), problem, f"use data.seq_length={SHORTEST} or more")
    return None


def head_products(model: ModelConfig, tp: int) -> float:
    """Weights of the transform and the vocabulary projection, which only masked tokens go through."""
    if model.head != "language_model":
        return 0.0
    h = model.hidden_size
    return MASKED * (h * model.padded_vocab_size(tp) + h * h)


FAMILY = ModelFamily(
    model="mlm.models.bert.model:BERT",
    causal=False,
    objective="mlm.models.bert.model:MaskedTokensAndOrder",
    samples=SentencePairs(),
    check_tokenizer=BERTVocab.of,
    scored=MASKED,
    data_keys=("data.masked_lm_prob", "data.short_seq_prob", "data.max_ngram"),
    head_products=head_products,
    loss_unit="nats, both heads",
    protocol="one pass over the samples of pretraining, masks of a fixed seed",
    model_problem=model_problem,
    data_problem=data_problem,
    corpus_problems=corpus_problems,
    converts_as="bert",
)
