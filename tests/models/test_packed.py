"""Packed attention against attention with a bias on the scores: which tokens go where.

The kernel itself runs on a GPU alone; here its contract is computed sequence by sequence.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.models import documents
from mlm.models.attention import fused_attention
from mlm.models.documents import (
    Boundaries,
    Packing,
    build_packing,
    document_bias,
    packed_attention,
    padding_spans,
)

S, B, HEADS, HEAD_DIM, EOD = 12, 3, 2, 8, 7
CPU = torch.device("cpu")


def by_sequence(
    q: Tensor, k: Tensor, v: Tensor, begins: Tensor, _: Tensor, longest: int, __: int, **options: Any
) -> Tensor:
    """The result of varlen_attn: [T, N, D] of each sequence alone."""
    edges = begins.tolist()
    assert begins.dtype == torch.int32
    assert longest == max(end - begin for begin, end in pairwise(edges))
    results = []
    for begin, end in pairwise(edges):
        parts = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
        y = F.scaled_dot_product_attention(*parts, is_causal=options["window_size"] == (-1, 0))
        results.append(y[0].transpose(0, 1))
    return torch.cat(results)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_attention_is_that_with_a_bias(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and input gradients of every token that counts; padding takes no part in either."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_sequence)
    lengths = [[12], [1, 4, 7], [3, 3, 3, 3]] if causal else [[12], [5], [1]]
    if causal:
        ends = torch.zeros(B, S, dtype=torch.bool)
        for sample, each in enumerate(lengths):
            ends[sample, torch.tensor(each).cumsum(0) - 1] = True
        bias = document_bias(ends, torch.float64)
    else:
        spans = padding_spans(torch.tensor([12, 5, 1]), S, torch.float64, CPU)
        bias = spans.bias
    generator = torch.Generator().manual_seed(0)
    x, dy = (
        torch.randn(S, B, n * HEADS * HEAD_DIM, dtype=torch.float64, generator=generator) for n in (3, 1)
    )
    counts = torch.arange(S)[:, None] < torch.tensor([sum(each) for each in lengths])  # [S, B]
    dy[~counts] = 0  # no loss reads padding
    results = []
    for packs in (False, True):
        qkv = x.clone().requires_grad_()
        y = (
            packed_attention(qkv, HEAD_DIM, build_packing(lengths, CPU), causal)
            if packs
            else fused_attention(qkv, HEAD_DIM, 0.0, bias, causal=False)
        )
        y.backward(dy)
        assert qkv.grad is not None
        results.append((y.detach()[counts], qkv.grad))
    torch.testing.assert_close(*results)


def test_padding_and_documents_give_their_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a bias; lengths are those on the host."""
    monkeypatch.setattr(documents, "packs", lambda device: True)
    padded = padding_spans(torch.tensor([12, 5, 1]), S, torch.bfloat16, CPU)
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    tokens[0, [1, 2]] = EOD
    apart = Boundaries(EOD, reset_attention=True).documents(tokens, torch.bfloat16, tokens)
    for spans, begins in ((padded, [0, 12, 17, 18]), (apart.spans, [0, 2, 3, 6])):
        assert spans.bias is None
        assert spans.packing.begins.tolist() == begins


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_takes_what_it_is_given(causal: bool) -> None:
    """PyTorch's own signature, dtypes and shapes, forward and backward, on the meta device."""
    qkv = torch.empty(S, B, 3 * HEADS * HEAD_DIM, device="meta", dtype=torch.bfloat16, requires_grad=True)
    rows = torch.empty(18, device="meta", dtype=torch.int64)
    begins = torch.empty(4, device="meta", dtype=torch.int32)
    y = packed_attention(qkv, HEAD_DIM, Packing(rows, begins, 12), causal)
    assert (y.shape, y.dtype) == ((S, B, HEADS * HEAD_DIM), torch.bfloat16)
    (dx,) = torch.autograd.grad(y, qkv, torch.empty_like(y))
    assert (dx.shape, dx.dtype) == (qkv.shape, torch.bfloat16)
