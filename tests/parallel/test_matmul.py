"""Linear products and their gradients against PyTorch's own, whichever library computes them."""

import pytest
import torch
import torch.nn.functional as F

from mlm.parallel import matmul


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_matches_torch(monkeypatch, onednn: bool, dtype: torch.dtype, bias: bool) -> None:  # type: ignore[no-untyped-def]
    """y, dx, dW and db; float32 products of 16 terms differ by rounding only."""
    if onednn and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: onednn)
    torch.manual_seed(0)
    x = torch.randn(3, 2, 16, dtype=dtype, requires_grad=True)
    w = torch.randn(8, 16, dtype=dtype, requires_grad=True)
    b = torch.randn(8, dtype=dtype, requires_grad=True) if bias else None
    dy = torch.randn(3, 2, 8, dtype=dtype)
    inputs = (x, w) if b is None else (x, w, b)
    ours = torch.autograd.grad(y := matmul.linear(x, w, b), inputs, dy)
    theirs = torch.autograd.grad(expected := F.linear(x, w, b), inputs, dy)
    for got, want in zip((y, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
