"""Layer norm, RMSNorm and GELU against PyTorch's in float64, also in half precision."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.models import transformer
from mlm.models.backbone import LearnedTable
from mlm.models.norms import LayerNorm, RMSNorm
from mlm.models.transformer import activate
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis

ROWS, WIDTH = 8192, 24
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


ZeroCentered = partial(RMSNorm, zero_centered=True)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm, ZeroCentered])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_output_and_gradients_are_those_of_float64(
    dtype: torch.dtype, kind: Callable[..., LayerNorm | RMSNorm]
) -> None:
    """Sums over many rows too: PyTorch's kernel for CPUs leaves 24 % of a bias's gradient out in bfloat16."""
    torch.manual_seed(0)
    norm = kind(WIDTH, eps=1e-5)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(WIDTH), alpha=0.1)
    norm = norm.double() if dtype == torch.float64 else norm
    x, dy = torch.randn(ROWS // 8, 8, WIDTH).to(dtype), (torch.randn(ROWS // 8, 8, WIDTH) + 0.1).to(dtype)
    x.requires_grad_()
    y = norm(x)
    y.backward(dy)
    exact = [t.detach().double().requires_grad_() for t in (x, *norm.parameters())]
    weights = [1 + exact[1]] if kind is ZeroCentered else exact[1:]
    wanted = (F.layer_norm if kind is LayerNorm else F.rms_norm)(exact[0], (WIDTH,), *weights, eps=1e-5)
    wanted.backward(dy.double())
    assert y.dtype == dtype
    in_full = min(BOUNDS[dtype], 1e-5)  # a sum rounded to half precision is 4e-4 off in float16
    found = [(y, wanted, BOUNDS[dtype]), (x.grad, exact[0].grad, BOUNDS[dtype])]
    found += [(p.grad, e.grad, in_full) for p, e in zip(norm.parameters(), exact[1:], strict=True)]
    for got, expected, limit in found:
        assert (got.double() - expected).norm() <= limit * expected.norm()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: LayerNorm(WIDTH, eps=1e-5),
    "rms norm": lambda: RMSNorm(WIDTH, eps=1e-5),
    "zero-centered rms norm": lambda: RMSNorm(WIDTH, eps=1e-5, zero_centered=True),
    "token table": lambda: VocabParallelEmbedding(3, 3, WIDTH, tp=Axis("tp")),
    "table": lambda: LearnedTable(3, WIDTH, init_std=0.02),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_half_parameters_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    """Sums over 8,192 rows are those of float64 to the rounding of their last cast, half an ulp."""
    torch.manual_seed(0)
    module = MODULES[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(1 + torch.rand(parameter.shape))
    module.to(dtype)
    dy = (torch.randn(ROWS, WIDTH) + 0.5).to(dtype)
    is_table = "table" in name
    x = torch.randint(0, 3, (ROWS,)) if is_table else torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    y = module(x)
    y.backward(dy)
    exact = MODULES[name]().double()
    exact.load_state_dict({key: value.double() for key, value in module.state_dict().items()})
    wide = x if is_table else x.detach().double().requires_grad_()
    wanted = exact(wide)
    wanted.backward(dy.double())

    def differs(found: Tensor | None, expected: Tensor | None) -> float:
        assert found.dtype == dtype
        return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())

    half_an_ulp = torch.finfo(dtype).eps / 2
    assert differs(y, wanted) <= half_an_ulp
    if not is_table:
        assert differs(x.grad, wide.grad) <= half_an_ulp
    for mine, theirs in zip(module.parameters(), exact.parameters(), strict=True):
        assert differs(mine.grad, theirs.grad) <= half_an_ulp


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
    least = 1e-6  # of exp's float32, and of float16's smallest numbers
    torch.testing.assert_close(y.double(), wanted, rtol=ulp, atol=least)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2.1 * ulp, atol=least)
    with torch.no_grad():
        assert torch.equal(activate(x, "gelu_tanh"), y)
