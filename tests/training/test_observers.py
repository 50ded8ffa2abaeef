"""Observers: when each method is called, what a decision does, and observers of the user's own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from mlm.checkpoint.native.save_load import read_manifest
from mlm.cli import main
from mlm.config.build import from_dict
from mlm.config.fields import POSITIVE
from mlm.parallel.mesh import shape_context
from mlm.runs.config import PretrainConfig
from mlm.tracking.reporter import Reporter
from mlm.training.loop import resume_command
from mlm.training.observer import DeferredCheck, Observer, Observers, StepOutcome
from mlm.training.trainer import Trainer
from tests.training.records import records
from tests.training.test_gradient_sums import SPEC, batches

CALLS: list[str] = []


class Recorder(Observer):
    def on_run_start(self, trainer: Trainer[Any], reporter: object) -> None:
        CALLS.append(f"start from {trainer.step}")

    def on_step_start(self, batches: Sequence[Any]) -> None:
        CALLS.append(f"step of {len(batches)}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        CALLS.append(f"<{name}")
        yield
        CALLS.append(f"{name}>")

    def on_micro_batch(self, number: int, count: int) -> None:
        CALLS.append(f"micro-batch {number} of {count}")

    def before_update(self, parts: Tensor, grad_norm: Tensor) -> None:
        CALLS.append("before update")

    def before_weights_change(self) -> None:
        CALLS.append("before change")

    def after_step(self, outcome: StepOutcome) -> None:
        CALLS.append("after step")

    def after_validation(self) -> None:
        CALLS.append("after validation")

    def before_save(self) -> None:
        CALLS.append("before save")

    def on_run_end(self) -> None:
        CALLS.append("end")


RUN = [
    *("pretrain", "model=gpt2_tiny", "data=synthetic", "data.seq_length=8", "train.global_batch_size=4"),
    *("train.micro_batch_size=2", "dist.device=cpu", "dist.peak_tflops=1"),
]


def test_a_custom_observer_sees_each_point_of_a_step_in_order(tmp_path: Path) -> None:
    CALLS.clear()
    words = ["train.steps=1", f"train.observers=[{__name__}:Recorder]", f"out={tmp_path}"]
    assert main([*RUN, *words]) == 0
    first, second = (
        ["<forward", "forward>", "<backward", f"micro-batch {number} of 2", "backward>"] for number in (1, 2)
    )
    assert [
        *["start from 0", "<data", "data>", "step of 2", *first, *second],
        *["<reduce", "reduce>", "before update", "before change", "<optimizer", "optimizer>", "after step"],
        *["<validation", "after validation", "validation>", "before save", "<saving", "saving>", "end"],
    ] == CALLS  # passes of a validation are no phases of a step


@dataclass
class Counts(Observer):
    every: Annotated[int, POSITIVE]
    name: str = "steps"

    def on_run_start(self, trainer: Trainer[Any], reporter: Reporter) -> None:
        self.trainer, self.reporter = trainer, reporter

    def after_step(self, outcome: StepOutcome) -> None:
        step = self.trainer.step
        if step % self.every == 0:
            self.reporter.measured(step, {self.name: step})


def test_an_observer_takes_fields_and_a_resumed_run_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = f"train.observers=[{{use: {__name__}:Counts, every: 2}}]"
    assert main([*RUN, "train.steps=2", "checkpoint.save_every=1", f"out={tmp_path}", entry]) == 0
    saved = from_dict(
        PretrainConfig, read_manifest(tmp_path / "checkpoints" / "step-00000002").state["config"]
    )
    assert saved.train.observers == ({"use": f"{__name__}:Counts", "every": 2},)
    typed = f'train.observers=[{{every:2,use:"{__name__}:Counts"}}]'
    assert resume_command("pretrain", tmp_path, saved)[3:] == [typed]
    assert main(["pretrain", f"resume={tmp_path}", "train.steps=4"]) == 2
    typed = capsys.readouterr().err.partition("if you trust it, type '")[2].partition("' or set")[0]
    assert main(["pretrain", f"resume={tmp_path}", "train.steps=4", typed]) == 0
    assert [each["steps"] for each in records(tmp_path, "measured")] == [2, 4]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("every: ten", "every=ten must be a whole number; correct every"),
        ("every: 0", "every=0 must be greater than 0; correct every"),
        ("every: 1, nam: a", "nam=a is not a field of it; did you mean name?"),
        (
            "name: a",
            f"its field every is required; write train.observers=[{{use: {__name__}:Counts, every: …}}]",
        ),
    ],
)
def test_a_wrong_field_is_one_line_before_ranks_start(
    fields: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = f"train.observers=[{{use: {__name__}:Counts, {fields}}}]"
    assert main([*RUN, "train.steps=1", f"out={tmp_path / 'run'}", entry]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"mlm pretrain: train.observers={__name__}:Counts: {problem}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("entry", ["[builtins:list]", "{use: a:B}", "[7]"])
def test_what_is_no_entry_is_one_line(entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "train.steps=1", f"train.observers={entry}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mlm pretrain: train.observers=")


class Decides(Observer):
    def __init__(self, answer: DeferredCheck | bool | None) -> None:
        self.answer = answer

    def before_update(self, parts: Tensor, grad_norm: Tensor) -> DeferredCheck | bool | None:
        return self.answer


def held(decision: bool) -> DeferredCheck:
    return DeferredCheck(torch.ones(()), lambda: decision)


FREE = DeferredCheck(torch.zeros(()), lambda: None)
DECISIONS: list[tuple[list[DeferredCheck | bool | None], bool]] = [
    ([None, False], True),
    ([False, True], False),
    ([FREE, held(True)], True),
    ([held(True), held(False)], False),
    ([FREE, True], False),
]


@pytest.mark.parametrize(("answers", "updates"), DECISIONS)
def test_an_update_is_applied_once_unless_an_observer_skips_it(
    answers: list[DeferredCheck | bool | None], updates: bool
) -> None:
    plain, trainer = (Trainer[Any](SPEC, shape_context()) for _ in range(2))
    before = trainer.shards[0].parameter.clone()
    trainer.observers = Observers([Decides(answer) for answer in answers])
    for each in (plain, trainer):
        each.train_step(batches(0, 1))
    expected = plain.shards[0].parameter if updates else before
    assert torch.equal(trainer.shards[0].parameter, expected)
    assert trainer.step == 1
