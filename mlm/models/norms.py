"""Layer norm and RMSNorm with float32 weights for activations of any dtype.

Shapes: x [..., H], weight and bias [H].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.parallel.compute_state import ComputesInHalf

HALF = (torch.bfloat16, torch.float16)


class LayerNorm(ComputesInHalf, nn.LayerNorm):
    """Layer norm, replicated over tp; if `zero_centered` the factor is 1 + weight."""

    def __init__(self, size: int, *, eps: float, bias: bool = True, zero_centered: bool = False) -> None:
        super().__init__(size, eps=eps, bias=bias)
        self.zero_centered, self.initial_value = zero_centered, 0.0 if zero_centered else 1.0
        nn.init.constant_(self.weight, self.initial_value)

    def cached_half_params(self, dtype: torch.dtype) -> dict[str, bool]:
        """Weight and bias, except on a CPU, which reads them in float32; 1 + weight would be rounded."""
        if self.weight.is_cpu and dtype in HALF:
            return {}
        names = {"weight": not self.zero_centered, "bias": self.bias is not None}
        return {name: True for name, is_cached in names.items() if is_cached}

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.zero_centered:
            weight = 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        if x.is_cpu and x.dtype in HALF and not torch.compiler.is_compiling():
            y: Tensor = _Float32Sums.apply(x, weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
            return y
        weight = weight.to(x.dtype) if self.zero_centered else self.in_dtype("weight", x.dtype)
        bias = None if self.bias is None else self.in_dtype("bias", x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class _Float32Sums(torch.autograd.Function):
    """Layer norm on a CPU, whose kernel sums the gradients of weight and bias in the activations' dtype.

    In bfloat16 that sum stops growing: over 8,192 rows it was 10 to 24 % off. Backward uses the float32
    kernel: with both casts it takes 0.7 of the time of separate sums.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        bias32 = None if bias is None else bias.float()
        y, mean, scale = torch.native_layer_norm(x, x.shape[-1:], weight.float(), bias32, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            *(dy.float(), x.float(), x.shape[-1:], mean, scale, weight.float()),
            *(None if bias is None else bias.float(), needs),
        )
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        gradients = zip((dx, dw, db), dtypes, needs, strict=True)
        return *(g.to(dtype) if needed else None for g, dtype, needed in gradients), None


class RMSNorm(ComputesInHalf, nn.RMSNorm):
    """RMSNorm (arXiv:1910.07467): y = x / sqrt(mean(x^2) + eps) * weight.

    Replicated over tp. If `zero_centered` the factor is 1 + weight, so that weight decay pulls it to 1.
    """

    def __init__(self, size: int, *, eps: float, zero_centered: bool = False) -> None:
        super().__init__(size, eps=eps)
        self.zero_centered, self.initial_value = zero_centered, 0.0 if zero_centered else 1.0
        nn.init.constant_(self.weight, self.initial_value)

    def cached_half_params(self, dtype: torch.dtype) -> dict[str, bool]:
        """The weight, on a GPU; a CPU reads it in float32, and 1 + weight would be rounded."""
        return {"weight": True} if self.weight.is_cuda and not self.zero_centered else {}

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        if self.zero_centered:
            weight = 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
            if torch.compiler.is_compiling():
                wide = x.to(torch.promote_types(x.dtype, torch.float32))
                return F.rms_norm(wide, self.normalized_shape, weight.to(wide.dtype), self.eps).to(x.dtype)
        elif x.is_cuda or torch.compiler.is_compiling():
            return F.rms_norm(x, self.normalized_shape, self.in_dtype("weight", x.dtype), self.eps)
        else:
            weight = self.weight
        y: Tensor = _RMSNorm.apply(x, weight, self.eps)  # type: ignore[no-untyped-call]
        return y


class _RMSNorm(torch.autograd.Function):
    """RMSNorm without PyTorch's one-pass kernel; saves x and a number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x if x.dtype == torch.float64 else x.float()
        squares = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        y: Tensor = (x32 * scale).mul_(weight.to(x32.dtype)).to(x.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        if x.dtype == weight.dtype == scale.dtype:
            # layer norm's with a mean of 0; it subtracts the mean of the gradient, which is added again
            dy, zero, outputs = dy.contiguous(), torch.zeros_like(scale), [True, needs_weight, False]
            dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
                dy, x.contiguous(), x.shape[-1:], zero, scale, weight, None, outputs
            )
            mean = torch.mv(dy.flatten(0, -2), weight).view_as(scale).mul_(scale).div_(x.shape[-1])
            return dx.add_(mean), dw, None
        unit_x = x.to(scale.dtype) * scale
        dy = dy.to(scale.dtype)
        dw = (dy * unit_x).flatten(0, -2).sum(0).to(weight.dtype) if needs_weight else None
        g = dy * weight.to(scale.dtype)
        mean = torch.linalg.vecdot(g, unit_x).unsqueeze(-1) / x.shape[-1]
        return g.addcmul_(unit_x, mean, value=-1).mul_(scale).to(x.dtype), dw, None
