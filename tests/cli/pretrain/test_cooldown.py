"""Where a cooldown begins and ends that is typed for a run that is resumed, in its folder or in another."""

from pathlib import Path
from typing import Any

import pytest

from mlm.cli.pretrain.cooldown import settle_cooldown
from mlm.parallel.mesh import shape_context
from mlm.training.trainer import Trainer
from tests.training.saving import save
from tests.training.test_trainer import config, steps_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    out = tmp_path_factory.mktemp("stable")
    trainer = Trainer(config(), shape_context())
    steps_of(trainer, 3)
    save(trainer, out)
    return out


def settled(out: Path, typed: set[str], *, from_run: Path | None = None, cooldown: int | None = 5) -> int:
    values: dict[str, Any] = {"schedule": {"cooldown": cooldown}, "train": {"steps": 100}, "out": str(out)}
    values["checkpoint"] = {"from_run": from_run and str(from_run)}
    settle_cooldown(values, typed)
    steps: int = values["train"]["steps"]
    return steps


def test_cooldown_begins_at_the_newest_checkpoint(run: Path, tmp_path: Path) -> None:
    assert settled(run, {"schedule.cooldown"}) == 8
    assert settled(tmp_path, {"schedule.cooldown"}, from_run=run) == 8


def test_other_lengths_stay(run: Path, tmp_path: Path) -> None:
    assert settled(run, {"schedule.cooldown", "train.steps"}) == 100
    assert settled(run, {"schedule.cooldown"}, cooldown=0) == 100
    assert settled(tmp_path, {"schedule.cooldown"}) == 100  # a run from the start


def test_cooldown_under_way_ends_where_it_would(run: Path) -> None:
    for steps, expected in ((6, 6), (8, 8), (3, 3), (100, 8)):
        (run / "config.yaml").write_text(f"schedule: {{cooldown: 5}}\ntrain: {{steps: {steps}}}\n")
        assert settled(run, {"schedule.cooldown"}) == expected
    (run / "config.yaml").unlink()
