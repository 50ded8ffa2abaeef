"""The optimizer: Adam with decoupled weight decay by PyTorch's fused kernel, or the user's own.

Its state, as named shards: per parameter tensors of its shape (moments) and a count of steps, all zero
before the first step.
"""

from collections.abc import Sequence
from inspect import unwrap

import torch
from torch import Tensor

from mlm.optim.clip import scale_gradients
from mlm.optim.config import OptimizerConfig
from mlm.optim.own import Groups, check_state, check_step, own_optimizer, parameter_groups
from mlm.parallel.sharding import ParameterShard

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two moments, in PyTorch's names."""


def is_decayed(shard: ParameterShard) -> bool:
    """Weight decay is for matrices: biases and norm parameters have none (arXiv:1909.08053, section 4.2)."""
    return shard.parameter.dim() > 1


class AdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW with one count of steps, which all parameters' states name (`ensure_state`).

    PyTorch's own `step` imports torch.compile, 1.6 s of every rank's start, and adds to a count of each
    parameter: longer than a small model's updates take.
    """

    elementwise = True
    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    grad_scale: Tensor | None = None
    """Divisor of the gradients: 0-d float32."""
    found_inf: Tensor | None = None
    """0-d float32: with 1.0 a step changes nothing."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        count: Tensor = next(iter(self.state.values()))["step"]
        count += 1
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            first, second = ([self.state[p][moment] for p in parameters] for moment in MOMENTS)
            if not parameters:
                continue
            torch._fused_adamw_(
                *(parameters, [p.grad for p in parameters], first, second, [], [count] * len(parameters)),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                amsgrad=False,
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
        if self.found_inf is not None:
            count -= self.found_inf


def adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW, its fused kernel on any device."""
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def build_optimizer(shards: Sequence[ParameterShard], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer of a model's parameters, with its state. Raises OwnCodeError (a UserError)."""
    shards = [s for s in shards if s.is_trained]
    decayed = [s.parameter for s in shards if is_decayed(s)]
    plain = [s.parameter for s in shards if not is_decayed(s)]
    groups, own = parameter_groups(decayed, plain, config), own_optimizer(config)
    optimizer = adamw(groups, config) if own is None else own(groups)
    ensure_state(optimizer, shards)
    return optimizer


def ensure_state(
    optimizer: torch.optim.Optimizer, shards: Sequence[ParameterShard], step: float = 0.0
) -> None:
    """Make the optimizer's state exist: moments as they are or zero, and its step count `step`.

    PyTorch makes it in the first `step()`, which would change the weights.
    """
    shards = [s for s in shards if s.is_trained]
    if not isinstance(optimizer, AdamW):
        check_state(optimizer)
        if not optimizer.state:
            _first_state(optimizer, shards)
    count = torch.tensor(step, device=shards[0].parameter.device)
    for shard in shards:
        p = shard.parameter
        state = optimizer.state[p]
        if isinstance(optimizer, AdamW):
            state["step"] = count
            for moment in MOMENTS:
                state.setdefault(moment, torch.zeros_like(p))
        elif isinstance(state.get("step"), Tensor):
            state["step"].fill_(step)
        elif "step" in state:
            state["step"] = int(step)


@torch.no_grad()
def _first_state(optimizer: torch.optim.Optimizer, shards: Sequence[ParameterShard]) -> None:
    """Let a custom optimizer make its state in a step that changes nothing, then set it to zero.

    Raises OwnCodeError for state that checkpoints cannot hold.
    """
    before = [shard.parameter.clone() for shard in shards]
    for shard in shards:
        shard.parameter.grad = torch.zeros_like(shard.parameter)
    check_step(optimizer)
    for shard, values in zip(shards, before, strict=True):
        p = shard.parameter
        p.copy_(values)
        p.grad = None
        for _name, value in optimizer.state[p].items():
            if isinstance(value, Tensor):
                value.zero_()


def moments(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the state that is shaped like the parameters."""
    if isinstance(optimizer, AdamW):
        return MOMENTS
    names = {
        name: None
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step"
    }
    return tuple(names)


def apply(
    optimizer: torch.optim.Optimizer, shards: Sequence[ParameterShard], factor: Tensor, overflow: Tensor
) -> None:
    """Step with the gradients times `factor` (0-d), unless `overflow` (0-d) is 1.

    Fused kernels do both as they read the gradients, in float32; for others the host waits.
    """
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if is_fused and factor.dtype == torch.float32:
        optimizer.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]
    else:
        scale_gradients(shards, factor)
    if is_fused:
        optimizer.found_inf = overflow  # type: ignore[attr-defined]
        optimizer.step()
    elif overflow.is_meta or not overflow.item():  # a dry run has no numbers
        optimizer.step()


def can_defer(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> bool:
    """Return True if `apply` with an overflow changes nothing of parameters of this dtype, nor waits.

    Not of a custom optimizer, fused or not: its `step` may count its calls.
    """
    return type(optimizer) is AdamW and dtype == torch.float32


def moment(optimizer: torch.optim.Optimizer, shard: ParameterShard, name: str) -> Tensor:
    """One of the moments of a parameter, shaped like this rank's part of it."""
    state: Tensor = optimizer.state[shard.parameter][name]
    return state


def applied_steps(optimizer: torch.optim.Optimizer) -> float:
    """Steps applied so far, skipped ones not counted; Adam's bias correction depends on it."""
    for state in optimizer.state.values():
        return float(state.get("step", 0.0))
    return 0.0


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
