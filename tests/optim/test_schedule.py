"""Learning rates at the points the papers name."""

from dataclasses import replace

import pytest

from mlm.optim.config import OptimizerConfig, ScheduleConfig
from mlm.optim.schedule import learning_rate, warmup_warning

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


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 1), (5, 0), (100, 6)])
def test_last_step_trains_where_the_decay_ends_at_0_with_the_run(decay: str, steps: int, warmup: int) -> None:
    """It repeats the last positive rate; no other step changes."""
    schedule = ScheduleConfig(decay=decay, warmup_steps=warmup, min_lr=0.0)
    rates = [learning_rate(step, ADAM, schedule, steps) for step in range(1, steps + 1)]
    given = replace(schedule, decay_steps=steps)
    assert rates[-1] == (rates[-2] if steps > 1 else ADAM.lr) > 0
    assert rates[:-1] == [learning_rate(step, ADAM, given, steps) for step in range(1, steps)]
    assert learning_rate(steps, ADAM, given, steps) == 0  # as the papers' presets ask for


@pytest.mark.parametrize("steps", [100, 1000, 300_000])
def test_default_schedule_is_that_of_v1_in_proportion_to_the_run(steps: int) -> None:
    default = ScheduleConfig()
    for share in (0.005, 0.01, 0.5, 1.0):
        of_v1 = learning_rate(round(share * 300_000), ADAM, V1, 300_000)
        if share * steps >= 1:
            assert learning_rate(round(share * steps), ADAM, default, steps) == pytest.approx(of_v1)


@pytest.mark.parametrize(
    ("share", "steps", "end"), [(0.01, 700, 7), (0.29, 100, 29), (0.0667, 900, 60), (0.0099999999, 100, 0)]
)
def test_share_of_warm_up_is_rounded_down_to_steps(share: float, steps: int, end: int) -> None:
    assert ScheduleConfig(warmup=share).warmup_end(steps) == end


@pytest.mark.parametrize(
    ("warmup", "steps", "words"),
    [
        (333, 1000, None),
        (None, 3, None),
        (334, 1000, "schedule.warmup_steps=334 is more than a third of train.steps=1000; use "),
        (
            3000,
            1000,
            "train.steps=1000, so the learning rate reaches 5e-05 of 0.00015; use schedule.warmup_steps=10",
        ),
    ],
)
def test_a_warm_up_of_more_than_a_third_of_the_run_is_warned_of(
    warmup: int | None, steps: int, words: str | None
) -> None:
    warning = warmup_warning(ADAM, ScheduleConfig(warmup_steps=warmup, decay_steps=300_000), steps)
    assert (warning is None) if words is None else (warning is not None and words in warning)


def test_stable_phase_cools_down_along_either_shape() -> None:
    """arXiv:2405.18392, section 3: 1 - sqrt(x), or 1 - x, of the last steps; the last one trains too."""
    wsd = ScheduleConfig(decay="constant", warmup_steps=10, min_lr=0.0, cooldown=100, cooldown_shape="linear")
    rates = [learning_rate(step, ADAM, wsd, 400) / ADAM.lr for step in (5, 10, 300, 301, 350, 399, 400)]
    assert rates == pytest.approx([0.5, 1, 1, 0.99, 0.5, 0.01, 0.01])
    root = replace(wsd, cooldown_shape="1-sqrt", min_lr=1e-5)
    found = [learning_rate(step, ADAM, root, 400) for step in (300, 325, 400)]
    assert found == pytest.approx([1.5e-4, 1e-5 + 1.4e-4 * 0.5, 1e-5])
    by_share = replace(root, cooldown=None, cooldown_share=0.25)
    assert [learning_rate(step, ADAM, by_share, 400) for step in (300, 325, 400)] == found


def test_inverse_square_root_of_the_transformer() -> None:
    """arXiv:1706.03762, section 5.3: d^-0.5 min(step^-0.5, step warmup^-1.5), of d = 512."""
    schedule = ScheduleConfig(decay="inverse_sqrt", warmup_steps=4000, min_lr=0.0)
    peak = OptimizerConfig(lr=512**-0.5 * 4000**-0.5)
    for step in (1, 2000, 4000, 10_000, 100_000):
        theirs = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert learning_rate(step, peak, schedule, 100_000) == pytest.approx(theirs)
