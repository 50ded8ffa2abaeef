"""The loss scale of float16."""

from typing import Any

import torch

from mlm.optim.config import PrecisionConfig
from mlm.optim.precision import LossScaler


def scaler(**settings: Any) -> LossScaler:
    config = PrecisionConfig(dtype="fp16", initial_loss_scale=8.0, loss_scale_window=2, **settings)
    return LossScaler(config, torch.device("cpu"))


def test_the_scale_never_falls_below_its_minimum() -> None:
    loss_scale = scaler(min_loss_scale=3.0)
    scales = []
    for _ in range(3):
        loss_scale.update(torch.tensor(1.0))
        scales.append(loss_scale.scale.item())
    assert scales == [4.0, 3.0, 3.0]


def test_a_restored_scale_doubles_when_the_saved_one_would_have() -> None:
    saved, restored = scaler(), scaler()
    saved.update(torch.tensor(0.0))
    restored.load_state(saved.state())
    restored.update(torch.tensor(0.0))
    assert restored.scale.item() == 16.0


def test_a_run_that_continues_in_float16_begins_with_its_own_scale() -> None:
    """The scale 1 of another precision is none; the counts are those of the run."""
    other, continued = LossScaler(PrecisionConfig(dtype="bf16"), torch.device("cpu")), scaler()
    other.update(torch.tensor(1.0))
    continued.load_state(other.state())
    assert continued.scale.item() == 8.0
    assert continued.skipped.item() == 1


def test_without_a_scale_to_lower_an_overflow_skips_its_step() -> None:
    fixed = LossScaler(PrecisionConfig(dtype="bf16"), torch.device("cpu"))
    fixed.update(torch.tensor(0.0))
    assert fixed.skipped.item() == 0
    fixed.update(torch.tensor(1.0))
    assert (fixed.scale.item(), fixed.skipped.item()) == (1.0, 1)
