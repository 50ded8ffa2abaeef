"""Learning rate as a function of the step."""

import math
from collections.abc import Callable

from mlm.optim.config import STABLE_DECAYS, OptimizerConfig, ScheduleConfig
from mlm.optim.user import share_of, user_decay

Decay = Callable[[float], float]
"""Progress from 0 (end of warm-up) to 1 (decay_steps) -> share of the way from min_lr up to the peak."""

SHIPPED: dict[str, Decay] = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
}


def learning_rate(step: int, optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> float:
    """Learning rate of step `step` (the first is 1) in a run of `steps`.

    Linear from 0 to optimizer.lr over warmup_steps (default: the share schedule.warmup of `steps`), then to
    min_lr at decay_steps (default: `steps`) along schedule.decay, then min_lr (arXiv:1909.08053, section 4.2:
    cosine for GPT-2, linear for BERT). In a cooldown it falls from there to min_lr at the last step. Where
    decay_steps is not given and that would be 0, the last step takes the rate of the step before: it trains
    too.
    """
    start = schedule.cooldown_start(steps)
    cools = schedule.decay in STABLE_DECAYS and start < steps

    def rate_of(step: int) -> float:
        if not cools or step <= start:
            return _before_cooldown(step, optimizer, schedule, steps)
        top = _before_cooldown(max(start, 1), optimizer, schedule, steps)
        progress = min(1.0, (step - start) / (steps - start))
        left = 1 - (progress if schedule.cooldown_shape == "linear" else math.sqrt(progress))
        return schedule.min_lr + (top - schedule.min_lr) * left

    rate = rate_of(step)
    trains_nothing = rate == 0 and step == steps and schedule.decay_steps is None
    return rate_of(step - 1) if trains_nothing else rate


def _before_cooldown(step: int, optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> float:
    peak, warmup, end = optimizer.lr, schedule.warmup_end(steps), schedule.decay_end(steps)
    if warmup and step <= warmup:
        return peak * step / warmup
    if schedule.decay == "constant":
        return peak
    if schedule.decay == "inverse_sqrt":
        return max(schedule.min_lr, peak * math.sqrt(max(warmup, 1) / step))
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    if (own := user_decay(schedule)) is not None:
        share = share_of(schedule, own, progress)
    else:
        share = SHIPPED[schedule.decay](progress)
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
