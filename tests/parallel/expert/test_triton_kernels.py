"""Triton's kernels, by its interpreter, against PyTorch's operators and float64."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.models.llama.gated import gate
from mlm.parallel import fp8, matmul
from mlm.parallel.expert.dispatch import combine, permute, sort_by_expert, sort_on_device
from mlm.parallel.expert.experts import grouped_linear

E, TOKENS, K, H = 5, 23, 3, 40
DTYPES = {torch.float32: 2**-21, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The kernels as programs of NumPy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is defined, and again where it runs
        pytest.importorskip("triton")
        from mlm.parallel import triton_kernels

        yield triton_kernels


def choices(drops: bool) -> Tensor:
    """[TOKENS, K] different experts; some dropped, expert 2 without a row."""
    torch.manual_seed(3)
    experts = torch.tensor([0, 1, 3, 4])[torch.rand(TOKENS, 4).argsort(1)[:, :K]]
    return experts.masked_fill(torch.rand(TOKENS, K) < 0.3, E) if drops else experts


def results(dtype: torch.dtype, drops: bool) -> list[Tensor]:
    """Output and gradients of rows on their way to experts and back."""
    torch.manual_seed(4)
    x = torch.randn(TOKENS, H).to(dtype).requires_grad_()
    weights = torch.rand(TOKENS, K, requires_grad=True)
    scale = torch.rand(E, H).to(dtype)
    order = sort_by_expert(choices(drops), E, drops=drops)
    rows = permute(x, order)
    y = combine(rows * scale.repeat_interleave(torch.tensor(order.runs.counts), 0), weights, order)
    y.backward(torch.randn(TOKENS, H).to(dtype))
    return [y.detach(), x.grad, weights.grad]


@pytest.mark.parametrize(
    ("dtype", "drops"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, False)], ids=str
)
def test_rows_are_permuted_and_combined_as_by_pytorch(
    dtype: torch.dtype, drops: bool, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results(dtype, drops)
    monkeypatch.setattr(matmul, "_KERNELS", {"cpu": kernels})
    seen: list[str] = []
    for name in ("sum_rows", "combine_backward"):
        kernel = getattr(kernels, name)

        def noted(*args: Any, kernel: Any = kernel, name: str = name) -> Any:
            seen.append(name)
            return kernel(*args)

        monkeypatch.setattr(kernels, name, noted)
    found = results(dtype, drops)
    assert seen == ["sum_rows", "combine_backward", "sum_rows"]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2 * DTYPES[dtype], atol=8 * DTYPES[dtype])
    assert all(torch.equal(a, b) for a, b in zip(found, results(dtype, drops), strict=True))


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("sizes", [(E, TOKENS, K), (70, 700, 4), (3, 0, 2)])
@pytest.mark.parametrize("fuses", [False, True])
def test_a_gpu_sorts_choices_as_the_host_does(
    fuses: bool,
    sizes: tuple[int, int, int],
    drops: bool,
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of several blocks, and of none; by one of PyTorch's sorts, and by counts."""
    experts, tokens, k = sizes
    torch.manual_seed(3)
    labels = torch.randint(experts + drops, (tokens, k))
    order = sort_by_expert(labels, experts, drops=drops)
    if fuses:
        monkeypatch.setattr(matmul, "_KERNELS", {"cpu": kernels})
    found = sort_on_device(labels.flatten(), experts, k, drops=drops)
    assert found.runs.counts == order.runs.counts
    assert found.runs.ends(labels.device).dtype == torch.int32
    for name in ("sorted_slots", "slots", "tokens", "rows"):
        assert torch.equal(getattr(found, name), getattr(order, name)), name


@pytest.mark.parametrize(
    ("dtype", "clamp"), [(torch.float32, None), (torch.bfloat16, (0.7, 1.7)), (torch.float16, None)], ids=str
)
def test_a_gate_is_one_pass_each_way(
    clamp: tuple[float, float] | None,
    dtype: torch.dtype,
    kernels: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by PyTorch in float64, cut off once, as the interpreter rounds; a gate of NaN stays one."""
    torch.manual_seed(0)
    y, dy = torch.randn(3, 2, 4 * 1100).to(dtype), torch.randn(3, 2, 2 * 1100).to(dtype)
    y[0, 0, 0] = float("nan")

    def computed(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = y.to(dtype).requires_grad_()
        out = gate(x, "silu", 1100, clamp=clamp)
        return out.detach(), torch.autograd.grad(out, x, dy.to(dtype))[0]

    expected = computed(torch.float64)
    monkeypatch.setattr(matmul, "_KERNELS", {"cpu": kernels})
    for ours, theirs in zip(computed(dtype), expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=2 * DTYPES[dtype], atol=2**-20, equal_nan=True)


@pytest.mark.parametrize("counts", [(70, 0, 9, 131), (0, 0, 0, 0)])
@pytest.mark.parametrize("sizes", [(136, 40), (16, 264)])
def test_weight_gradients_of_experts_are_sums_in_float32(
    counts: tuple[int, ...], sizes: tuple[int, int], kernels: ModuleType
) -> None:
    """Runs longer than a tile's rows, outputs and inputs that fill no tile; an expert without rows has 0.

    Of float16: the interpreter multiplies no bfloat16.
    """
    torch.manual_seed(0)
    dy, x = (torch.randn(sum(counts), size).half() for size in sizes)
    found = kernels.weight_gradients(dy, x, matmul.GroupedRows(counts).ends(x.device))
    parts = zip(dy.double().split(counts), x.double().split(counts), strict=True)
    expected = torch.stack([a.t() @ b for a, b in parts])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)  # float16 would be off by 1e-2


def test_a_gpu_s_weight_gradients_are_not_rounded(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one call multiplies all runs; PyTorch's writes half precision only."""
    monkeypatch.setattr(matmul, "_takes_one_call", lambda *_: True)
    runs, wide = matmul.GroupedRows((20, 0, 12)), torch.randn(3, 32, 16, requires_grad=True)
    x, dy = (torch.randn(32, size).half() for size in (16, 32))
    grads = []
    for found in ({}, {"cpu": kernels}):
        monkeypatch.setattr(matmul, "_KERNELS", found)
        grads.append(torch.autograd.grad(grouped_linear(x, wide, runs), wide, dy)[0])
    rounded, full = grads
    assert torch.equal(full.half().float(), rounded)
    assert not torch.equal(full, rounded)


@pytest.mark.parametrize(
    ("dtype", "source"), [(fp8.NARROW, torch.bfloat16), (fp8.WIDE, torch.float32)], ids=str
)
def test_a_matrix_is_cast_to_8_bits_in_rows_and_columns(
    dtype: torch.dtype, source: torch.dtype, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and scale of PyTorch's two casts; of tiles that its last rows and columns fill in part.

    Of numbers that round down to a code: the interpreter carries no rounding into the exponent.
    """
    torch.manual_seed(0)
    codes = (torch.randn(80, 144) * torch.randn(80, 1).exp()).to(dtype).float()
    codes[3, 5] = torch.finfo(dtype).max
    x = codes * 2.0**-3 * torch.where(codes == codes[3, 5], 1.0, 1 + 2.0**-6)
    x = x.float() if source == torch.float32 else (codes * 2.0**-3).to(source)
    expected = fp8.cast(x, dtype)
    monkeypatch.setattr(matmul, "_KERNELS", {"cpu": kernels})
    found = fp8.cast(x, dtype)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.float(), theirs.float())
    assert torch.equal(found.rows.t().float(), found.columns.float())
