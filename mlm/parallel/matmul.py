"""Matrix products of linear layers, without autograd: x W^T + b and its two gradients.

On an x86 CPU, PyTorch sends float32 products to MKL, which keeps its AVX-512 kernels for Intel processors.
oneDNN, which PyTorch also ships, chooses by feature flags: on an AMD Zen 5 core 202 against 91 GFLOP/s for
4096 × 384 × 1536, and 1.8 times the speed of a full step (scripts/results); on a Zen 4 core, whose vector
units are half as wide, 94 against 83. AMD processors therefore use oneDNN.

Shapes: x [..., I], weight [O, I], y [..., O].
"""

import math
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.parallel.collectives import to_device

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_CPUINFO = Path("/proc/cpuinfo")
_CPU = _CPUINFO.read_text(errors="replace") if _CPUINFO.exists() else ""
_PREFER_ONEDNN = (
    _HAS_ONEDNN and torch.backends.mkl.is_available() and "AuthenticAMD" in _CPU and "avx512f" in _CPU
)
"""On AMD oneDNN uses AVX-512 and MKL does not; without AVX-512 (Zen 3) MKL is faster, by 14 % at 1024 x 64 x
256 and 4 % at 2048 x 384 x 1536. Decided by processor flags, not by measurements, so that all ranks and
restarts agree; read once, as torch.compile traces the function below."""
_FUSES_BIAS = _HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""True if oneDNN multiplies bfloat16 on this CPU: its operator for linear layers then fuses the bias, which
F.linear first writes to the output, up to 15 % of its time on a Zen 4."""


def onednn_is_faster() -> bool:
    """True if float32 products on this CPU go to oneDNN."""
    return _PREFER_ONEDNN


def uses_onednn(x: Tensor, y: Tensor) -> bool:
    return x.is_cpu and y.is_cpu and x.dtype == y.dtype == torch.float32 and onednn_is_faster()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight^T + bias without autograd: [..., I], [O, I] -> [..., O]. Operands share one dtype."""
    if not uses_onednn(x, weight):
        fuses_bias = bias is not None and _FUSES_BIAS and x.is_cpu and x.dtype == torch.bfloat16
        if not fuses_bias or torch.compiler.is_compiling():
            return F.linear(x, weight, bias)
    elif torch.compiler.is_compiling():
        return _opaque_onednn_product(x, weight, bias)  # type: ignore[no-any-return]
    return _onednn_product(x, weight, bias)


def _onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # naming the overload saves the time of a small product
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


# Inductor lowers oneDNN's operator for constant weights only; a custom operator hides it.
_opaque_onednn_product = torch.library.custom_op("mlm::onednn_product", _onednn_product, mutates_args=())


@_opaque_onednn_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_WIDE_SUMS: dict[str, bool] = {}
"""By device type: True if half-precision products can be written in float32."""
_WIDE_ADDS: dict[str, bool] = {}
"""By device type: True if such a product can be added to a float32 matrix in place."""
_KERNELS: dict[str, ModuleType] = {}
"""By device type: `triton_kernels`, if Triton compiles for it."""


def kernels_for(x: Tensor) -> ModuleType | None:
    """Triton kernels for tensors on the device of `x`; None for float64 or without Triton."""
    return None if x.dtype == torch.float64 else _KERNELS.get(x.device.type)


def prepare_products(device: torch.device) -> None:
    """Detect how products can be computed on a device; call before any compilation.

    The meta device stands for a GPU.
    """
    kind = device.type
    if kind in _WIDE_SUMS or kind not in ("cuda", "meta"):
        return
    a = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(a, a, out_dtype=torch.float32)
        _WIDE_SUMS[kind] = True
    except RuntimeError:  # a build without it
        _WIDE_SUMS[kind] = False
    _WIDE_ADDS[kind] = kind == "cuda" and _adds_in_float32(a)
    if kind == "cuda":
        from torch.utils._triton import has_triton  # loads the compiler

        if has_triton():
            _KERNELS[kind] = import_module("mlm.parallel.triton_kernels")


