"""Learning rate as a function of the step."""

import math

from mlm.optim.config import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> float:
    """Learning rate of step `step` (the first is 1) in a run of `steps`.

    Linear from 0 to optimizer.lr over warmup_steps (default: a hundredth of `steps`), then to min_lr at
    decay_steps (default: `steps`) along a half cosine or a line, then min_lr (arXiv:1909.08053, section 4.2:
    cosine for GPT-2, linear for BERT).
    """
    peak, warmup = optimizer.lr, schedule.warmup(steps)
    if step <= warmup:
        return peak * step / warmup
    if schedule.decay == "constant":
        return peak
    end = schedule.decay_end(steps)
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    remaining = 1.0 - progress if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr + (peak - schedule.min_lr) * remaining


def warmup_warning(optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> str | None:
    """Return a warning if warm-up takes more than a third of a run of `steps`, else None."""
    warmup = schedule.warmup(steps)
    if 3 * warmup <= steps:
        return None
    highest = learning_rate(min(warmup, steps), optimizer, schedule, steps)
    reached = "" if warmup <= steps else f", so the learning rate reaches {highest:.2g} of {optimizer.lr:g}"
    return (
        f"warning: schedule.warmup_steps={warmup} is more than a third of train.steps={steps}{reached}; "
        f"use schedule.warmup_steps={steps // 100}, or null for a hundredth of the run"
    )
