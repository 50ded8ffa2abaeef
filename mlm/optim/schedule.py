"""Learning rate as a function of the step."""

import math

from mlm.config.schema import OptimizerConfig, ScheduleConfig


def learning_rate(step: int, optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> float:
    """Learning rate of step `step` (the first is 1) in a run of `steps`.

    Linear from 0 to optimizer.lr over warmup_steps, then to min_lr at decay_steps (default: `steps`) along a
    half cosine or a line, then min_lr (arXiv:1909.08053, section 4.2: cosine for GPT-2, linear for BERT).
    """
    peak, warmup = optimizer.lr, schedule.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if schedule.decay == "constant":
        return peak
    end = schedule.decay_steps or steps
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    remaining = 1.0 - progress if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr + (peak - schedule.min_lr) * remaining
