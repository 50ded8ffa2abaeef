"""The experts of a layer: MLPs of one shape, each for its rows.

Shapes: R rows sorted by expert, e experts of this rank, H hidden, F width of an expert, t = tensor-parallel
size inside an expert.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.parallel.compute_state import ComputesInHalf, choose_copy
from mlm.parallel.layers import split
from mlm.parallel.matmul import GroupedRows, grouped_gradients, grouped_product, weight_gradient
from mlm.parallel.mesh import ExpertAxes


class _GroupedLinear(torch.autograd.Function):
    """y = x W_e^T, each row by the weight of its expert. Saves x and the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cast: Tensor | None, runs: GroupedRows) -> Tensor:
        saved = choose_copy(cast, weight, x.dtype).flatten(1, -2)
        ctx.save_for_backward(x, saved)
        ctx.runs, ctx.weight_shape, ctx.weight_dtype = runs, weight.shape, weight.dtype
        return grouped_product(x, saved.to(x.dtype), runs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            dx, dw = grouped_gradients(dy, x, weight.to(dy.dtype), ctx.runs, ctx.weight_dtype)
            return dx, dw.view(ctx.weight_shape), None, None
        return grouped_product(dy, weight.to(dy.dtype).mT, ctx.runs), None, None, None


class _AddBiases(torch.autograd.Function):
    """Add to each row, in place, the bias of its expert [e, …], in the columns from `first` on.

    By products with one-hot vectors of the rows' experts: no wait for counts, and sums without an order.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, runs: GroupedRows, first: int) -> Tensor:
        flat = bias.flatten(1).to(y.dtype)  # [e, O/t] of y [R, O]
        ctx.mark_dirty(y)
        ctx.runs, ctx.shape, ctx.dtype = runs, bias.shape, bias.dtype
        ctx.columns = slice(first, first + flat.shape[1])
        y[:, ctx.columns].addmm_(one_hot_experts(y, runs), flat)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[1]:
            return dy, None, None, None
        db = weight_gradient(one_hot_experts(dy, ctx.runs), dy[:, ctx.columns], ctx.dtype)
        return dy, db.view(ctx.shape), None, None


def one_hot_experts(rows: Tensor, runs: GroupedRows) -> Tensor:
    """1 in the column of each row's expert: [R, e]; 0 in rows after the last run."""
    ends = runs.ends(rows.device)
    numbers = torch.arange(len(rows), device=rows.device)[:, None]
    begins = F.pad(ends[:-1], (1, 0))
    return ((begins <= numbers) & (numbers < ends)).to(rows.dtype)


class Experts(ComputesInHalf):
    """e of the E experts of a layer, gated MLPs: y = W2 inner(W1 x + b1) + b2, with optional biases.

    Dim 0 of all parameters is split over ep; inside an expert W1 is split by column and W2 by row
    (arXiv:1909.08053, figure 3a), so that y is this rank's term of a sum over tp. Each rank adds its part of
    b2.

    Args:
        num_experts: E.
        hidden_size: H.
        ffn_size: F.
        inner: input of W2 for the output of W1, gates before the rest: [R, 2F/t] -> [R, F/t].
        axes: axes that split the experts (ep) and each expert (tp), and that hold copies.
        init_stds: standard deviations of the initial weights W1 and W2.
        bias: have biases.
    """

    tp_dims: ClassVar[dict[str, int]] = {"up": 2, "down": 2, "up_bias": 2, "down_bias": 1}

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        *,
        inner: Callable[[Tensor], Tensor],
        axes: ExpertAxes,
        init_stds: tuple[float, float],
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.inner, self.expert_axes = inner, axes
        self.lora: Any = None  # an ExpertAdapter (low_rank.py)
        self.add_gradients: dict[str, Callable[..., None]] = {}
        """Functions of a source's number and its weight gradient, by weight (exact_gradients.py)."""
        ep, tp = axes.ep, axes.tp
        self.init_stds = dict(zip(("up", "down"), init_stds, strict=True))
        if num_experts % ep.size:
            raise ValueError(f"num_experts={num_experts} must be divisible by ep={ep.size}")
        count, width = num_experts // ep.size, split(ffn_size, "expert_ffn_size", tp)
        self.up = nn.Parameter(torch.empty(count, 2, width, hidden_size))  # [e, 2, F/t, H]: gates, rest
        self.down = nn.Parameter(torch.empty(count, hidden_size, width))  # [e, H, F/t]
        self.up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if bias:
            part = split(hidden_size, "hidden_size", tp)
            self.up_bias = nn.Parameter(torch.zeros(count, 2, width))  # [e, 2, F/t]
            self.down_bias = nn.Parameter(torch.zeros(count, part))  # [e, H/t]

    def cached_half_params(self, dtype: torch.dtype) -> dict[str, bool]:
        """Both weights, whose gradients the products return."""
        return {"up": False, "down": False}

    def forward(self, x: Tensor, runs: GroupedRows) -> Tensor:
        """Apply each expert to its rows, sorted by expert: [R, H] -> [R, H]."""
        up = self._with_bias(grouped_linear(x, self.up, runs, cast=self.compute.up_copy), "up", runs)
        inner = self.inner(up if self.lora is None else up + self.lora.term(x, runs, "up"))
        down = grouped_linear(inner, self.down, runs, cast=self.compute.down_copy)
        y = self._with_bias(down, "down", runs)
        return y if self.lora is None else y + self.lora.term(inner, runs, "down")

    def _with_bias(self, y: Tensor, weight: str, runs: GroupedRows) -> Tensor:
        """Add the bias of `weight` to its product [R, O], in place, if there is one."""
        bias: Tensor | None = getattr(self, f"{weight}_bias")
        if bias is None:
            return y
        first = self.expert_axes.tp.rank * bias.shape[-1] if weight == "down" else 0
        added: Tensor = _AddBiases.apply(y, bias, runs, first)  # type: ignore[no-untyped-call]
        return added


def grouped_linear(x: Tensor, weight: Tensor, runs: GroupedRows, *, cast: Tensor | None = None) -> Tensor:
    """Each row times the weight of its expert: [R, I], [e, …, O, I] -> [R, … O].

    `cast` is the weight in the dtype of compute.
    """
    y: Tensor = _GroupedLinear.apply(x, weight, cast, runs)  # type: ignore[no-untyped-call]
    return y
