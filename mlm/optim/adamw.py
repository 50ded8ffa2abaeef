"""The optimizer: Adam with decoupled weight decay by PyTorch's fused kernel, Muon, or a user's class.

State of each parameter: moments of its shape and a count of steps, all zero before the first step.
"""

from collections.abc import Sequence
from functools import partial
from inspect import unwrap

import torch
from torch import Tensor, nn

from mlm.optim.clip import scale_gradients
from mlm.optim.config import OptimizerConfig
from mlm.optim.groups import GroupRates, group_rates
from mlm.optim.matrices import build_buckets
from mlm.optim.muon import MOMENTUM, iteration_dtype, orthogonalise, shape_scale
from mlm.optim.user import Groups, check_state, check_step, user_optimizer
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import ParameterShard

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two moments, in PyTorch's names."""


class AdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW with one step count, shared by the states of all parameters (`ensure_state`).

    PyTorch's own `step` imports torch.compile, 1.6 s of every rank's start, and increments a count per
    parameter, which takes longer than a small model's updates.
    """

    elementwise = True
    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    grad_scale: Tensor | None = None
    """Divisor of the gradients: 0-d float32."""
    found_inf: Tensor | None = None
    """0-d float32: with 1.0 a step changes nothing."""

    def __init__(self, groups: Groups, config: OptimizerConfig) -> None:
        super().__init__(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self.is_cautious = config.cautious_decay
        """True if an element decays only where its update moves it towards 0 (arXiv:2510.12402)."""

    def moments_of(self, parameter: Tensor) -> tuple[str, ...]:
        return MOMENTS

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        count: Tensor = next(iter(self.state.values()))["step"]
        count += 1
        for group in self.param_groups:
            if group.get("is_matrix"):
                continue
            parameters = [p for p in group["params"] if p.grad is not None]
            first, second = ([self.state[p][moment] for p in parameters] for moment in MOMENTS)
            if not parameters:
                continue
            decay = group["weight_decay"]
            if self.is_cautious and decay:
                applies = 1.0 if self.found_inf is None else 1 - self.found_inf
                for p, average in zip(parameters, first, strict=True):
                    grad = p.grad if self.grad_scale is None else p.grad / self.grad_scale
                    ahead = average.lerp(grad, 1 - group["betas"][0])  # the update has its sign
                    p.addcmul_(p, (ahead.mul_(p) >= 0) * applies, value=-group["lr"] * decay)
                decay = 0.0
            torch._fused_adamw_(
                *(parameters, [p.grad for p in parameters], first, second, [], [count] * len(parameters)),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=decay,
                amsgrad=False,
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
        if self.found_inf is not None:
            count -= self.found_inf


class Muon(AdamW):
    """Muon (muon.py) for the groups with a true `is_matrix`, AdamW for the others.

    Args:
        groups: groups of all parameters.
        matrices: weights of two or three dimensions, in groups with a true `is_matrix`.
        replicas: ranks that hold the same part of the model, or rows of it.
    """

    elementwise = False

    def __init__(
        self, groups: Groups, matrices: Sequence[ParameterShard], replicas: Axis, config: OptimizerConfig
    ) -> None:
        super().__init__(groups, config)
        self.config, self.matrices = config.muon, frozenset(shard.parameter for shard in matrices)
        self.dtype = iteration_dtype(config.muon, matrices[0].parameter) if matrices else torch.float32
        self.masks_overflows = bool(matrices) and matrices[0].parameter.is_cuda
        self.buckets = build_buckets(matrices, replicas, self.dtype, per_head=config.muon.per_head)

    def moments_of(self, parameter: Tensor) -> tuple[str, ...]:
        return (MOMENTUM,) if parameter in self.matrices else MOMENTS

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters. Collective over the ranks that share matrices.

        On a GPU the host does not wait for `found_inf`: after an overflow momentum stays and the update is 0.
        """
        super().step()
        overflow = self.found_inf if self.masks_overflows else None
        waits = self.found_inf is not None and overflow is None and not self.found_inf.is_meta
        if waits and self.found_inf.item():  # type: ignore[union-attr]
            return
        applies = 1.0 if overflow is None else 1 - overflow
        group_of = {p: group for group in self.param_groups if group["is_matrix"] for p in group["params"]}
        for bucket in self.buckets:
            averages = dict[nn.Parameter, Tensor]()
            for shard in bucket.shards:
                p = shard.parameter
                momentum: Tensor = self.state[p][MOMENTUM]
                grad, beta = torch.zeros_like(p) if p.grad is None else p.grad, self.config.momentum
                if self.grad_scale is not None:
                    grad.div_(self.grad_scale)
                if overflow is not None:
                    grad = torch.where(overflow == 1, momentum, grad)
                momentum.lerp_(grad, 1 - beta)
                average = grad.lerp(momentum, beta) if self.config.nesterov else momentum
                averages[p] = average.to(self.dtype)
            for p in averages if not self.is_cautious else ():
                p.mul_(1 - applies * group_of[p]["lr"] * group_of[p]["weight_decay"])
            orthogonal = bucket.transform(averages, partial(orthogonalise, config=self.config))
            for matrix, index, rows, update in orthogonal:
                p, scale = matrix.shard.parameter, shape_scale(matrix.shape, self.config)
                if self.is_cautious:
                    x = p[index] if rows is None else p[index][rows]
                    update = update + x * (x * update >= 0) * (group_of[p]["weight_decay"] / scale)
                update = update if overflow is None else update * applies
                alpha = -group_of[p]["lr"] * scale
                if rows is None:
                    p[index].add_(update, alpha=alpha)
                else:
                    p[index].index_add_(0, rows, update.to(p.dtype), alpha=alpha)


