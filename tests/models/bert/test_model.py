"""BERT against transformers' BertForPreTraining and MegatronBertForPreTraining."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mlm.convert.huggingface.bert import MAPPING
from mlm.models.backbone import Inputs
from mlm.models.bert.model import BERT, masked_targets
from mlm.models.documents import padding_spans
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.mesh import Axis
from mlm.parallel.random import init_parameters
from mlm.parallel.sharding import load_full, parameter_shards
from tests.models.reference import pretraining_model
from tests.models.tiny import tiny

VOCAB, SEQ, BATCH = 997, 24, 4
SIZES = {"num_layers": 3, "hidden_size": 64, "max_positions": 32, "vocab_size": VOCAB}
MODEL = tiny("bert", **SIZES, activation="gelu", layer_norm_eps=1e-12)
ONE = Axis("tp")


@cache
def reference(norm: str, activation: str, padded: bool) -> dict[str, Any]:
    """A micro-batch, and what transformers makes of it: both losses and accuracies, gradients.

    Every other label is what the model thinks most probable, so that it is right about some.
    """
    config = replace(MODEL, norm=norm, activation=activation)
    model = pretraining_model(config)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
    lengths = torch.tensor([SEQ, SEQ - 5, SEQ - 9, SEQ] if padded else [SEQ] * BATCH)
    inside = torch.arange(SEQ) < lengths[:, None]
    labels = torch.where(inside & (torch.rand(BATCH, SEQ) < 0.3), tokens.flip(0), IGNORE_INDEX)
    token_types = ((torch.arange(SEQ) > SEQ // 3) & inside).long()
    is_swapped = torch.tensor([0, 1, 1, 0])
    out = model(tokens, attention_mask=inside.long(), token_type_ids=token_types)
    is_likely = (labels != IGNORE_INDEX) & (torch.arange(SEQ) % 2 == 0)
    labels = torch.where(is_likely, out.prediction_logits.argmax(-1), labels)
    mlm = F.cross_entropy(out.prediction_logits.flatten(0, 1), labels.flatten())
    sop = F.cross_entropy(out.seq_relationship_logits, is_swapped)
    (mlm + sop).backward()
    is_masked = labels != IGNORE_INDEX
    hits = (out.prediction_logits.argmax(-1) == labels)[is_masked].float().mean()
    told = (out.seq_relationship_logits.argmax(-1) == is_swapped).float().mean()
    return {
        "config": config,
        "weights": MAPPING.to_parameters(model.state_dict(), config),
        "grads": MAPPING.to_parameters({name: p.grad for name, p in model.named_parameters()}, config),
        "batch": (tokens, lengths, token_types, labels, is_swapped),
        "parts": torch.stack([mlm, sop, hits, told]).detach(),
        "counts": torch.tensor([is_masked.sum(), BATCH, is_masked.sum(), BATCH]),
    }


@pytest.mark.parametrize(
    ("norm", "activation", "recompute"),
    [("pre", "gelu", "none"), ("post", "gelu", "full"), ("pre", "gelu_tanh", "selective")],
)
def test_bert_matches_transformers(norm: str, activation: str, recompute: str) -> None:
    """Losses and accuracies within 1e-5; each gradient within 1e-4 of its own largest value (float32)."""
    want = reference(norm, activation, padded=recompute == "none")
    config, (tokens, lengths, token_types, labels, is_swapped) = want["config"], want["batch"]
    model = BERT(config, tp=ONE, recompute=recompute)
    load_full(model, want["weights"], ONE)
    inputs = Inputs(
        tokens, lengths, token_types, padding_spans(lengths, SEQ, torch.float32, torch.device("cpu"))
    )
    targets = masked_targets(labels, is_swapped)
    parts = model(inputs, targets, 1 / want["counts"])
    torch.testing.assert_close(parts.detach(), want["parts"], rtol=0, atol=1e-5)
    sums = model.sums(inputs, targets) / want["counts"]
    torch.testing.assert_close(sums, want["parts"].double(), rtol=0, atol=1e-5)
    parts.backward(torch.ones_like(parts))
    shards = list(parameter_shards(model, ONE))
    assert {s.name for s in shards} == set(want["grads"])
    assert 0 < want["parts"][2] < 1
    for shard in shards:
        grad, expected = shard.without_padding(shard.parameter.grad), want["grads"][shard.name]
        atol = 1e-4 * float(expected.abs().max()) + 1e-9
        torch.testing.assert_close(grad, expected, rtol=0, atol=atol)


def test_padding_changes_nothing() -> None:
    """A text alone and the same text beside a longer one."""
    model = BERT(replace(MODEL, head="classification", num_labels=3), tp=ONE)
    init_parameters(model, 0, ONE)
    tokens, device = torch.randint(0, VOCAB, (2, SEQ)), torch.device("cpu")
    lengths = torch.tensor([SEQ, 7])
    types = torch.zeros_like(tokens)
    padding = padding_spans(lengths, SEQ, torch.float32, device)
    both = model.outputs(Inputs(tokens, lengths, types, padding))
    alone = model.outputs(Inputs(tokens[1:, :7], lengths[1:], types[1:, :7]))
    torch.testing.assert_close(both[1:], alone, rtol=0, atol=1e-6)
