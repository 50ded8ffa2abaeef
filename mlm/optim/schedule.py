"""Learning rate as a function of the step."""

import math
from collections.abc import Callable

from mlm.optim.config import STABLE_DECAYS, OptimizerConfig, ScheduleConfig
from mlm.optim.user import decay_share, user_decay

SHIPPED: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
}
"""Progress from 0 (end of warm-up) to 1 (decay_steps) -> share of the way from min_lr up to the peak."""


def learning_rate(step: int, optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> float:
    """Learning rate of step `step` (the first is 1) in a run of `steps`.

    Linear from 0 to optimizer.lr over warmup_steps (default: the share schedule.warmup of `steps`), then to
    min_lr at decay_steps (default: `steps`) along schedule.decay, then min_lr (arXiv:1909.08053, section 4.2:
    cosine for GPT-2, linear for BERT). In a cooldown it falls from there to min_lr at the last step.
    """
    rate = _rate_with_cooldown(step, optimizer, schedule, steps)
    if rate == 0 and step == steps and schedule.decay_steps is None:
        # the last step trains too, at the rate of the step before
        return _rate_with_cooldown(step - 1, optimizer, schedule, steps)
    return rate


def _rate_with_cooldown(step: int, optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> float:
    start = schedule.cooldown_start(steps)
    if schedule.decay not in STABLE_DECAYS or not start < min(step, steps):
        return _rate_before_cooldown(step, optimizer, schedule, steps)
    top = _rate_before_cooldown(max(start, 1), optimizer, schedule, steps)
    progress = min(1.0, (step - start) / (steps - start))
    share = 1 - (progress if schedule.cooldown_shape == "linear" else math.sqrt(progress))
    return schedule.min_lr + (top - schedule.min_lr) * share


def _rate_before_cooldown(
    step: int, optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int
) -> float:
    peak, warmup, end = optimizer.lr, schedule.warmup_end(steps), schedule.decay_end(steps)
    if warmup and step <= warmup:
        return peak * step / warmup
    if schedule.decay == "constant":
        return peak
    if schedule.decay == "inverse_sqrt":
        return max(schedule.min_lr, peak * math.sqrt(max(warmup, 1) / step))
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    decay = user_decay(schedule)
    share = SHIPPED[schedule.decay](progress) if decay is None else decay_share(schedule, decay, progress)
    return schedule.min_lr + (peak - schedule.min_lr) * share


def warmup_warning(optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> str | None:
    """Return a warning if warm-up takes more than a third of a run of `steps`, else None."""
    warmup = schedule.warmup_end(steps)
    if 3 * warmup <= steps:
        return None
    highest = learning_rate(min(warmup, steps), optimizer, schedule, steps)
    reached = "" if warmup <= steps else f", so the learning rate reaches {highest:.2g} of {optimizer.lr:g}"
    return (
        f"warning: schedule.warmup_steps={warmup} is more than a third of train.steps={steps}{reached}; "
        f"use schedule.warmup_steps={steps // 100}, or schedule.warmup_steps=null schedule.warmup=0.01"
    )
