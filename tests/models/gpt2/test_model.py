"""GPT-2 against transformers' GPT2LMHeadModel from the same weights."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mlm.convert.huggingface.gpt2 import MAPPING
from mlm.models.gpt2.model import GPT2
from mlm.parallel.cross_entropy import full_logits
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import load_full, parameter_shards
from tests.models.reference import random_gpt2
from tests.models.tiny import tiny

VOCAB, SEQ, BATCH = 997, 24, 3
MODEL = tiny(num_layers=3, hidden_size=64, max_positions=32, vocab_size=VOCAB)
ONE = Axis("tp")


@cache
def reference(activation: str = "gelu_new") -> dict[str, Any]:
    """transformers' model of random weights (biases and norms too), its logits, loss and gradients."""
    sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 64, "n_layer": 3, "n_head": 4}
    model = random_gpt2(activation_function=activation, **sizes)
    tokens, labels = torch.randint(0, VOCAB, (2, BATCH, SEQ))
    logits = model(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {
        "weights": MAPPING.to_parameters(model.state_dict(), MODEL),
        "grads": MAPPING.to_parameters(grads, MODEL),
        "tokens": tokens,
        "labels": labels,
        "logits": logits.detach(),
        "loss": loss.detach(),
    }


@pytest.mark.parametrize(
    ("activation", "recompute"), [("gelu_tanh", "none"), ("gelu_tanh", "full"), ("relu2", "none")]
)
def test_gpt2_matches_transformers(activation: Any, recompute: str) -> None:
    """Logits within 1e-5 absolute in float32; each gradient within 1e-4 of its own largest value."""
    want = reference("relu2" if activation == "relu2" else "gelu_new")
    model = GPT2(replace(MODEL, activation=activation), tp=ONE, recompute=recompute)
    load_full(model, want["weights"], ONE)
    for length in (1, SEQ):
        last = full_logits(model.hidden_states(want["tokens"][:, :length])[-1], model.token)
        assert (last - want["logits"][:, length - 1]).abs().max() <= 1e-5
    loss = model(want["tokens"], want["labels"], torch.tensor(1.0 / (BATCH * SEQ)))
    loss.backward()
    torch.testing.assert_close(loss.detach(), want["loss"], rtol=1e-6, atol=1e-6)
    for shard in parameter_shards(model, ONE):
        grad, expected = shard.without_padding(shard.parameter.grad), want["grads"][shard.name]
        assert (grad - expected).abs().max() <= 1e-4 * expected.abs().max(), shard.name
