"""Gradient norms by layer: those of one process at every layout, in one message, to every tracker."""

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlm.cli import main
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig
from mlm.tracking.reporter import TensorBoard, WeightsAndBiases
from mlm.training.gradient_norms import GradientNorms
from mlm.training.observer import Observers
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.records import records
from tests.training.test_gradient_sums import SPEC, batches
from tests.training.test_observers import RUN
from tests.training.test_trainer import config

USE = "mlm.training.gradient_norms:GradientNorms"


def plain_norms(spec: PretrainConfig) -> dict[str, float]:
    """Norms of one process's gradients by autograd alone."""
    trainer = Trainer[Any](spec, shape_context())
    (model,) = trainer.model.chunks
    some = batches(0, 1)
    scale = 1 / trainer.global_counts(some)
    loss = sum(trainer.objective.output(model, batch, scale, None, None).sum() for batch in some)
    named = dict(model.named_parameters())
    squares = defaultdict[str, float](float)
    for name, grad in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):  # type: ignore[arg-type]
        words = name.split(".")
        layer = f"layers.{words[1]}" if words[0] == "layers" else ""
        squares[layer or ("head" if words[0] in ("final_norm", "output") else "embedding")] += float(
            grad.square().sum()
        )
    return {f"grad_norm/{name}": math.sqrt(square) for name, square in squares.items()}


def reported(ctx: ParallelContext, spec: PretrainConfig) -> tuple[dict[str, float], float, list[str]]:
    """Norms that this rank reports of a step, the step's norm, and the waits of the report."""
    trainer, found, waits = Trainer[Any](spec, ctx), list[dict[str, float]](), list[str]()
    observer = GradientNorms(every=1)
    observer.on_run_start(trainer, SimpleNamespace(measured=lambda step, values: found.append(values)))  # type: ignore[arg-type]
    trainer.observers = Observers([observer])
    outcome = trainer.train_step(batches(ctx.dp.rank, ctx.dp.size))
    waiting = ctx.watch.waiting

    def noted(op: str, axis: str, *others: Any) -> Any:
        waits.append(f"{op} over {axis}")
        return waiting(op, axis, *others)

    ctx.watch.waiting = noted  # type: ignore[method-assign]
    try:
        observer.after_step(outcome)
    finally:
        ctx.watch.waiting = waiting  # type: ignore[method-assign]
    return found[0], float(outcome.grad_norm), waits


LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2},
    {"dp": 2, "zero": 3},
    {"tp": 2, "sequence_parallel": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_norms_are_those_of_one_process_in_one_message(layout: dict[str, Any]) -> None:
    """In float64 by layer, and each rank reports all of them, that of the tied table once."""
    expected = plain_norms(SPEC)
    assert list(expected) == [f"grad_norm/{name}" for name in ("embedding", "layers.0", "layers.1", "head")]
    spec = replace(SPEC, parallel=ParallelConfig(**layout))
    sizes = {key: size for key, size in layout.items() if key in ("tp", "pp", "dp")}
    for norms, whole, waits in run_on_ranks(reported, spec, **sizes):
        assert norms == pytest.approx(expected, rel=1e-12)
        assert math.hypot(*norms.values()) == pytest.approx(whole, rel=1e-12)
        assert waits == ["all_reduce over world"] * 2  # its start and its end


def test_loss_scale_is_taken_out() -> None:
    spec = replace(config(dtype="fp16"), train=SPEC.train)
    norms, whole, _ = reported(shape_context(), spec)
    assert math.hypot(*norms.values()) == pytest.approx(whole, rel=1e-6)


def test_a_run_reports_norms_where_due_and_remembers_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside each step's norm; a run that is resumed does so without being told again."""
    words = [*RUN, "log.every=1", "train.validate_every=0", f"out={tmp_path}"]
    assert main([*words, "train.steps=2", f"train.observers=[{{use: {USE}, every: 2}}]"]) == 0
    assert main(["pretrain", f"resume={tmp_path}", "train.steps=4"]) == 0
    whole = {each["step"]: each["grad_norm"] for each in records(tmp_path, "step")}
    norms = {
        each["step"]: math.hypot(*(x for name, x in each.items() if name.startswith("grad_norm/")))
        for each in records(tmp_path, "measured")
    }
    assert norms == pytest.approx({2: whole[2], 4: whole[4]}, rel=1e-6)
    command = capsys.readouterr().out.rpartition("train on: ")[2].partition("\n")[0]
    assert command.startswith("mlm pretrain resume=")
    assert "train.observers" not in command  # shipped code need not be typed again


def test_trackers_take_what_an_observer_measured() -> None:
    """Under one name each."""
    logged: list[object] = []
    values = {"grad_norm/layers.0": 0.5, "mine": 2.0}
    board = TensorBoard(Path("out"), 0)
    board.writer = SimpleNamespace(add_scalar=lambda *each: logged.append(each))  # type: ignore[assignment]
    board.measured(10, values)
    assert logged == [("grad_norm/layers.0", 0.5, 10), ("mine", 2.0, 10)]
    logged.clear()
    wandb = WeightsAndBiases(Path("out"), "project")
    wandb.run = SimpleNamespace(log=logged.append)
    wandb.measured(10, values)
    assert logged == [{"step": 10, **values}]
