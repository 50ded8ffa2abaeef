"""Faults of one pass on one rank: the step is computed again, and no sample is blamed."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from mlm.checkpoint.native.format import CheckpointError
from mlm.cli import main
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import IncidentConfig, PretrainConfig
from mlm.training.incidents.numbers import RecentSteps
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.slow import slow_but
from tests.training.incidents.runs import folder, incident, losses, pretrain, watcher
from tests.training.incidents.test_places import batches_of, layer
from tests.training.records import records
from tests.training.test_trainer import config

LAYOUTS: dict[str, dict[str, int]] = {
    "pp": {"pp": 2},
    "zero=2": {"dp": 2, "zero": 2},
    "zero=3": {"dp": 2, "zero": 3},
    "tp, cp": {"tp": 2, "cp": 2},
}


def spoil_activation(trainer: Trainer) -> Callable[[], None]:
    """Write a NaN into an activation of layer 1 until the returned function is called."""
    module = layer(trainer, 1)

    def hook(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[3, 1, 0] = math.nan
        return output

    return module.mlp.up.register_forward_hook(hook).remove  # type: ignore[no-any-return, union-attr]


def spoil_backward(trainer: Trainer) -> Callable[[], None]:
    """Multiply a gradient that leaves layer 1 by 10,000."""
    module = layer(trainer, 1)
    hook = module.mlp.up.register_full_backward_hook(lambda _m, grads, _out: (grads[0] * 1e4,))  # type: ignore[union-attr]
    return hook.remove  # type: ignore[no-any-return]


def spoil_sum(trainer: Trainer) -> Callable[[], None]:
    """Multiply the gradients of this rank by 10,000 after they were summed."""

    def spoil() -> None:
        for shard in trainer.shards:
            if shard.parameter.grad is not None:
                shard.parameter.grad *= 1e4

    return spoil


FAULTS = {"activation": spoil_activation, "backward": spoil_backward, "sum": spoil_sum}


def usual() -> RecentSteps:
    draw = random.Random(0)
    return RecentSteps(512, [(4.1 + draw.gauss(0, 0.05), math.exp(draw.gauss(0, 0.2))) for _ in range(600)])


def faulty_step(ctx: ParallelContext, spec: PretrainConfig, out: Path) -> list[tuple[Any, ...]]:
    """Of each fault: if the weights are those of a step without it, the words, the update left out."""
    found = []
    for name, plant in FAULTS.items():
        clean, trainer = Trainer[Any](spec, ctx), Trainer[Any](spec, ctx)
        clean.train_step(batches_of(clean))
        incidents = watcher(trainer, out / name)
        incidents.state.recent = usual()
        incidents.on_step_start(batches_of(trainer))
        stop = plant(trainer) if ctx.rank == 1 else lambda: None
        parts = trainer.compute_gradients(incidents.batches)
        stop()
        outcome = trainer.clip_and_update(parts)
        same = all(
            torch.equal(a.parameter, b.parameter) for a, b in zip(clean.shards, trainer.shards, strict=True)
        )
        finite = bool(outcome.grad_norm.isfinite()) and incidents.state.nonfinite_steps == 0
        found.append((same, incidents.said, finite))  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", slow_but({0, 1}, LAYOUTS))
def test_a_fault_of_one_pass_is_computed_again(name: str, tmp_path: Path) -> None:
    layout = dict(LAYOUTS[name])
    spec, zero = config(), layout.pop("zero", 0)
    spec = replace(spec, parallel=replace(spec.parallel, **layout, zero=zero))
    spec = replace(spec, incident=IncidentConfig(action="skip"))
    ranks = run_on_ranks(faulty_step, spec, tmp_path, **layout)
    for fault, (same, (said,), finite) in zip(FAULTS, ranks[0], strict=True):
        assert (same, finite) == (True, True), fault
        state = "finite" if fault == "activation" else "normal"
        assert f"computed again: {state} (loss " in said
        assert "; not in the data; if it comes back, test memory and processors" in said, fault
        assert "layers." not in said
        assert "sample" not in said
        record = json.loads((tmp_path / fault / "incidents" / "step-00000001" / "incident.json").read_text())
        assert record["kinds"][-1] == "transient"
        assert record["second_pass"].keys() == {"loss", "grad_norm"}
        assert record.get("first_not_finite") is None
    assert all(same for each in ranks for same, *_ in each)


STRUCK = 5
"""Step of the run below whose first pass is spoilt."""


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass of step STRUCK has NaNs."""
    passes = [0]
    forward_backward = Trainer.forward_backward

    def spoilt(self: Trainer[Any], batches: Any, objective: Any = None) -> Tensor:
        parts = forward_backward(self, batches, objective)
        if self.step == STRUCK - 1:
            passes[0] += 1
            if passes[0] == 1:
                parts.mul_(math.nan)
                for shard in self.shards:
                    shard.parameter.grad.mul_(math.nan)  # type: ignore[union-attr]
        return parts

    monkeypatch.setattr(Trainer, "forward_backward", spoilt)


@pytest.mark.usefixtures("struck")
def test_a_normal_second_pass_looks_for_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be none that can be read: this ended the run."""
    monkeypatch.setattr(
        "mlm.training.incidents.watcher.rewind_candidates", Mock(side_effect=CheckpointError("unreadable"))
    )
    assert pretrain(tmp_path / "run", "train.steps=6", "incident.action=rewind") == 0
    assert [record["action"] for record in records(tmp_path / "run", "incident")] == ["computed again"]


@pytest.mark.usefixtures("struck")
def test_a_run_loses_nothing_and_a_replay_blames_no_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the update is deferred, as on a GPU; a CPU's host waits."""
    monkeypatch.setattr("mlm.training.incidents.watcher.DEFERRING", ("cpu",))
    steps = ["train.steps=8", "incident.action=skip"]
    assert pretrain(tmp_path / "run", *steps) == 0
    assert pretrain(tmp_path / "clean", *steps) == 0  # its pass of the step is a later one
    assert losses(tmp_path / "run") == losses(tmp_path / "clean")
    assert [record["action"] for record in records(tmp_path / "run", "incident")] == ["computed again"]
    kinds = ["loss_not_finite", "gradient_not_finite", "transient"]
    assert incident(tmp_path / "run", STRUCK)["kinds"] == kinds
    manifest = tmp_path / "run" / "checkpoints" / "step-00000008" / "manifest.json"
    state = json.loads(manifest.read_text())["state"]
    assert (state["incidents"]["left_out_steps"], state["consumed_samples"]) == ([], 32)
    capsys.readouterr()
    assert main(["replay", str(folder(tmp_path / "run", STRUCK)), "dist.threads_per_rank=1"]) == 0
    said = capsys.readouterr().out
    assert "the data do not reproduce it: no sample is to blame; if it comes back, test memory" in said
