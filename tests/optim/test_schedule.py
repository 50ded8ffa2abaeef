"""Learning rates at the points the papers name."""

import pytest

from mlm.config.schema import OptimizerConfig, ScheduleConfig
from mlm.optim.schedule import learning_rate

V1 = ScheduleConfig(decay="cosine", warmup_steps=3000, decay_steps=300_000, min_lr=1e-5)
ADAM = OptimizerConfig(lr=1.5e-4)


@pytest.mark.parametrize(
    ("step", "lr"),
    [
        (1, 1.5e-4 / 3000),
        (1500, 0.75e-4),
        (3000, 1.5e-4),
        (151_500, 0.8e-4),  # half way down the cosine: the mean of peak and floor
        (300_000, 1e-5),
        (400_000, 1e-5),
    ],
)
def test_gpt2_schedule_of_v1(step: int, lr: float) -> None:
    assert learning_rate(step, ADAM, V1, 500_000) == pytest.approx(lr, rel=1e-9)


@pytest.mark.parametrize(("step", "lr"), [(10_000, 1e-4), (1_005_000, 0.5e-4), (2_000_000, 0.0)])
def test_bert_schedule_is_linear(step: int, lr: float) -> None:
    schedule = ScheduleConfig(decay="linear", warmup_steps=10_000, decay_steps=2_000_000, min_lr=0.0)
    assert learning_rate(step, OptimizerConfig(lr=1e-4), schedule, 2_000_000) == pytest.approx(lr, abs=1e-12)


def test_constant_schedule_stays_at_the_peak_after_warm_up() -> None:
    schedule = ScheduleConfig(decay="constant", warmup_steps=10)
    assert [learning_rate(s, ADAM, schedule, 100) for s in (5, 10, 100)] == [0.75e-4, 1.5e-4, 1.5e-4]


def test_decay_ends_with_the_run_by_default() -> None:
    schedule = ScheduleConfig(warmup_steps=0, min_lr=1e-5)
    assert learning_rate(200, ADAM, schedule, 200) == pytest.approx(1e-5)