def build_optimizer(
    shards: Sequence[ParameterShard],
    config: OptimizerConfig,
    replicas: Axis | None = None,
    width: float = 1.0,
) -> torch.optim.Optimizer:
    """Build the optimizer of a model's parameters, with its state. Raises OwnCodeError (a UserError).

    `replicas` are ranks that hold the same part of the model, or rows of it: they share Muon's work. `width`
    is the model's width over the base's in muP.
    """
    first, shards = shards[0].parameter, [shard for shard in shards if shard.is_trained]
    by_rates: dict[GroupRates, list[ParameterShard]] = {}
    for shard in shards:
        key = group_rates(shard.name, shard.parameter.dim(), config, width, shard.constant_side)
        by_rates.setdefault(key, []).append(shard)
    groups: Groups = [
        {"params": [shard.parameter for shard in members], **key._asdict()}
        for key, members in by_rates.items()
    ]
    if not groups:  # a pipeline stage without adapters: an empty parameter keeps its step count
        empty = nn.Parameter(first.new_empty(0))
        empty.grad = torch.zeros_like(empty)
        groups = [{"params": [empty], **GroupRates(False, 1.0, 0.0)._asdict()}]
    optimizer: torch.optim.Optimizer
    if (build := user_optimizer(config)) is not None:
        optimizer = build([{key: x for key, x in group.items() if key != "is_matrix"} for group in groups])
    elif config.kind == "muon":
        matrices = [shard for key, members in by_rates.items() if key.is_matrix for shard in members]
        optimizer = Muon(groups, matrices, replicas or Axis("dp"), config)
    else:
        optimizer = AdamW(groups, config)
    ensure_state(optimizer)
    return optimizer


@torch.no_grad()
def ensure_state(optimizer: torch.optim.Optimizer, step: float = 0.0) -> None:
    """Create missing moments as zeros and set the step count to `step`.

    PyTorch creates state in the first `step()`, which would change the weights. Raises OwnCodeError for state
    of a user's optimizer that checkpoints cannot hold.
    """
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, AdamW):
        count = torch.tensor(step, device=parameters[0].device)
        for p in parameters:
            optimizer.state[p]["step"] = count
            for moment in optimizer.moments_of(p):
                optimizer.state[p].setdefault(moment, torch.zeros_like(p))
        return
    check_state(optimizer)
    if not optimizer.state:  # created by a step, whose other effects are undone
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        check_step(optimizer)
        for p, values in zip(parameters, before, strict=True):
            p.copy_(values)
            p.grad = None if p.numel() else p.grad
            for value in optimizer.state[p].values():
                if isinstance(value, Tensor):
                    value.zero_()
    for p in parameters:
        state = optimizer.state[p]
        if isinstance(state.get("step"), Tensor):
            state["step"].fill_(step)
        elif "step" in state:
            state["step"] = int(step)


def moments(optimizer: torch.optim.Optimizer, shard: ParameterShard) -> tuple[str, ...]:
    if isinstance(optimizer, AdamW):
        return optimizer.moments_of(shard.parameter)
    state = optimizer.state.get(shard.parameter, {})
    return tuple(name for name, value in state.items() if isinstance(value, Tensor) and name != "step")


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
    """True if `apply` with an overflow neither changes parameters of this dtype nor waits.

    False for a custom optimizer, fused or not: its `step` may count its calls.
    """
    return type(optimizer) is AdamW and dtype == torch.float32


def moment(optimizer: torch.optim.Optimizer, shard: ParameterShard, name: str) -> Tensor:
    state: Tensor = optimizer.state[shard.parameter][name]
    return state


def applied_steps(optimizer: torch.optim.Optimizer) -> float:
    """Steps applied so far, skipped ones not counted; Adam's bias correction depends on it."""
    for state in optimizer.state.values():
        return float(state.get("step", 0.0))
    return 0.0


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step, times the `lr_scale` of each group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
