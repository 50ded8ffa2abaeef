"""Time of single kernels: products of a layer, casts to 8 bits, rows and gradients of experts."""

from collections.abc import Callable
from functools import partial

import torch
from bench.machine import timed
from torch import Tensor

from gpu.child import Case
from gpu.facts import repeated
from mlm.parallel import fp8, matmul
from mlm.parallel.expert.dispatch import combine, permute, sort_by_expert

SHAPES = {"124m": (8192, 3072, 768), "1.2b": (8192, 6144, 1536), "2.5b": (8192, 7680, 1920)}
"""Rows, outputs and inputs of the first product of an MLP."""
EXPERTS = (8192, 128, 8, 2048, 768)
"""Tokens, experts, choices a token, hidden size and width of an expert, as of Qwen3 30B-A3B."""
SMALL, SMALL_EXPERTS = (64, 48, 32), (64, 8, 2, 32, 16)
SECONDS = 0.15


def run(case: Case) -> None:
    """A row for each; without Triton its kernels have none."""
    device = torch.device(case.device)
    matmul.prepare_products(device)
    with torch.no_grad():
        for name, shape in (("small", SMALL),) if case.quick else SHAPES.items():
            products(case, name, *shape)
        experts(case, *(SMALL_EXPERTS if case.quick else EXPERTS))


def measure(
    case: Case, table: str, name: str, form: str, call: Callable[[], object], flops: float = 0
) -> None:
    """The best time of a call; a problem if this PyTorch or device lacks it."""
    device = torch.device(case.device)
    try:
        timed(call, device, 3)
        best = min(repeated(call, device, 0.005 if case.quick else SECONDS))
    except RuntimeError as error:
        case.note(f"{name} {form}: {str(error).splitlines()[0][:160]}")
        return
    rate = {"TFLOP/s": flops / best / 1e12} if flops else {}
    case.row(table, of=name, form=form, ms=1e3 * best, **rate)


def products(case: Case, name: str, rows: int, outputs: int, inputs: int) -> None:
    device, half = case.device, torch.bfloat16
    x, dy = (torch.randn(rows, n, device=device).to(half) for n in (inputs, outputs))
    weight, bias = (
        torch.randn(outputs, inputs, device=device).to(half),
        torch.randn(outputs, device=device).to(half),
    )
    turned, total = weight.t().contiguous(), torch.zeros(outputs, inputs, device=device)
    row = partial(measure, case, "products of a layer", name, flops=2 * rows * outputs * inputs)
    row("x W^T", lambda: torch.mm(x, weight.t()))
    row("x W", lambda: torch.mm(x, turned))
    row("x W^T + b", lambda: torch.addmm(bias, x, weight.t()))
    row("dy^T x in float32", lambda: matmul.weight_gradient(dy, x, torch.float32))
    row("dy^T x added in float32", lambda: matmul.add_weight_gradient(total, dy, x))
    x8, w8 = fp8.cast(x, fp8.NARROW), fp8.cast(weight, fp8.NARROW)
    for form, fast in (("8 bits", False), ("8 bits, fast sums", True)):
        row(form, partial(fp8.multiply, x8.rows, w8.rows, (x8.scale, w8.scale), half, fast=fast))
    cast = partial(measure, case, "casts to 8 bits", name)
    cast("rows and columns", lambda: fp8.cast(x, fp8.NARROW))
    cast("rows, PyTorch", lambda: fp8.quantize(x, fp8.NARROW))


def experts(case: Case, tokens: int, count: int, per_token: int, hidden: int, width: int) -> None:
    """Each with Triton's kernels and with PyTorch's operators."""
    device, half = case.device, torch.bfloat16
    chosen = torch.rand(tokens, count, device=device).topk(per_token).indices
    order = sort_by_expert(chosen, count, drops=False)
    x, y = (torch.randn(n, hidden, device=device).to(half) for n in (tokens, tokens * per_token))
    dy = torch.randn(tokens * per_token, width, device=device).to(half)
    weights = torch.rand(tokens, per_token, device=device)
    weight, saved = torch.randn(count, width, hidden, device=device).to(half), dict(matmul._KERNELS)

    def there_and_back() -> Tensor:
        with torch.enable_grad():
            leaves = [leaf.detach().requires_grad_() for leaf in (x, y, weights)]
            out = combine(leaves[1] + permute(leaves[0], order), leaves[2], order)
        out.backward(x)
        return out

    flops = 4 * tokens * per_token * hidden * width
    for form, found in (("Triton", saved), ("PyTorch", {})):
        if form == "Triton" and not saved:
            continue
        matmul._KERNELS.clear()
        matmul._KERNELS.update(found)
        row = partial(measure, case, "experts")
        row(
            "gradients of a product",
            form,
            lambda: matmul.grouped_gradients(dy, y, weight, order.runs, torch.float32),
            flops,
        )
        row("rows there and back", form, there_and_back)
    matmul._KERNELS.update(saved)
    measure(case, "experts", "order of rows", "sort", lambda: sort_by_expert(chosen, count, drops=False))
