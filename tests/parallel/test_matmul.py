"""Linear products and their gradients: against PyTorch's own, and in 8-bit floats against exact ones."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.parallel import fp8, matmul
from mlm.parallel.compute_state import ComputeState, DeferredWeightGrads
from mlm.parallel.fp8 import NARROW, WIDE, quantize
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm.parallel.linear import linear
from mlm.parallel.mesh import ParallelContext
from tests.ranks import on_ranks


@pytest.mark.parametrize(("onednn", "dtype"), [(False, torch.float64), (True, torch.float32)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("features", "outputs"), [(16, 8), (8, 64)])  # both ways of the weight's gradient
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


R, IN, OUT = 32, 64, 48


def operand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def value(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand's value after quantisation."""
    narrow, scale = quantize(x, dtype)
    return narrow.double() * scale.double()


@pytest.mark.parametrize(("dtype", "bits"), [(NARROW, 3), (WIDE, 2)])
def test_an_operand_is_rounded_to_its_mantissa(dtype: torch.dtype, bits: int) -> None:
    """Half a unit of the last place, for normal numbers; the largest magnitude exactly."""
    x = operand(1000).double()
    found = value(x, dtype)
    normal = x.abs() > x.abs().max() * 2.0**-6
    assert ((found - x).abs() <= x.abs() * 2.0 ** -(bits + 1) * 1.001)[normal].all()
    assert found.abs().max() == pytest.approx(float(x.abs().max()), rel=1e-6)


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_an_operand_in_bfloat16_is_rounded_once(dtype: torch.dtype) -> None:
    """Each code is that of the exact quotient; through bfloat16 2 % are its neighbours."""
    x = operand(4096)
    found, scale = quantize(x, dtype)
    assert torch.equal(found.float(), (x.double() / scale.double()).to(dtype).float())


def test_the_three_products_are_those_of_the_quantised_operands() -> None:
    x, weight, dy, bias = operand(R, IN), operand(OUT, IN, seed=1), operand(R, OUT, seed=2), operand(OUT)
    found = (
        fp8.product(x, weight, bias),
        fp8.input_gradient(dy, weight),
        fp8.weight_gradient(dy, x, torch.float32),
    )
    exact = (
        value(x, NARROW) @ value(weight, NARROW).t() + bias,
        value(dy, WIDE) @ value(weight, NARROW),
        value(dy, WIDE).t() @ value(x, NARROW),
    )
    for ours, wanted, bits in zip(found, exact, (8, 8, 20), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=2.0**-bits, atol=2.0**-bits * 30)
    assert found[2].dtype == torch.float32


def test_zeros_stay_zeros_and_infinities_are_seen() -> None:
    zeros, ones = torch.zeros(16, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)
    assert not fp8.product(zeros, ones).any()
    ones[0, 0] = torch.inf
    assert not fp8.product(ones, ones).isfinite().all()


@on_ranks(tp=2)
def test_split_layers_read_the_weight_that_was_cast_for_the_step(ctx: ParallelContext) -> None:
    """Bits of layers that cast it for each product; it is cast no more."""
    for make in (ColumnParallelLinear, RowParallelLinear):
        layer, results = make(64, 96, tp=ctx.tp, sequence_parallel=True), []
        layer.compute.fp8, layer.compute.overlap_chunks = True, 2
        shape = tuple(layer.weight.shape)
        torch.manual_seed(ctx.rank)
        rows = 64 if make is RowParallelLinear else 32
        x = torch.randn(rows, 2, shape[1], dtype=torch.bfloat16, requires_grad=True)
        for is_cast in (False, True):
            half = layer.weight.detach().bfloat16()
            layer.compute.weight_8 = fp8.cast(half, NARROW) if is_cast else None
            with mock.patch.object(fp8, "quantize", wraps=fp8.quantize) as quantize_:
                y = layer(x)
                torch.manual_seed(9)
                found = torch.autograd.grad(y, (x, layer.weight), torch.randn_like(y))
            shapes = {tuple(call.args[0].shape) for call in quantize_.call_args_list}
            assert shapes.isdisjoint({shape, shape[::-1]}) == is_cast, shapes
            results.append((y.detach(), *found))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("is_cached", "defers"), [(False, True), (True, False)])
