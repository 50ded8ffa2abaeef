"""Muon: momentum of a matrix made orthogonal by Newton-Schulz iterations.

Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon); decay and scale as in arXiv:2502.16982,
section 2.2. The order of operations is torch.optim.Muon's, the format MuonConfig.dtype.

Each matrix is orthogonalised in full by one rank (matrices.py): its parts would give another result.
"""

import math

import torch
from torch import Tensor

from mlm.optim.auto_precision import has_fast_bfloat16, read_cpuinfo
from mlm.optim.config import MuonConfig

MOMENTUM = "momentum_buffer"
"""Name of the average of gradients, PyTorch's."""
STRIP = 128
"""Columns at a time of a symmetric product on a CPU: products of fewer are slower."""


def orthogonalise(x: Tensor, config: MuonConfig) -> Tensor:
    """Newton-Schulz: about U V^T of x = U S V^T, singular values 0.7 to 1.2. [..., rows, columns], x's dtype.

    Jordan's coefficients do not converge: their slope at 0 lifts small singular values fast.
    """
    a, b, c = config.ns_coefficients
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    norm = x.norm() if x.dim() == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=1e-7)  # as in torch.optim.Muon
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(config.ns_steps):
        gram = _plus_square(x, 0.0, 1.0)
        x = add_product(x, _plus_square(gram, b, c), x, beta=a)
    return x.mT.contiguous() if is_tall else x  # rows in order, for the addition to weights


def _plus_square(x: Tensor, b: float, c: float) -> Tensor:
    """Return b x + c x x^T of a symmetric x, or of a wide one with b = 0: [..., rows, rows].

    A CPU computes strips of columns below the diagonal and mirrors them: seven twelfths of the work at 768
    rows. The shapes of the strips decide rounding.
    """
    size = x.shape[-2]
    if x.dim() > 2:
        return torch.baddbmm(x[..., :size], x, x.mT, beta=b, alpha=c)
    if not x.is_cpu or size < 2 * STRIP:
        return torch.addmm(x[:, :size], x, x.t(), beta=b, alpha=c)
    out = x.new_empty(size, size)
    for first in range(0, size, STRIP):
        end = min(first + STRIP, size)
        strip, down = slice(first, end), slice(first, size)
        torch.addmm(x[down, strip], x[down], x[strip].t(), beta=b, alpha=c, out=out[down, strip])
        out[strip, end:] = out[end:, strip].t()
    return out


def shape_scale(shape: tuple[int, int], config: MuonConfig) -> float:
    rows, columns = shape
    if config.scale == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def iteration_dtype(config: MuonConfig, parameter: Tensor) -> torch.dtype:
    if parameter.dtype == torch.float64:
        return torch.float64
    if config.dtype != "auto":
        return torch.bfloat16 if config.dtype == "bf16" else torch.float32
    is_slow = parameter.is_cpu and not has_fast_bfloat16(read_cpuinfo())
    return torch.float32 if is_slow else torch.bfloat16
