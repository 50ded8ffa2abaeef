"""Families, optimizers, schedules and datasets of the user's own, named by import path."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mlm.checkpoint.native.save_load import read_manifest
from mlm.cli import main
from mlm.config.imports import TRUST, OwnCodeError, imported
from mlm.convert.source import open_source
from mlm.models.shape import count_parameters
from mlm.runs.saved import check_stored_parameters
from mlm.util.errors import CorruptFileError
from tests.training.records import losses

EXAMPLES = Path(__file__).parents[2] / "scripts/examples"
KIND = "own_family:FAMILY"
SHORT = [
    *("data.seq_length=16", "model.num_layers=1", "model.hidden_size=32", "model.vocab_size=64"),
    *("train.steps=4", "train.global_batch_size=2", "train.micro_batch_size=2", "train.validate_every=0"),
    *("log.every=1", "checkpoint.save_every=2", "dist.device=cpu", "precision.dtype=fp64"),
]
OWN_CODE = """
from dataclasses import replace

import torch
from torch import nn
from mlm.data.sampler import SyntheticDataset
from mlm.models.family import option
from mlm.models.gpt2 import family as gpt2
from mlm.models.gpt2.model import GPT2
from mlm.models.transformer import MLP, TransformerLayer

def build(groups, config):
    return torch.optim.SGD(groups, lr=config.lr, momentum=0.9)

def decay(progress):
    return (1 - progress) ** 2

class Sgd(torch.optim.SGD):
    def __init__(self, params, lr, momentum):
        super().__init__(params, lr=lr, momentum=momentum)

class Signed(torch.optim.SGD):
    pass

class Asking(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            assert all(p.isfinite().all().item() for p in group["params"])
        return super().step(closure)

class Experts(nn.Module):
    def __init__(self, config, *, tp, sequence_parallel=False):
        super().__init__()
        self.all = nn.ModuleList(MLP(config, tp=tp) for _ in range(option(config, "experts")))

    def forward(self, x):
        return sum(expert(x) for expert in self.all)

class Layer(TransformerLayer):
    mlp_type = Experts

class Model(GPT2):
    layer_type = Layer

FAMILY = replace(gpt2.FAMILY, model=Model, options={"experts": 4}, converts_as=None)

class Loud(MLP):
    def forward(self, x):
        return super().forward(x) * (2.0 if x.abs().max().item() > 1e6 else 1.0)

class LoudLayer(TransformerLayer):
    mlp_type = Loud

class LoudModel(GPT2):
    layer_type = LoudLayer

LOUD = replace(gpt2.FAMILY, model=LoudModel, converts_as=None)

def build_nothing(groups, config): ...
def decay_between(progress):
    return 7.0 if 0.2 < progress < 0.4 else 1.0
def power(progress, power=1.0):
    return (1 - progress) ** power

def dataset(data, *, vocab_size, num_samples, seed, validation):
    return SyntheticDataset(min(vocab_size, 8), data.seq_length, num_samples, seed)
"""


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example and a module `mine` can be imported; nothing is trusted or imported yet."""
    monkeypatch.delenv(TRUST, raising=False)
    (tmp_path / "mine.py").write_text(OWN_CODE)
    for folder in (EXAMPLES, tmp_path):
        monkeypatch.syspath_prepend(str(folder))
    for module in ("own_family", "mine"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def pretrain(out: Path, *more: str) -> int:
    family = ["--config-dir", str(EXAMPLES / "configs"), "model=own_family"]
    return main(["pretrain", *family, "data=synthetic", *SHORT, *more, f"out={out}"])


@pytest.mark.slow
def test_own_family_trains_alike_at_tp_1_and_tp_2(tmp_path: Path) -> None:
    assert pretrain(tmp_path / "one", "tp=1") == 0
    assert pretrain(tmp_path / "two", "tp=2", "dp=1") == 0
    assert len(losses(tmp_path / "one")) == 4
    # float64: sums over tp are of two parts in another order
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-12)


@pytest.mark.slow
def test_own_code_that_asks_for_numbers_trains_and_is_not_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a forecast where a calibrated machine would have one; plans end with one line."""
    monkeypatch.setattr("mlm.plan.forecast.small_run_bound", lambda *_: 0.0)
    own = ["model.kind=mine:LOUD", "optimizer.kind=mine:Asking"]
    typed = ["model=gpt2_tiny", *own, "data=synthetic", *SHORT]
    assert main(["pretrain", *typed, f"out={tmp_path / 'run'}"]) == 0
    assert "needs" not in capsys.readouterr().err
    for command, kind, *words in (
        ("layouts", own[0], "gpus=2"),
        ("memory", own[1], "rank=0"),
        ("compare", own[0], "a=tp1 dp2 mb1", "b=tp2 mb1"),
    ):
        words += ["model=gpt2_tiny", kind, "train.global_batch_size=8"]
        assert main(["plan", command, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{kind}: cannot be planned, as it does not run on tensors without numbers" in line
        assert "item() cannot be called on meta tensors" in line


def test_saved_import_path_is_followed_only_if_typed_or_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert pretrain(run) == 0
    monkeypatch.delitem(sys.modules, "own_family")
    with pytest.raises(OwnCodeError, match=f"model.kind={KIND}.*{TRUST}=own_family"):
        open_source(str(run))
    assert main(["pretrain", f"resume={run}", "train.steps=5"]) == 2
    *_, line = capsys.readouterr().err.splitlines()  # behind the forecast
    assert f"model.kind={KIND}" in line
    assert "own_family" not in sys.modules

    assert main(["pretrain", f"resume={run}", "train.steps=5", f"model.kind={KIND}"]) == 0
    with pytest.raises(OwnCodeError):  # typing it once trusts it once
        open_source(str(run))
    monkeypatch.setenv(TRUST, "own_family")
    assert open_source(str(run)).config.model.kind == KIND


def test_own_optimizer_schedule_and_dataset_train_and_resume_as_in_one_run(tmp_path: Path) -> None:
    own = ["optimizer.kind=mine:build", "schedule.decay=mine:decay", "data.kind=mine:dataset"]
    for out, *more in (["whole"], ["parts", "train.steps=2"], ["parts"]):
        words = [*own, *SHORT, "schedule.decay_steps=4", *more, f"out={tmp_path / out}"]
        assert main(["pretrain", "model=gpt2_tiny", *words]) == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_optimizer_class_and_options_train_as_the_function_that_sets_them(tmp_path: Path) -> None:
    def run(out: str, *own: str) -> list[float]:
        words = ["model=gpt2_tiny", "data=synthetic", *SHORT, *own, f"out={tmp_path / out}"]
        assert main(["pretrain", *words]) == 0
        return losses(tmp_path / out)

    functions = run("functions", "optimizer.kind=mine:build", "schedule.decay=mine:decay")
    theirs = ["optimizer.kind=torch.optim:SGD", "optimizer.options.momentum=0.9"]
    assert run("classes", *theirs, "schedule.decay=mine:power", "schedule.options.power=2.0") == functions
    assert run("linear", *theirs, "schedule.decay=mine:power") != functions


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("model.kind=gtp2", "did you mean model.kind=gpt2?"),
        ("optimizer.kind=not_there:build", "PYTHONPATH"),
        ("model.kind=mine:build", "ModelFamily"),
        ("optimizer.kind=mine:Sgd", "Sgd(groups, lr=…) fails (TypeError: "),
        ("optimizer.kind=mine:build_nothing", "returned None"),
        ("optimizer.options.momentum=3", "optimizer.kind=adamw takes no options"),
        ("optimizer.kind=mine:Signed tp=2", "tp=2 gives each rank a part; use tp=1, or set elementwise"),
        # only a run's steps show it
        ("schedule.decay=mine:decay_between", "is 7.0; return"),
    ],
)
def test_problem_of_own_code_is_one_line(
    typed: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the forecast, and before the folder is made, but where only a run's steps show it."""
    out = tmp_path / "run"
    assert main(["pretrain", "model=gpt2_tiny", "data=synthetic", *SHORT, *typed.split(), f"out={out}"]) == 2
    *before, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mlm pretrain: {typed.partition('=')[0]}")
    assert words in line
    if typed.startswith("optimizer.kind=mine:Signed"):
        assert before == []
        assert not out.exists()


def test_class_of_a_trusted_module_cannot_name_another_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST, "mine")
    assert imported("optimizer.kind", "mine:build", ("adamw",)).__name__ == "build"
    with pytest.raises(OwnCodeError):
        imported("optimizer.kind", "mineral:build", ("adamw",))


