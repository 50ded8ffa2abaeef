"""An exponential moving average of the weights, of the shards that a rank trains.

    average_n = average_{n-1} + (1 - decay) / (1 - decay^n) (weights_n - average_{n-1})

With Adam's correction (arXiv:1412.6980, section 3) it is the mean of all weights while these are few, and
initial ones never count. Elements depend on one element of the weights each, so that layouts average alike.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mlm.parallel.sharding import ParameterShard

NAME = "ema"
"""Name in checkpoints, which store averages like the optimizer's moments."""


class WeightAverage:
    """Averages of the trained weights: plain tensors, laid out and sharded as these."""

    def __init__(self, shards: Sequence[ParameterShard], decay: float, device: torch.device) -> None:
        self.decay = decay
        self.values: dict[nn.Parameter, Tensor] = {
            shard.parameter: torch.zeros_like(shard.parameter) for shard in shards if shard.is_trained
        }
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        """Updates so far."""

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Average the weights in, unless `skip` (0-d) is 1.0. Does not wait for the device."""
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