def _adds_in_float32(a: Tensor) -> bool:
    """True if a product of [16, 16] ones can be added to a float32 matrix without rounding."""
    total = torch.full(a.shape, 2.0**-10, device=a.device)  # below the last bit of 16 in bfloat16
    try:
        _add_wide(total, a, a)
    except RuntimeError:  # a build that takes a matrix of half precision only
        return False
    return bool((total == 16 + 2.0**-10).all())


def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """dy^T @ x in `dtype`, without autograd: [rows, O], [rows, I] -> [O, I], contiguous.

    If the device can, half-precision products are written in the float32 of their sums: not rounded, and
    without a cast.

    oneDNN's operator copies a strided first operand, as both are here. That pays if dy is the narrower one;
    else MKL took 0.73 to 1.10 of the time of the better order of the two on a Zen 4, at 512 to 4,096 rows, 64
    to 768 inputs and 64 to 50,304 outputs.
    """
    if uses_onednn(dy, x) and x.shape[1] <= dy.shape[1]:
        return torch.mm(dy.t(), x).to(dtype)
    if dtype == torch.float32 and dy.dtype != dtype and _WIDE_SUMS.get(dy.device.type, False):
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return product(dy.t(), x.t()).to(dtype)


ROWS_OF_SUM = 64
"""bfloat16 rows that a CPU adds before a cast: summing casts takes three times as long."""


def bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of the rows of dy in `dtype`: [rows, O] -> [O].

    A CPU's kernel adds a few bfloat16 rows in float32 and rounds their sum, as for an element of the weight's
    gradient; these sums are then added in `dtype`.
    """
    if dy.is_cpu and dy.dtype == torch.bfloat16 and dy.shape[0] and dy.shape[0] % ROWS_OF_SUM == 0:
        dy = dy.unflatten(0, (-1, ROWS_OF_SUM)).sum(1)
    return dy.sum(0, dtype=dtype)


NEW_SHAPE_FLOPS = 1 << 30
"""FLOPs from which products of varying size use oneDNN, which compiles a kernel for each shape (0.5 to 2 ms
on a Zen 4) and has no out argument; MKL has neither limitation."""


def _rows_for_onednn(x: Tensor, weight: Tensor, size: int) -> float:
    """Return the rows from which a product uses oneDNN; `size` is the multiplications of one row."""
    return NEW_SHAPE_FLOPS / (2 * size) if uses_onednn(x, weight) else math.inf


class GroupedRows:
    """Consecutive groups of rows, one for each expert, by their `counts` or their `ends`, [e] int32.

    Rows sorted on a GPU have ends there, and reading their counts makes the host wait.
    """

    def __init__(self, counts: Sequence[int] | None = None, ends: Tensor | None = None) -> None:
        assert counts is not None or ends is not None
        if counts is not None:
            self.counts = tuple(counts)
        self._ends = ends
        self.sources: Sequence[Sequence[int]] | None = None
        """Rows from each rank for each expert; None for one rank."""

    @cached_property
    def counts(self) -> tuple[int, ...]:
        assert self._ends is not None
        ends = self._ends.tolist()
        return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))

    def ends(self, device: torch.device) -> Tensor:
        """[e] int32 on a device: ends of the groups. Does not wait."""
        if self._ends is None:
            self._ends = to_device(torch.tensor(self.counts).cumsum(0, dtype=torch.int32), device)
        return self._ends


def _takes_one_call(x: Tensor, weight: Tensor, runs: GroupedRows, onednn_rows: float) -> bool:
    """True if PyTorch multiplies all groups in one call: bfloat16 on a GPU, and float32 on a CPU by MKL."""
    step = 16 // x.element_size()
    if weight.shape[1] % step or weight.shape[2] % step:
        return False
    if x.is_cuda:
        return x.dtype == torch.bfloat16
    return x.is_cpu and x.dtype == torch.float32 and x.is_contiguous() and 0 < max(runs.counts) < onednn_rows


def grouped_product(x: Tensor, weight: Tensor, runs: GroupedRows) -> Tensor:
    """Groups of rows times one transposed weight each: [R, I], [e, O, I] -> [R, O]."""
    onednn_rows = _rows_for_onednn(x, weight, weight[0].numel())
    if _takes_one_call(x, weight, runs, onednn_rows):
        return F.grouped_mm(x, weight.mT, offs=runs.ends(x.device))
    y, counts = x.new_empty(x.shape[0], weight.shape[1]), runs.counts
    for rows, expert_weight, out in zip(x.split(counts), weight.mT.unbind(), y.split(counts), strict=True):
        _write_product(rows, expert_weight, out, onednn_rows)
    return y


def grouped_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, runs: GroupedRows, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of `grouped_product`; the weight's in `dtype`, and 0 for groups without rows.

    Triton's kernel writes the weight's in the float32 of its sums, unlike PyTorch's. A group's two products
    follow each other, while its rows of dy are in the cache.
    """
    onednn_rows = _rows_for_onednn(dy, x, weight[0].numel())
    if _takes_one_call(dy, weight, runs, onednn_rows):
        ends, kernels = runs.ends(x.device), kernels_for(x)
        dx = F.grouped_mm(dy, weight, offs=ends)
        if kernels is not None and dtype == torch.float32 != x.dtype:
            return dx, kernels.weight_gradients(dy, x, ends)
        return dx, F.grouped_mm(dy.t(), x, offs=ends).to(dtype)
    counts = runs.counts
    dx, dw = torch.empty_like(x), torch.empty(weight.shape, dtype=dtype, device=x.device)
    parts = zip(*(x.split(counts) for x in (dy, x, dx)), weight.unbind(), dw.unbind(), strict=True)
    for dy_rows, rows, out, expert_weight, total in parts:
        _write_product(dy_rows, expert_weight, out, onednn_rows)
        if dtype != dy.dtype or rows.shape[0] >= onednn_rows:
            total.copy_(weight_gradient(dy_rows, rows, dtype))
        else:
            torch.mm(dy_rows.t(), rows, out=total)
    return dx, dw


def _write_product(rows: Tensor, weight: Tensor, out: Tensor, onednn_rows: float) -> None:
    """Write rows @ weight: [R, I], [I, O] into [R, O]."""
    count = rows.shape[0]
    if count >= onednn_rows:
        out.copy_(product(rows, weight.t()))
    elif count:
        torch.mm(rows, weight, out=out)


def _add_wide(total: Tensor, dy: Tensor, x: Tensor) -> None:
    torch.addmm(total, dy.t(), x, out_dtype=total.dtype, out=total)


def add_weight_gradient(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add dy^T @ x to `total`, without autograd: [rows, O], [rows, I] into [O, I].

    If the device can, the product itself adds: it moves 8 bytes an element, where a product and a pass that
    adds it move 16 and take another matrix.
    """
    if torch.compiler.is_compiling():
        _opaque_add(total, dy, x)
    else:
        _add(total, dy, x)


def _add(total: Tensor, dy: Tensor, x: Tensor) -> None:
    if dy.dtype == total.dtype and not uses_onednn(dy, x):
        total.addmm_(dy.t(), x)
    elif total.dtype == torch.float32 and _WIDE_ADDS.get(dy.device.type, False):
        _add_wide(total, dy, x)
    else:
        total.add_(weight_gradient(dy, x, total.dtype))


# A compiler would write a new sum and copy it back; a custom operator with `mutates_args` adds in place.
_opaque_add = torch.library.custom_op("mlm::add_weight_gradient", _add, mutates_args=("total",))
