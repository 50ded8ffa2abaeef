"""Runs that ruin their weights: what stops them, what is left of their checkpoints, and the way back."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlm.checkpoint.native.folders import latest_name, step_name
from mlm.cli import main
from mlm.parallel.mesh import shape_context
from mlm.training.incidents.divergence import describe_recovery, find_newest_good
from mlm.training.observer import Observer, StepOutcome
from mlm.training.trainer import Trainer
from tests.slow import slow
from tests.training.incidents.runs import losses, pretrain
from tests.training.records import records

Output = pytest.CaptureFixture[str]

SANE = [
    *("data.kind=synthetic", "incident.threshold=0", "checkpoint.save_every=1", "checkpoint.keep_every=0"),
    *("checkpoint.keep_last=1", "checkpoint.asynchronous=true", "schedule.decay=constant"),
]
RUINED = [*SANE, "optimizer.lr=1e30", "incident.patience=3"]


@pytest.fixture(scope="module")
def sane(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sane") / "run"
    assert pretrain(out, *SANE, "train.steps=4") == 0
    return out


@pytest.fixture
def run(sane: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sane, tmp_path / "run"))


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("*step-*"))


def latest(out: Path) -> str | None:
    return latest_name(out / "checkpoints")


@pytest.mark.parametrize(
    "words",
    [[], slow(["checkpoint.asynchronous=false", "precision=fp16", "precision.initial_loss_scale=4"])],
    ids=" ".join,
)
def test_a_run_that_ruins_its_weights_keeps_a_good_checkpoint(run: Path, words: list[str]) -> None:
    pretrain(run, *RUINED, *words)
    assert step_name(4) in names(run)
    assert main(["ckpt", "rollback", str(run)]) == 0
    assert latest(run) == step_name(4)
    assert pretrain(run, *SANE, "train.steps=7") == 0
    assert all(loss < 10 for loss in losses(run).values())
    assert list(losses(run)) == list(range(1, 8))


def test_it_stops_after_the_patience_and_says_why_and_how_to_go_back(run: Path, capsys: Output) -> None:
    assert pretrain(run, *RUINED) == 1
    *steps, said = capsys.readouterr().err.splitlines()
    lines = [line for line in steps if ": incident: " in line]
    ends = ["(training continues)", "(training continues)", "(training stops)"]
    assert [line[line.rindex("(") :] for line in lines] == ends
    assert said.startswith(
        "mlm pretrain: step 8: loss or gradients are not finite in precision=fp32 since step 6"
    )
    assert "where the learning rate was 1e+30" in said
    assert "the first number that is not finite is in the " in said
    assert f"Newest good checkpoint: {run}/checkpoints/{step_name(4)}" in said
    assert "latest names it: resume with a lower optimizer.lr" in said
    assert "mlm ckpt rollback" not in said
    assert latest(run) == step_name(4)
    (record,) = records(run, "diverged")
    assert (record["step"], record["since"], record["good"]) == (8, 6, step_name(4))


def plant(monkeypatch: pytest.MonkeyPatch, step: int, change: Callable[[list[torch.Tensor]], object]) -> None:
    """Change the weights after a step's update."""
    update = Trainer.clip_and_update

    def ruin(self: Trainer[Any], parts: torch.Tensor) -> StepOutcome:
        outcome = update(self, parts)
        if self.step == step:
            change([shard.parameter.data for shard in self.shards])
        return outcome

    monkeypatch.setattr(Trainer, "clip_and_update", ruin)


def test_a_planted_number_is_named_and_not_saved(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plant(patch, 6, lambda weights: weights[0].view(-1)[:1].fill_(float("inf")))
        assert pretrain(run, *SANE, "incident.patience=3") == 1
    said = capsys.readouterr().err
    assert "not saved: weights not finite: model." in said
    assert "the first number that is not finite is in the weight of " in said.splitlines()[-1]
    assert step_name(6) not in names(run)
    assert latest(run) == step_name(5)
    main(["ckpt", "rollback", str(run)])
    assert pretrain(run, *SANE, "train.steps=7") == 0


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["optimizer.lr=1e30", "train.steps=8"], "loss or gradients are not finite in precision=fp32"),
        (["optimizer.lr=10", "train.steps=5"], "losses are above "),
    ],
    ids=["not finite", "by its last update"],
)
def test_a_run_that_ends_in_ruin_fails_and_latest_is_the_good_checkpoint(
    run: Path, capsys: Output, words: list[str], cause: str
) -> None:
    assert pretrain(run, *SANE, *words) == 1
    assert latest(run) == step_name(4)
    assert step_name(int(words[1].partition("=")[2])) in names(run)  # its last state is kept too
    said = capsys.readouterr().err.splitlines()[-1]
    assert cause in said
    assert f"Newest good checkpoint: {run}/checkpoints/{step_name(4)}" in said