def test_a_linear_layer_casts_each_operand_once(
    monkeypatch: pytest.MonkeyPatch, is_cached: bool, defers: bool
) -> None:
    """Bits of the three products that cast for themselves; x is kept in 8 bits, a weight cast for a step."""
    x, weight, dy = operand(R, 2, IN), operand(OUT, IN, seed=1).float(), operand(R, 2, OUT, seed=2)
    bias = operand(OUT).float()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    compute = ComputeState(fp8=True, deferred=DeferredWeightGrads(open=True) if defers else None)
    half = weight.detach().bfloat16()
    compute.weight_8 = fp8.cast(half, NARROW) if is_cached else None
    shapes, kept = list[tuple[int, ...]](), list[Tensor]()
    original = fp8.quantize
    monkeypatch.setattr(fp8, "quantize", lambda t, d: (shapes.append(tuple(t.shape)), original(t, d))[1])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = linear(x, weight, bias, compute)
    y.backward(dy)
    for job in compute.deferred.take() if compute.deferred else ():
        job()
    casts = [(2 * R, IN), (2 * R, OUT)]
    assert sorted(shapes) == sorted(casts if is_cached else [*casts, (OUT, IN), (OUT, IN)])
    assert not any(t.dtype == torch.bfloat16 for t in kept)
    rows, dy_rows = x.detach().flatten(0, 1), dy.flatten(0, 1)
    assert torch.equal(y.flatten(0, 1), fp8.product(rows, half, bias.detach().bfloat16()))
    found = [leaf.grad for leaf in leaves]
    expected = [
        fp8.input_gradient(dy_rows, half).view(x.shape),
        fp8.weight_gradient(dy_rows, rows, torch.float32),
        matmul.bias_gradient(dy_rows, torch.float32),
    ]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_an_8_bit_layer_is_one_graph_for_the_compiler() -> None:
    """Bits of the layer as it is, with the weights of this step and of the next."""
    x, weight = operand(R, 2, IN).requires_grad_(), operand(OUT, IN, seed=1).float().requires_grad_()
    dy, compute = operand(R, 2, OUT, seed=2), ComputeState(fp8=True)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, compute=compute)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for scale in (1, 2):
        compute.weight_8 = fp8.cast(scale * weight.detach().bfloat16(), NARROW)
        ours, theirs = (
            (y := f(x, weight), *torch.autograd.grad(y, (x, weight), dy)) for f in (run, compiled)
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("outputs", [OUT, 24])
def test_8_bit_layers_are_those_of_torchao(outputs: int) -> None:
    """Scales of whole tensors taken from them, E4M3 forward and E5M2 gradients; 24 outputs stay bfloat16."""
    float8 = pytest.importorskip("torchao.float8")
    from torchao.float8.config import CastConfig
    from torchao.float8.float8_linear import Float8Linear

    wide = CastConfig(target_dtype=WIDE)
    settings = float8.Float8LinearConfig(emulate=True, cast_config_grad_output=wide)
    layer = torch.nn.Linear(IN, outputs, bias=False, dtype=torch.bfloat16)
    theirs = Float8Linear.from_float(layer, settings) if outputs == OUT else layer
    dy = operand(R, outputs, seed=2)
    results = []
    for run in (theirs, lambda x: linear(x, layer.weight, compute=ComputeState(fp8=True))):
        x = operand(R, IN).requires_grad_()
        layer.weight.grad = None
        y = run(x)
        y.backward(dy)
        grad = theirs.weight.grad if run is theirs else layer.weight.grad
        results.append([y.detach().clone(), x.grad, grad.clone()])
        theirs.weight.grad = None
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7 * float(a.abs().max()) * 0.5)
