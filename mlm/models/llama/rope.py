"""Rotary frequencies, plain and scaled for contexts longer than pretraining's.

Dimensions i < R/2 of a head rotate by theta^(-2i/R) radians a token (arXiv:2104.09864, equation 15). Scaling
by s lets positions s times as far apart look like pretraining's:

    linear  all frequencies / s (arXiv:2306.15595)
    llama3  long wavelengths only, with a ramp between (arXiv:2407.21783, section 3.4.2)
    yarn    by a dimension's rotations in the original context, with a ramp, and attention's temperature by a
            factor on queries and keys (arXiv:2309.00071, sections 3.2 and 3.4)
    longrope  by searched factors for short and for long texts (arXiv:2402.13753, section 3)

Computed in float32, as the models were trained, unless activations are float64.
"""

import math

import torch
from torch import Tensor

from mlm.models.llama.settings import LlamaSettings


def frequencies(
    settings: LlamaSettings, dtype: torch.dtype, device: torch.device, *, is_long: bool = False
) -> tuple[Tensor, float]:
    """Return the frequencies [R/2] in radians a token, and the factor of cosines and sines.

    `is_long`: the text is longer than the original context.
    """
    size, scale = settings.rotary_dim, settings.rope_factor
    plain = 1.0 / settings.rope_theta ** (torch.arange(0, size, 2, dtype=dtype, device=device) / size)
    match settings.rope_scaling:
        case "linear":
            return plain / scale, 1.0
        case "llama3":
            waves = settings.rope_original_positions * plain / (2 * math.pi)
            low, high = settings.rope_low_freq_factor, settings.rope_high_freq_factor
            unscaled = ((waves - low) / (high - low)).clamp(0, 1)
            return unscaled * plain + (1 - unscaled) * plain / scale, 1.0
        case "yarn":
            factor = settings.rope_attention_factor or 0.1 * math.log(scale) + 1.0
            scaled = _yarn_ramp(plain, settings)
            return (1 - scaled) * plain + scaled * plain / scale, factor
        case "longrope":
            listed = settings.rope_long_factors if is_long else settings.rope_short_factors
            factors = torch.tensor([float(n) for n in listed.split()], dtype=dtype, device=device)
            default = math.sqrt(1 + math.log(scale) / math.log(settings.rope_original_positions))
            return plain / factors, settings.rope_attention_factor or default
        case _:
            return plain, 1.0


def _yarn_ramp(plain: Tensor, settings: LlamaSettings) -> Tensor:
    """Share of each frequency that is scaled: none before the ramp, all after it."""

    def dimension(rotations: float) -> float:
        # the i that rotates so often in the original context S: theta^(2i/R) 2 pi rotations = S
        waves = settings.rope_original_positions / (2 * math.pi * rotations)
        return settings.rotary_dim * math.log(waves) / (2 * math.log(settings.rope_theta))

    first, last = dimension(settings.rope_beta_fast), dimension(settings.rope_beta_slow)
    if settings.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, settings.rotary_dim - 1)
    last += 1e-3 if first == last else 0.0  # in a small context last < first: as in `transformers`, a step
    dimensions = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
    return ((dimensions - first) / (last - first)).clamp(0, 1)
