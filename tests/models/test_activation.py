"""GELU in half precision against PyTorch's in float64."""

import pytest
import torch
import torch.nn.functional as F

from mlm.models import transformer
from mlm.models.transformer import activate


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)], ids=str)
def test_gelu_in_half_precision_is_rounded_once_and_its_gradient_twice(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, ulp: float
) -> None:
    """In parts of which the last is smaller; `ulp` is half of the distance of two numbers next to 1."""
    monkeypatch.setattr(transformer._TanhGELU, "block", 1000)
    x = torch.linspace(-12, 12, 4097).to(dtype).requires_grad_()
    dy = torch.randn(4097, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = activate(x, "gelu_tanh")
    y.backward(dy)
    exact = x.detach().double().requires_grad_()
    wanted = F.gelu(exact, approximate="tanh")
    wanted.backward(dy.double())
    assert x.grad is not None
    assert exact.grad is not None
    least = 1e-6  # of exp's float32, and of float16's smallest numbers
    torch.testing.assert_close(y.double(), wanted, rtol=ulp, atol=least)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2.1 * ulp, atol=least)
    with torch.no_grad():
        assert torch.equal(activate(x, "gelu_tanh"), y)
