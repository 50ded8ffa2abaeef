"""Adam with decoupled weight decay, by PyTorch's fused kernel, and its state as named shards."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mlm.optim.config import OptimizerConfig
from mlm.parallel.sharding import ParameterShard

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two moments, in PyTorch's names."""


def is_decayed(shard: ParameterShard) -> bool:
    """Weight decay is for matrices: biases and norm parameters have none (arXiv:1909.08053, section 4.2)."""
    return shard.parameter.dim() > 1


def build_optimizer(shards: Sequence[ParameterShard], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the parameters of a model, its fused kernel on any device."""
    decayed = [s.parameter for s in shards if is_decayed(s)]
    plain = [s.parameter for s in shards if not is_decayed(s)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def ensure_state(optimizer: torch.optim.AdamW, shards: Sequence[ParameterShard], step: float = 0.0) -> None:
    """Make the optimizer's state exist, its moments zero and its step count `step`.

    PyTorch makes it in the first `step()`, which would change the weights.
    """
    for shard in shards:
        p = shard.parameter
        state = optimizer.state[p]
        state["step"] = torch.tensor(step, dtype=torch.float32, device=p.device)
        for moment in MOMENTS:
            state.setdefault(moment, torch.zeros_like(p))


def moment(optimizer: torch.optim.AdamW, shard: ParameterShard, name: str) -> Tensor:
    """One of MOMENTS of a parameter, shaped like this rank's part of it."""
    state: Tensor = optimizer.state[shard.parameter][name]
    return state


def applied_steps(optimizer: torch.optim.AdamW) -> float:
    """Steps applied so far, skipped ones not counted; Adam's bias correction depends on it."""
    for state in optimizer.state.values():
        return float(state["step"].item())
    return 0.0


def set_lr(optimizer: torch.optim.AdamW, lr: float) -> None:
    """Learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
