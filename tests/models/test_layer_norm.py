"""Layer norm against PyTorch's in float64."""

import pytest
import torch
import torch.nn.functional as F

from mlm.models.norms import LayerNorm

ROWS, WIDTH = 8192, 32


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 5e-3)], ids=str
)
def test_output_and_gradients_are_those_of_float64(dtype: torch.dtype, bound: float) -> None:
    """Sums over many rows too: PyTorch's kernel for CPUs leaves 24 % of a bias's gradient out in bfloat16."""
    norm = LayerNorm(WIDTH, eps=1e-5)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(WIDTH), alpha=0.1)
    x, dy = torch.randn(ROWS // 8, 8, WIDTH).to(dtype), (torch.randn(ROWS // 8, 8, WIDTH) + 0.1).to(dtype)
    x.requires_grad_()
    y = norm(x)
    y.backward(dy)
    exact = [t.detach().double().requires_grad_() for t in (x, norm.weight, norm.bias)]
    wanted = F.layer_norm(exact[0], (WIDTH,), exact[1], exact[2], 1e-5)
    wanted.backward(dy.double())
    assert y.dtype == dtype
    in_full = 1e-5  # a sum rounded to half precision is 4e-4 off in float16
    for found, expected, limit in (
        (y, wanted, bound),
        (x.grad, exact[0].grad, bound),
        (norm.weight.grad, exact[1].grad, in_full),
        (norm.bias.grad, exact[2].grad, in_full),
    ):
        assert found is not None
        assert expected is not None
        assert (found.double() - expected).norm() <= limit * expected.norm()
