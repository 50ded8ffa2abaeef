"""An exponential moving average of the weights, of the shards that a rank trains.

    average_n = average_{n-1} + (1 - decay) / (1 - decay^n) (weights_n - average_{n-1})

With Adam's correction (arXiv:1412.6980, section 3) the average of the first few steps is their mean, without
the initial weights. Each element depends on one element of the weights, so all layouts average alike.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mlm.parallel.sharding import ParameterShard

NAME = "ema"
"""Name in checkpoints, which store averages as they store the optimizer's moments."""


class WeightAverage:
    """Averages of the trained weights: plain tensors with the layout and sharding of the weights."""

    def __init__(self, shards: Sequence[ParameterShard], decay: float, device: torch.device) -> None:
        self.decay = decay
        self.values: dict[nn.Parameter, Tensor] = {
            shard.parameter: torch.zeros_like(shard.parameter) for shard in shards if shard.is_trained
        }
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        """Updates so far."""

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Add the weights to the average, unless `skip` (0-d) is 1.0. Does not wait for the device."""
        applies = 1 - skip.to(self.count.dtype)
        self.count += applies
        share = (1 - self.decay) / -torch.expm1(self.count.clamp(min=1) * math.log(self.decay)) * applies
        for parameter, value in self.values.items():
            value.lerp_(parameter.detach(), share.to(value.dtype))

    @torch.no_grad()
    def swap(self) -> None:
        for parameter, value in self.values.items():
            weights = parameter.detach().clone()
            parameter.copy_(torch.where(self.count > 0, value, weights))
            value.copy_(torch.where(self.count > 0, weights, value))