def test_parameters_of_own_family_are_those_of_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its checkpoints are not taken for damaged ones."""
    monkeypatch.setenv(TRUST, "mine")
    own = ["model=gpt2_tiny", "data=synthetic", "model.kind=mine:FAMILY", "model.options.experts=3"]
    assert main(["pretrain", *own, *SHORT, "train.steps=1", f"out={tmp_path / 'run'}"]) == 0
    named = open_source(str(tmp_path / "run"))
    model, plain = named.config.model, replace(named.config.model, kind="gpt2", options={})
    mlp = 2 * 32 * 128 + 128 + 32  # of one layer of width 32
    assert count_parameters(model) == count_parameters(plain) + 2 * mlp
    manifest = read_manifest(named.path)
    check_stored_parameters(manifest, model, named.path)
    for other in (replace(model, options={"experts": 4}), replace(model, num_layers=10**9)):
        with pytest.raises(CorruptFileError, match="other than the"):
            check_stored_parameters(manifest, other, named.path)


def test_commands_that_read_a_run_take_the_key_of_its_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the error of an import path that is not trusted says."""
    run, kind = tmp_path / "run", "model.kind=mine:FAMILY"
    words = ["model=gpt2_tiny", "data=synthetic", kind, *SHORT, "train.steps=1", f"out={run}"]
    assert main(["pretrain", *words]) == 0
    words = ["export", "hf", str(run), f"out={tmp_path / 'hf'}"]
    for typed in ([], ["model.kind=mine:OTHER"]):
        assert main([*words, *typed]) == 2
        assert f"if you trust it, type {kind} or" in capsys.readouterr().err
    assert main([*words, kind]) == 2
    assert "has no counterpart in transformers" in capsys.readouterr().err
    assert main([*words, "data.sort=mine:FAMILY"]) == 2
    assert "unknown key 'data.sort'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_that_a_run_prints_names_own_code_however_it_was_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved import paths are not followed: what the second attempt prints must name them again."""
    run = tmp_path / "run"
    own = ["optimizer.kind=mine:build", "schedule.decay=mine:decay", "schedule.decay_steps=20"]
    assert pretrain(run, *own, "train.steps=1", "checkpoint.resume=false") == 0
    for _ in range(2):
        line = capsys.readouterr().out.rpartition("train on: ")[2].partition("\n")[0]
        assert main(shlex.split(line)[1:]) == 0
    assert len(losses(run)) == 4
