"""Linear products and their gradients against PyTorch's own, whichever library computes them."""

import pytest
import torch
import torch.nn.functional as F

from mlm.parallel import matmul
from mlm.parallel.linear import linear


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("features", "outputs"), [(16, 8), (8, 64)]
)  # both ways round of the weight's gradient
def test_linear_matches_torch(  # type: ignore[no-untyped-def]
    monkeypatch, onednn: bool, dtype: torch.dtype, bias: bool, features: int, outputs: int
) -> None:
    """y, dx, dW and db; float32 products of up to 64 terms differ by rounding only."""
    if onednn and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: onednn)
    torch.manual_seed(0)
    x = torch.randn(30, 2, features, dtype=dtype, requires_grad=True)
    w = torch.randn(outputs, features, dtype=dtype, requires_grad=True)
    b = torch.randn(outputs, dtype=dtype, requires_grad=True) if bias else None
    dy = torch.randn(30, 2, outputs, dtype=dtype)
    inputs = (x, w) if b is None else (x, w, b)
    ours = torch.autograd.grad(y := linear(x, w, b), inputs, dy)
    theirs = torch.autograd.grad(expected := F.linear(x, w, b), inputs, dy)
    for got, want in zip((y, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_bias_of_a_bfloat16_product_is_added_before_it_is_rounded() -> None:
    torch.manual_seed(0)
    x, w, b = (torch.randn(*shape).bfloat16() for shape in ((30, 2, 64), (48, 64), (48,)))
    exact = F.linear(x.double(), w.double(), b.double())
    torch.testing.assert_close(matmul.product(x, w, b).double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("lies_whole", [True, False])
def test_linear_keeps_its_input_and_no_copy_of_it(lies_whole: bool) -> None:
    x, weight = torch.randn(4, 3, 8), torch.randn(5, 8, requires_grad=True)
    x = x if lies_whole else x.transpose(0, 1)
    kept: list[int] = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved.untyped_storage().data_ptr())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        linear(x, weight)
    assert set(kept) <= {each.untyped_storage().data_ptr() for each in (x, weight)}
