"""An optimizer and a decay of your own: Lion, and a rate that stays and then falls.

    PYTHONPATH=scripts/examples mlm pretrain --config-dir scripts/examples/configs model=gpt2_tiny \\
        data=synthetic optimizer=lion schedule=plateau schedule.options.stable=0.7 tp=2

Sources: arXiv:2302.06675, algorithm 2 (Lion); arXiv:2404.06395, section 4 (warm-up, stable, decay).
"""

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """w -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * w), m = b2 * m + (1 - b2) * g.

    It is called as Lion(groups, lr=optimizer.lr, **optimizer.options). `groups` are two: matrices, with
    optimizer.weight_decay, and biases and norms, with 0; what stands in a group wins over the defaults.
    """

    elementwise = True  # the update of an element reads that element alone: right at every layout

    def __init__(self, groups, lr: float, beta1: float = 0.9, beta2: float = 0.99) -> None:
        super().__init__(groups, {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            lr, b1, b2 = group["lr"], group["beta1"], group["beta2"]  # lr is set before each step
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:  # tensors shaped like p are saved, and resharded
                    state["momentum"] = torch.zeros_like(p)
                m: Tensor = state["momentum"]
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_((m * b1 + p.grad * (1 - b1)).sign_(), alpha=lr)
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def decay(progress: float, stable: float = 0.8) -> float:
    """1 until `stable` of the way from warm-up to schedule.decay_steps, then down to 0 in a line."""
    return min(1.0, (1 - progress) / (1 - stable))
