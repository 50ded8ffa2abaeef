"""Products of experts against `F.linear` of each, whichever library computes them."""

import pytest
import torch
import torch.nn.functional as F

from mlm.parallel import matmul
from mlm.parallel.expert.experts import grouped_linear

COUNTS = (5, 0, 9, 2)
"""Rows of each expert; one has none."""


@pytest.mark.parametrize(
    "onednn_from", [None, 1, 2 * 5 * 12 * 8]
)  # no product, all, those of 5 rows and more
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_grouped_linear_is_the_linear_of_each_expert(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, onednn_from: int | None
) -> None:
    """y, dx and dW of float32 master weights; without rows the gradient is 0."""
    if onednn_from is not None and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: onednn_from is not None)
    monkeypatch.setattr(matmul, "NEW_SHAPE_FLOPS", onednn_from or 0)
    torch.manual_seed(0)
    x = torch.randn(sum(COUNTS), 8, dtype=dtype, requires_grad=True)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    weight = torch.randn(len(COUNTS), 12, 8, dtype=wide, requires_grad=True)
    dy = torch.randn(sum(COUNTS), 12, dtype=dtype)
    y = grouped_linear(x, weight, COUNTS)
    parts = zip(x.split(COUNTS), weight.to(dtype), strict=True)
    expected = torch.cat([F.linear(rows, each) for rows, each in parts])
    torch.testing.assert_close(y, expected)
    ours, theirs = (torch.autograd.grad(out, (x, weight), dy) for out in (y, expected))
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want)
    assert not ours[1][1].any()
