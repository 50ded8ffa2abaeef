"""Parts of the Llama family in ways that `transformers` does not compute: fused, masked, split."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mlm.models.documents import document_bias, document_spans
from mlm.models.llama.attention import GroupedQueryAttention
from mlm.models.llama.model import Llama
from mlm.models.llama.rope import frequencies
from mlm.models.llama.settings import LlamaSettings
from mlm.models.rotary import Rotary
from mlm.parallel.mesh import Axis
from mlm.parallel.random import init_parameters
from tests.models.tiny import tiny

S, B = 9, 2
SIZES = {"hidden_size": 24, "ffn_hidden_size": 20, "max_positions": 32, "vocab_size": 31}
MODEL = tiny("llama", **SIZES, vocab_multiple=8, options={"num_kv_heads": 2})
ONE = Axis("tp")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_turns_of_other_devices_have_the_bits_of_a_cpu(fraction: float, dtype: torch.dtype) -> None:
    """Of heads that lie between others, as a projection has them; forward and backward."""
    settings = LlamaSettings(head_dim=10, rotary_fraction=fraction)
    turns, _ = frequencies(settings, torch.float32, torch.device("cpu"))
    rotary = Rotary.of(torch.arange(S * B).view(S, B), turns, 1.0, dtype)
    projected, dy = normal(S, B, 7, 10).to(dtype).requires_grad_(), normal(S, B, 3, 10).flip(1).to(dtype)
    results = []
    for is_cpu in (True, False):
        with patch.object(Tensor, "is_cpu", is_cpu):
            y = rotary.rotate(projected[:, :, 2:5])
            results.append((y, *torch.autograd.grad(y, projected, dy)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (0.9, False), (0.0, True)])
def test_attention_is_the_same_fused_masked_and_with_dropout(
    window: int, documents: bool, softcap: float, sinks: bool
) -> None:
    """Three ways to one function: by document, by a mask for all, and probabilities spelled out."""
    options = MODEL.options | {"window": window, "attention_softcap": softcap, "attention_multiplier": 0.7}
    options |= {"attention_sinks": sinks}
    attention = GroupedQueryAttention(replace(MODEL, options=options), layer=0, tp=ONE).double()
    qkv = normal(S, B, (4 + 2 * 2) * 6)
    ends = torch.zeros(B, S, dtype=torch.bool)
    if documents:
        ends[0, 2] = ends[1, 5] = ends[1, 6] = True
    bias = document_bias(ends, torch.float64)
    q, k, v = attention.heads(qkv)
    distance = torch.arange(S)[:, None] - torch.arange(S)
    sees = (bias == 0) & (distance < (window or S))
    scores = q @ k.repeat_interleave(2, 1).mT * 0.7
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    scores = scores.masked_fill(~sees, -torch.inf)
    if attention.sinks is not None:
        attention.sinks.bias.data = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
        column = attention.sinks.bias.view(4, 1, 1).expand(B, 4, S, 1)
        scores = torch.cat([scores, column], -1)
    want = (scores.softmax(-1)[..., :S] @ v.repeat_interleave(2, 1)).permute(2, 0, 1, 3).flatten(2)
    spans = document_spans(ends, torch.float64) if documents else None
    torch.testing.assert_close(attention._fused(qkv, 0.0, spans), want)
    torch.testing.assert_close(attention.fused(qkv, 0.0, bias, False), want)
    torch.testing.assert_close(attention.unfused(qkv, lambda p: p, bias, False), want)
    if not documents:
        torch.testing.assert_close(attention.unfused(qkv, lambda p: p, None, True), want)


@pytest.mark.parametrize("count", [2, 4])
def test_parts_are_those_of_tp_ranks(count: int) -> None:
    """Attention of each part gives its heads; beyond two parts, two share a head of keys and values."""
    attention = GroupedQueryAttention(MODEL, layer=0, tp=ONE).double()
    qkv = normal(S, B, (4 + 2 * 2) * 6)
    parts = [attention.fused(part, 0.0, None, True) for part in attention.parts(qkv, count)]
    torch.testing.assert_close(torch.cat(parts, -1), attention.fused(qkv, 0.0, None, True))


def test_positions_of_documents_turn_each_sample_by_its_own() -> None:
    """With reset_positions samples differ; without, all have the tables of 0 … S - 1."""
    torch.manual_seed(0)
    model = Llama(MODEL, dtype=torch.float64).double()
    init_parameters(model, 3)
    x = normal(S, B, 24)
    places = torch.stack([torch.arange(S), torch.arange(S) + 5])
    rotary = model.rotary(x, places)
    alone = model.rotary(x[:, :1], None)
    assert torch.equal(rotary.cos[:, :1], alone.cos)
    assert torch.equal(rotary.sin[:-5, 1], alone.sin[5:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_of_half_precision_are_computed_in_float32(dtype: torch.dtype) -> None:
    """Positions up to 4,000 in bf16 would be 8 apart, and angles whole turns off."""
    positions = torch.randint(4000, (B, S), generator=torch.Generator().manual_seed(0))
    exact = Llama(MODEL, dtype=torch.float64).rotary(normal(S, B, 24), positions)
    rotary = Llama(MODEL, dtype=dtype).rotary(normal(S, B, 24).to(dtype), positions)
    rounding = torch.finfo(dtype).eps / 4 + 4000 * 2e-7  # of a number below 1, and of a float32 angle
    for found, want in ((rotary.cos, exact.cos), (rotary.sin, exact.sin)):
        assert found.dtype == dtype
        assert (found.double() - want).abs().max() <= rounding