def test_weights_that_a_fault_ruins_after_the_last_step_are_not_the_latest(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finite numbers, whose norms have grown by less than a hundred."""
    plant(monkeypatch, 6, lambda weights: [weight.mul_(90.0) for weight in weights])
    assert pretrain(run, *SANE, "train.steps=6") == 1
    assert (main(["ckpt", "rollback", str(run)]), latest(run)) == (0, step_name(5))


class Spike(Observer):
    """Multiplies all weights by 90 after step 5, and divides them after step 6."""

    def on_run_start(self, trainer: Trainer[Any], reporter: object) -> None:
        self.trainer = trainer

    @torch.no_grad()
    def after_step(self, outcome: object) -> None:
        for shard in self.trainer.shards:
            shard.parameter.mul_({5: 90.0, 6: 1 / 90}.get(self.trainer.step, 1.0))


def test_a_spike_that_recovers_costs_nothing(run: Path) -> None:
    """One step's loss is far above the best; the run ends well, with the checkpoints that are kept."""
    assert pretrain(run, *SANE, "train.steps=7", f"train.observers=[{__name__}:Spike]") == 0
    assert max(losses(run).values()) > 20
    assert names(run) == [step_name(7)]


@pytest.mark.slow
def test_overflows_of_float16_cost_no_checkpoint_and_stop_nothing(tmp_path: Path) -> None:
    """The scale is halved until it fits, in more steps than the patience."""
    out, scale = tmp_path / "run", "precision.initial_loss_scale=1e12"
    assert pretrain(out, *SANE, "precision=fp16", scale, "incident.patience=3", "train.steps=40") == 0
    steps = records(out, "step")
    assert 3 < steps[-1]["skipped_steps"] < 40
    assert not records(out, "incident")
    assert names(out) == [step_name(40)]


def test_a_run_that_has_used_up_its_rewinds_says_so(run: Path, capsys: Output) -> None:
    assert pretrain(run, *RUINED, "incident.action=rewind", "incident.rewinds=0") == 1
    said = capsys.readouterr().err
    assert "asks: training has returned incident.rewinds=0 times; resume with a lower optimizer.lr" in said


MILD = ["incident.window=512", "checkpoint.asynchronous=false"]


def test_weights_that_a_fault_doubles_cost_no_good_checkpoint(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is 4.3 before and 6.2 after: no step alone is far from the best of so young a run."""
    plant(monkeypatch, 5, lambda weights: [weight.mul_(2.0) for weight in weights])
    assert pretrain(run, *SANE, *MILD, "train.steps=7") == 1
    assert 5 < losses(run)[6] < 7
    assert names(run) == [step_name(4), step_name(7)]
    assert latest(run) == step_name(4)
    assert "losses are above " in capsys.readouterr().err.splitlines()[-1]


def test_a_learning_rate_that_ruins_for_two_saves_costs_no_good_checkpoint(tmp_path: Path) -> None:
    """Losses of 4.2, then 7.7, then between 4.4 and 5.6."""
    out, saves = tmp_path / "run", [*SANE, *MILD, "checkpoint.save_every=4"]
    assert pretrain(out, *saves, "train.steps=8") == 0
    assert pretrain(out, *saves, "train.steps=16", "optimizer.lr=0.3") == 1
    assert max(losses(out).values()) < 9
    assert step_name(8) in names(out)
    assert latest(out) == step_name(8)


def test_a_best_checkpoint_that_is_good_is_named_where_no_other_is(run: Path) -> None:
    """As of a finetuning run whose one checkpoint to resume from is its doubtful end."""
    (run / "best").mkdir()
    (run / "checkpoints").rename(run / "best" / "checkpoints")
    trainer: Any = SimpleNamespace(config=SimpleNamespace(out=str(run)), ctx=shape_context())
    assert find_newest_good(trainer, 5) is None  # what step 5 began with
    good = find_newest_good(trainer, 6)
    assert good == run / "best" / "checkpoints" / step_name(4)
    assert f"The best checkpoint is good, {good}: to train on" in describe_recovery(str(run), good, "less")
