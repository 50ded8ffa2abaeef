"""Weights in MXFP4, as gpt-oss stores those of its experts, read by dequantising.

Blocks of 32 numbers in a row share a scale, a power of two (OCP Microscaling Formats 1.0, section 5.3): an
8-bit exponent, biased by 127. The numbers are of 4 bits, E2M1, two in a byte, the first in its lower half.

Shapes: R rows, G blocks of a row.
"""

import torch
from torch import Tensor

BLOCK, BYTES = 32, 16
"""Numbers of a block, and their bytes."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of E2M1's codes 0 to 7; 8 to 15 are negative."""


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return numbers of bytes [..., R, G, 16] and exponents [..., R, G], both uint8: float32 [..., R, 32 G].

    The exponent 255 is NaN's.
    """
    codes = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)])
    pairs = torch.stack([codes.repeat(16), codes.repeat_interleave(16)], -1)  # [256, 2]: lower half, upper
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).float()
    powers[255] = torch.nan
    numbers = pairs[blocks.long()].flatten(-2)  # [..., R, G, 32]
    return numbers.mul_(powers[scales.long()].unsqueeze(-1)).flatten(-2)
