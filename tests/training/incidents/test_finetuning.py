"""Incidents of `mlm finetune`: a row that spoils its step is named, and what was asked for follows."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from mlm.cli import main
from mlm.cli.finetune import check_finetune
from mlm.finetune import training
from mlm.finetune.batches import TaskBatch
from mlm.finetune.config import FinetuneConfig
from mlm.finetune.packing import PackedBatch
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import CheckConfig, IncidentConfig
from mlm.training.incidents.watcher import IncidentError
from mlm.training.trainer import Trainer
from tests.finetune.runs import finetune, finetuning, records, write_data, write_model
from tests.ranks import run_on_ranks

BAD, MODULE = 7, "layers.0.mlp.up"
"""The row whose numbers one module spoils, in each of the two epochs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("finetune")
    write_model(made / "bert")
    for kind in ("classification", "choice"):
        write_data(made / kind, kind)
    return made


class Spoiled(Trainer[Any]):
    """A trainer in which a module writes NaN for one row."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        objective, batches = self.objective, []
        inputs = objective.inputs  # type: ignore[attr-defined]

        def noted(chunk: Any, batch: TaskBatch) -> Any:
            batches[:] = [batch]
            return inputs(chunk, batch)

        def spoil(_module: nn.Module, _inputs: Any, y: Tensor) -> Tensor:
            (batch,) = batches
            y = y.clone()
            each = len(batch.tokens) // len(batch.labels)
            if BAD in batch.examples and torch.is_grad_enabled():
                y[2, batch.examples.index(BAD) * each] = float("nan")
            return y

        objective.inputs = noted  # type: ignore[attr-defined]
        self.model.chunks[0].get_submodule(MODULE).register_forward_hook(spoil)


def spoiled(folder: Path, out: Path, action: str, kind: str = "classification") -> FinetuneConfig:
    asked = IncidentConfig(action=action)  # type: ignore[arg-type]
    return finetuning(folder, kind, out=str(out), incident=asked)


def incidents(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted(out.glob("incidents/*/incident.json"))]


def test_the_row_that_spoils_a_step_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(training, "Trainer", Spoiled)
    finetune(spoiled(folder, tmp_path, "log", "choice"))
    found = incidents(tmp_path)
    assert len(found) == 2
    for each in found:
        place = each["first_not_finite"]
        assert (place["name"], place["tensor"], place["sample"]) == (MODULE, "output", BAD)
        assert place["position"] == 2
        assert BAD in each["rows"]
        assert each["samples"] is None
    first = next(iter(sorted(tmp_path.glob("incidents/*"))))
    assert [record["action"] for record in records(tmp_path, "incident")] == ["log", "log"]
    assert main(["replay", str(first)]) == 2
    assert "is of finetuning, whose rows `mlm replay` does not read" in capsys.readouterr().err


def test_a_stop_ends_the_run_with_1(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "Trainer", Spoiled)
    with pytest.raises(IncidentError, match=r"stopped as incident\.action=stop asks") as raised:
        finetune(spoiled(folder, tmp_path, "stop"))
    assert raised.value.exit_code == 1


def test_rewind_is_rejected(folder: Path, tmp_path: Path) -> None:
    config = spoiled(folder, tmp_path, "rewind")
    (problem,) = check_finetune(config, world_size=None, local_devices=None)
    assert problem.keys == ("incident.action",)
    assert problem.fix == "use incident.action=skip, log or stop"


def flipped(ctx: ParallelContext, config: FinetuneConfig) -> None:
    """A run in which a bit of rank 1's weights flips after the first step."""

    class Flipped(Trainer[Any]):
        def clip_and_update(self, parts: Tensor) -> Any:
            outcome = super().clip_and_update(parts)
            if ctx.rank == 1 and self.step == 1:
                self.shards[0].parameter.data.view(torch.int64).view(-1)[0] ^= 1
            return outcome

    with (
        patch.object(training, "Trainer", Flipped),
        pytest.raises(IncidentError, match="replicas differ since step"),
    ):
        training.run(config, ctx)


@pytest.mark.slow
def test_replicas_that_differ_are_found_and_slow_ranks_are_reported(folder: Path, tmp_path: Path) -> None:
    checks = CheckConfig(every=2, ranks_every=2)
    config = finetuning(folder, out=str(tmp_path), check=checks, train={"epochs": 1})
    run_on_ranks(flipped, config, dp=2)
    kinds = [kind for record in records(tmp_path, "incident") for kind in record["kinds"]]
    assert "replicas_differ" in kinds
    assert [record["step"] for record in records(tmp_path, "ranks")] == [2]


def packed(ends: list[list[int]] | None) -> PackedBatch:
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    mask = None if ends is None else torch.zeros(2, 6, dtype=torch.bool)
    for row, places in enumerate(ends or ()):
        mask[row, places] = True
    return PackedBatch(tokens, tokens, 0, mask, (5, 3, 9) if ends else (5, 3))


def test_a_place_in_packed_conversations_is_of_the_one_that_holds_it() -> None:
    batch = packed([[2, 4], [3]])
    assert [batch.sample(0, position) for position in (0, 2, 3, 4)] == [5, 5, 3, 3]
    assert (batch.sample(0), batch.sample(1, 2), batch.sample(1, 5)) == (5, 9, 9)
    assert [packed(None).sample(row) for row in (0, 1)] == [5, 3]
