"""Attention with dropout on the probabilities, which PyTorch's fused kernels do not do on a CPU."""

import pytest
import torch
from torch import Tensor

from mlm.models.attention import fused_attention, unfused_attention
from mlm.models.documents import document_bias, padding_spans
from mlm.parallel.dropout import DropoutStream, site_keys

S, B, HEADS, HEAD_DIM = 7, 3, 2, 9


def qkv() -> Tensor:
    """[S, B, 3H] of deviation 2: scores large enough for their scale to matter."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(S, B, 3 * HEADS * HEAD_DIM, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def bias(name: str) -> Tensor | None:
    if name == "padding":
        spans = padding_spans(torch.tensor([S, 4, 1]), S, torch.float64, torch.device("cpu"))
        return spans.bias
    if name == "documents":
        ends = torch.zeros(B, S, dtype=torch.bool)
        ends[0, 2] = ends[1, 5] = True
        return document_bias(ends, torch.float64)
    return None


@pytest.mark.parametrize("name", ["causal", "all", "padding", "documents"])
def test_without_dropout_it_equals_the_fused_kernel(name: str) -> None:
    """Outputs and input gradients, where only the order of sums differs."""
    dy = torch.randn(S, B, HEADS * HEAD_DIM, dtype=torch.float64)
    results = []
    for attention, without in ((fused_attention, 0.0), (unfused_attention, lambda x: x)):
        x = qkv()
        y = attention(x, HEAD_DIM, without, bias(name), name == "causal")
        y.backward(dy)
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(*results)


def test_dropout_takes_probabilities_out_and_scales_the_others() -> None:
    """With the same mask applied to probabilities made by hand."""
    x = qkv().detach()
    stream, place = (
        DropoutStream.of_micro_batch(1, 0, B, torch.device("cpu")),
        site_keys([(0, "attention")])[0],
    )

    def drop(p: Tensor) -> Tensor:
        return stream.probabilities(p, 0.4, place, length=S)

    y = unfused_attention(x, HEAD_DIM, drop)
    q, k, v = x.reshape(S, B, HEADS, 3, HEAD_DIM).permute(3, 1, 2, 0, 4)  # each [B, N, S, D]
    scores = (q @ k.mT / HEAD_DIM**0.5).masked_fill(~torch.ones(S, S).bool().tril(), -torch.inf)
    dropped = drop(scores.softmax(-1).flatten(0, 1)).unflatten(0, (B, HEADS))
    assert (dropped == 0).sum() > B * HEADS * S * (S - 1) / 2  # more than what comes later
    torch.testing.assert_close(y, (dropped @ v).permute(2, 0, 1, 3).reshape(S, B, -1))
