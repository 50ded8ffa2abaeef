"""`mlm import megatron` of torch_dist and of legacy Llamas: it computes what `transformers` computes."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import mlm
from mlm.cli.convert import run as convert
from mlm.cli.convert.run import run
from mlm.cli.convert.settings import ImportMegatronConfig
from mlm.convert.config import ConvertConfig
from mlm.convert.source import open_source
from mlm.optim.adamw import applied_steps
from mlm.parallel.mesh import shape_context
from mlm.training.state import load
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from tests.convert.dcp.llamas import (
    VOCAB,
    arguments,
    core_state,
    random_llama,
    torchtitan_state,
    write_torch_dist,
)

TOKENS = torch.randint(0, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))


def assert_same_logits(folder: Path, theirs: Tensor) -> None:
    """Within 1e-4 of the largest: float32 sums in another order."""
    ours = mlm.load(str(folder)).logits(TOKENS)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * theirs.abs().max().item())


def import_to(tmp_path: Path) -> Path:
    run(ImportMegatronConfig(source=str(tmp_path / "theirs"), out=str(tmp_path / "run")))
    return tmp_path / "run"


def started_from(run: Path) -> Trainer[Any]:
    """A trainer that begins with an imported run."""
    named = open_source(str(run))
    trainer: Trainer[Any] = Trainer(replace(named.config, out=str(run / "next")), shape_context())
    load(trainer, named.path)
    return trainer


@torch.no_grad()
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "numbered"])
def test_llama_of_torch_dist_computes_what_transformers_does(tmp_path: Path, stacked: bool) -> None:
    model = random_llama()
    write_torch_dist(tmp_path / "theirs", core_state(model, stacked=stacked))
    assert_same_logits(import_to(tmp_path), model(TOKENS).logits)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "numbered"])
def test_plain_moments_are_those_that_training_continues_with(tmp_path: Path, stacked: bool) -> None:
    """They are made of the weights, so that each shows its place: twice a weight, and its square."""
    state = core_state(random_llama(), stacked=stacked)
    moments = {f"optimizer.state.exp_avg.{name}": 2 * x for name, x in state.items()}
    moments |= {f"optimizer.state.exp_avg_sq.{name}": x * x for name, x in state.items()}
    write_torch_dist(tmp_path / "theirs", {**state, **moments})
    assert_moments_of_weights(import_to(tmp_path))


def assert_moments_of_weights(run: Path) -> None:
    """They are twice the weights, and their squares."""
    trainer = started_from(run)
    assert (trainer.step, applied_steps(trainer.optimizer)) == (0, 7.0)
    for shard in trainer.shards:
        held, weight = trainer.optimizer.state[shard.parameter], shard.parameter.detach()
        torch.testing.assert_close(held["exp_avg"], 2 * weight, rtol=0, atol=0)
        torch.testing.assert_close(held["exp_avg_sq"], weight * weight, rtol=0, atol=0)
        assert weight.abs().sum() > 0


def test_moments_of_torchtitan_are_those_that_training_continues_with(tmp_path: Path) -> None:
    """Under the names that PyTorch gives a flattened optimizer's state; once around, split over tp=2."""
    model = random_llama()
    model.save_pretrained(tmp_path / "hf")
    state = torchtitan_state(model)
    flat: dict[str, Any] = {f"state.{name}.exp_avg": 2 * x for name, x in state.items()}
    flat |= {f"state.{name}.exp_avg_sq": x * x for name, x in state.items()}
    flat |= {f"state.{name}.step": torch.tensor(7.0) for name in state}
    flat |= {f"param_groups.{name}.lr": 1e-3 for name in state}
    dcp.save(state | {"optimizer": flat}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    config = {"config": str(tmp_path / "hf"), "to": "native", "tp": 2}
    convert.run(ConvertConfig(source=str(tmp_path / "theirs"), out=str(tmp_path / "run"), **config))  # type: ignore[arg-type]
    assert_moments_of_weights(tmp_path / "run")


def test_fsdp_dtensor_is_imported_with_its_moments(tmp_path: Path) -> None:
    """A plain DCP folder: args are an item, gates and inputs apart, moments under their parameters."""
    model, state = random_llama(), {}
    for name, value in core_state(model, stacked=False).items():
        halves = value.chunk(2) if name.endswith("linear_fc1.weight") else (value,)
        state |= {
            f"{name}{end}": half
            for end, half in zip(("_w", "_v") if halves[1:] else ("",), halves, strict=True)
        }
    moments = {
        f"module.{name}": {"exp_avg": 2 * x, "exp_avg_sq": x * x, "step": torch.tensor(7.0)}
        for name, x in state.items()
    }
    saved = {"args": arguments(), "iteration": 7, "model": state, "optimizer": {"state": moments}}
    dcp.save(saved, checkpoint_id=tmp_path / "theirs", no_dist=True)
    out = import_to(tmp_path)
    with torch.no_grad():
        assert_same_logits(out, model(TOKENS).logits)
    assert_moments_of_weights(out)


def test_args_of_fsdp_dtensor_that_are_no_data_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, ("touch ran",)

    monkeypatch.chdir(tmp_path)
    saved = {"args": Hostile(), "model": core_state(random_llama(), stacked=False)}
    dcp.save(saved, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(UserError, match=r"\.metadata: refers to .*system, which is not data; nothing was"):
        import_to(tmp_path)
    assert not Path("ran").exists()


@pytest.mark.parametrize("change", ["missing", "flat"])
def test_moments_that_are_not_whole_are_left_out_in_one_line(
    tmp_path: Path, change: str, capfd: pytest.CaptureFixture[str]
) -> None:
    state = core_state(random_llama())
    moments = {f"optimizer.state.{m}.{n}": x for m in ("exp_avg", "exp_avg_sq") for n, x in state.items()}
    name = "optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc2.weight"
    value = moments.pop(name)
    if change == "flat":
        moments[name] = value.reshape(len(value), -1)
    write_torch_dist(tmp_path / "theirs", {**state, **moments})
    run = import_to(tmp_path)
    assert "weights only: the optimizer's state is left out" in " ".join(capfd.readouterr().out.split())
    assert applied_steps(started_from(run).optimizer) == 0


def test_missing_layer_is_named(tmp_path: Path) -> None:
    state = core_state(random_llama(), stacked=False)
    del state["decoder.layers.1.mlp.linear_fc2.weight"]
    write_torch_dist(tmp_path / "theirs", state)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.down\.weight is missing"):
        import_to(tmp_path)


def test_unsupported_argument_is_named(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "theirs", core_state(random_llama()), arguments(multi_latent_attention=True))
    with pytest.raises(UserError, match=r"args\.multi_latent_attention=True.*Llama"):
        import_to(tmp_path)


def test_names_of_torchtitan_need_the_model_that_convert_takes(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "theirs", torchtitan_state(random_llama()))
    with pytest.raises(UserError, match=r"torchtitan's names.*mlm convert"):
        import_to(tmp_path)
