"""BERT as a model family."""

from mlm.data.config import MASKED, DataConfig
from mlm.models.bert import huggingface, megatron
from mlm.models.bert.corpora import SentencePairs, corpus_problems
from mlm.models.bert.masking import BERTVocab
from mlm.models.bert.model import BERT
from mlm.models.bert.objective import MaskedTokens
from mlm.models.bert.samples import BERTBatch
from mlm.models.config import ModelConfig
from mlm.models.family import ModelFamily
from mlm.util.errors import Problem

SHORTEST = 8
"""Tokens of a BERT sample at the least: [CLS], two [SEP] and some text."""
DOCUMENT_SWITCHES = ("reset_positions", "reset_attention", "mask_eod_loss")


def model_problem(model: ModelConfig) -> Problem | None:
    """Return the problem of a model's settings."""
    if model.activation == "silu":
        problem = f"model.activation=silu is llama's, and model.kind={model.kind} has a GELU"
        return Problem(("model.activation", "model.kind"), problem, "use model.activation=gelu")
    if model.token_types >= 2:
        return None
    problem = f"model.token_types={model.token_types}: model.kind={model.kind} distinguishes two segments"
    return Problem(("model.token_types", "model.kind"), problem, "use model.token_types=2")


def data_problem(data: DataConfig) -> Problem | None:
    """Return the problem of a setting that BERT samples do not have, or that they cannot be made with."""
    for name in DOCUMENT_SWITCHES:
        if getattr(data, name):
            key = f"data.{name}"
            problem = f"{key}=true is for samples of several documents, and a BERT sample is of one"
            return Problem((key, "model.kind"), problem, f"use {key}=false")
    if data.seq_length < SHORTEST:
        problem = f"data.seq_length={data.seq_length} holds no two segments with [CLS] and two [SEP]"
        return Problem(("data.seq_length",), problem, f"use data.seq_length={SHORTEST} or more")
    return None


def num_head_parameters(model: ModelConfig) -> int:
    """Return the parameters of the pooler and of the heads of pretraining, or of the one for finetuning."""
    h = model.hidden_size
    if model.head == "span":
        return 2 * (h + 1)
    pooler = h * h + h
    if model.head == "classification":
        return pooler + model.num_labels * (h + 1)
    if model.head == "language_model":
        transform = h * h + 3 * h  # with its norm
        return pooler + transform + model.vocab_size + 2 * (h + 1)
    return pooler


def head_products(model: ModelConfig, tp: int) -> float:
    """Return those of masked tokens alone: their transform, and the vocabulary projection."""
    if model.head != "language_model":
        return 0.0
    h = model.hidden_size
    return MASKED * (h * model.padded_vocab_size(tp) + h * h)


FAMILY: ModelFamily[BERT, BERTBatch] = ModelFamily(
    model=BERT,
    causal=False,
    objective=MaskedTokens.of,
    samples=SentencePairs(),
    check_tokenizer=BERTVocab.of,
    scored=MASKED,
    data_keys=("data.masked_lm_prob", "data.short_seq_prob", "data.max_ngram"),
    num_head_parameters=num_head_parameters,
    head_products=head_products,
    loss_unit="nats, both heads",
    protocol="one pass over the samples of pretraining, masks of a fixed seed",
    model_problem=model_problem,
    data_problem=data_problem,
    corpus_problems=corpus_problems,
    huggingface=huggingface.MAPPING,
    megatron=megatron.MAPPING,
)
