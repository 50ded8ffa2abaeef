"""Rotary frequencies, plain and scaled for contexts longer than those of pretraining.

Dimensions i < R/2 of a head turn by theta^(-2i/R) radians a token (arXiv:2104.09864, equation 15). Scaling by
s lets positions s times as far apart look like those of pretraining:

    linear  all frequencies / s (arXiv:2306.15595)
    llama3  long wavelengths only, with a ramp between (arXiv:2407.21783, section 3.4.2)
    yarn    by how often a dimension turns in the original context, with a ramp, and attention's temperature
            by a factor on queries and keys (arXiv:2309.00071, sections 3.2 and 3.4)

Computed in float32, as the models were trained, unless activations are float64.
"""

import math

import torch
from torch import Tensor

from mlm.models.llama.settings import LlamaSettings


def frequencies(settings: LlamaSettings, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
    """Return the frequencies [R/2] in radians a token, and the factor of cosines and sines."""
    size = settings.rotary_dim
    exponents = torch.arange(0, size, 2, dtype=dtype, device=device) / size
    plain = 1.0 / settings.rope_theta**exponents
    match settings.rope_scaling:
        case "linear":
            return plain / settings.rope_factor, 1.0
        case "llama3":
            return _llama3_frequencies(plain, settings), 1.0
        case "yarn":
            default = 0.1 * math.log(settings.rope_factor) + 1.0
            return _yarn_frequencies(plain, settings), settings.rope_attention_factor or default
        case _:
            return plain, 1.0


def _llama3_frequencies(plain: Tensor, settings: LlamaSettings) -> Tensor:
    """llama3: the share of a frequency that stays grows with the waves in the original context."""
    waves = settings.rope_original_positions * plain / (2 * math.pi)
    low, high = settings.rope_low_freq_factor, settings.rope_high_freq_factor
    stays = ((waves - low) / (high - low)).clamp(0, 1)
    return stays * plain + (1 - stays) * plain / settings.rope_factor


def _yarn_frequencies(plain: Tensor, settings: LlamaSettings) -> Tensor:
    """yarn: dimensions before the ramp stay, those after it are scaled in full."""
    first, last = (
        _dimension(turns, settings) for turns in (settings.rope_beta_fast, settings.rope_beta_slow)
    )
    if settings.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, settings.rotary_dim - 1)
    last += 1e-3 if first == last else 0.0  # of a small context last < first: as in `transformers`, a step
    places = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
    scaled = ((places - first) / (last - first)).clamp(0, 1)
    return (1 - scaled) * plain + scaled * plain / settings.rope_factor


def _dimension(turns: float, settings: LlamaSettings) -> float:
    """The dimension i that turns so often in the original context: solve theta^(2i/R) 2 pi turns = S."""
    waves = settings.rope_original_positions / (2 * math.pi * turns)
    return settings.rotary_dim * math.log(waves) / (2 * math.log(settings.rope_theta))
