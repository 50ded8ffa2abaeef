"""The identity of a run: keys that may not change on resume, keys that may, and a record of changes."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native.save_load import read_manifest, save_checkpoint
from mlm.checkpoint.parameters import model_shards
from mlm.config.build import to_dict
from mlm.config.tree import leaves
from mlm.data.config import DataConfig
from mlm.finetune import inputs
from mlm.finetune.config import FinetuneConfig
from mlm.parallel.mesh import shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.identity import (
    DATA,
    FREE,
    FUNCTION_KEYS,
    IDENTITY,
    RECORDED,
    changes_since,
    identity_errors,
)
from mlm.training.preflight import run_start_problems
from mlm.training.resume import resume
from mlm.training.trainer import Trainer
from mlm.util.ownership import claim_folder
from tests.training.saving import save
from tests.training.test_trainer import config, steps_of

MAY_CHANGE = (
    *("name", "out", "seeds", "compile", "profile", "data.predict_tests"),
    *("tp", "cp", "pp", "vp", "dp", "ep", "expert_tp", "sequence_parallel", "tp_overlap", "pipeline", "zero"),
    *("zero_reduce", "recompute", "recompute_budget"),
    *("precision.initial_loss_scale", "precision.min_loss_scale", "precision.loss_scale_window"),
    "precision.cast",
)
MAY_CHANGE_SECTIONS = ("checkpoint.", "log.", "incident.", "check.", "dist.")
"""Keys of finetuning that may change in a run directory."""


def bert() -> PretrainConfig:
    """A run that every key of the identity counts for."""
    base = config()
    model = replace(base.model, kind="bert", token_types=2)
    return replace(base, model=model, data=DataConfig(seq_length=8, mask_eod_loss=True, eod_id=1))


def put(saved: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        saved = saved[part]
    saved[name] = value


def test_every_key_of_a_pretraining_run_is_of_one_kind() -> None:
    assert sorted([*IDENTITY, *DATA, *FREE, *RECORDED]) == sorted(leaves(PretrainConfig))


def test_every_key_of_a_finetuning_run_is_fixed_may_change_or_counts_by_content() -> None:
    for key in leaves(FinetuneConfig):
        fixed = key in inputs.FIXED or (key.startswith(inputs.FIXED_SECTIONS) and key not in inputs.FREE)
        free = key in (*inputs.FREE, *MAY_CHANGE) or key.startswith(MAY_CHANGE_SECTIONS)
        by_content = key in ("ckpt", "data.tokenizer", "data.path", "data.chat_template")
        assert fixed or free or by_content, f"{key} is not classified"
        assert not (fixed and by_content)


@pytest.mark.parametrize("key", IDENTITY)
def test_another_value_of_any_key_of_the_identity_is_an_error_that_names_both(key: str) -> None:
    saved = to_dict(bert())
    put(saved, key, 77)
    (error,) = identity_errors(bert(), saved, "the run in runs/a")
    assert error.startswith(f"{key}=")
    assert "was trained with 77" in error


def test_all_differences_that_count_are_reported_at_once() -> None:
    """Masking does not count for GPT-2; a default spelt out is no difference."""
    for spec, count in ((bert(), 3), (config(), 2)):
        saved = to_dict(spec)
        for key in ("seed", "model.num_heads", "data.short_seq_prob"):
            put(saved, key, 77)
        saved["model"]["ffn_hidden_size"] = 4 * spec.model.hidden_size
        assert len(identity_errors(spec, saved, "the run")) == count


def test_end_of_documents_that_a_new_switch_fills_in_is_no_second_difference() -> None:
    """The run before had no switch, and therefore no id; nobody typed one."""
    saved = to_dict(bert())
    put(saved, "data.mask_eod_loss", False)
    put(saved, "data.eod_id", None)
    (error,) = identity_errors(bert(), saved, "runs/a")
    assert error.startswith("data.mask_eod_loss=true")


def test_what_may_change_is_recorded_from_and_to() -> None:
    saved = copy.deepcopy(to_dict(config()))
    saved["optimizer"]["lr"], saved["log"]["every"] = 0.5, 77
    (change,) = changes_since(config(), saved, 12)
    assert change == {"step": 12, "key": "optimizer.lr", "from": 0.5, "to": config().optimizer.lr}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = claim_folder(tmp_path_factory.mktemp("run"), "run")
    trainer = Trainer(spec(out), shape_context())
    steps_of(trainer, 2)
    save(trainer, out)
    return out


def spec(out: Path, **model: Any) -> PretrainConfig:
    base = config(dtype="fp32", dropout=0.1)
    return replace(base, out=str(out), model=replace(base.model, **model))


def test_weights_begin_a_fresh_run_only_as_the_same_function(run: Path, tmp_path: Path) -> None:
    """Seed, dropout and data are the new run's own."""
    given = Trainer(spec(tmp_path / "given"), shape_context())
    state = {"weights_only": True, "config": to_dict(given.config)}
    alone: dict[str, Any] = {"keep_last": 1, "keep_every": 0}
    save_checkpoint(tmp_path / "given/checkpoints", 0, model_shards(given.shards), state=state, **alone)
    fresh = replace(spec(tmp_path / "new", hidden_dropout=0.3), ckpt=str(tmp_path / "given"), seed=9)
    assert run_start_problems(fresh) == []
    (error,) = run_start_problems(replace(fresh, model=replace(fresh.model, num_heads=2)))
    assert error.startswith("model.num_heads=2: the weights in")
    assert "model.num_heads" in FUNCTION_KEYS
    (error,) = run_start_problems(replace(fresh, model=replace(fresh.model, num_heads=2, num_layers=1)))
    layers = given.config.model.num_layers
    assert error.endswith(f"or set model.num_layers={layers} model.num_heads={given.config.model.num_heads}")


def test_changes_are_kept_in_every_later_checkpoint(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "next"
    origin = replace(spec(out).checkpoint, from_run=str(run))
    again = replace(spec(out), checkpoint=origin, optimizer=replace(spec(out).optimizer, lr=0.125))
    trainer = Trainer(again, shape_context())
    assert resume(trainer) is not None
    for _ in range(2):
        steps_of(trainer, 1)
        path = save(trainer, out)
    changes = read_manifest(path).state["lineage"]["changes"]
    assert [(c["step"], c["key"], c["to"]) for c in changes] == [
        (2, "optimizer.lr", 0.125),
        (2, "out", str(out)),
    ]


def test_option_of_the_family_is_of_the_identity_and_its_default_may_be_spelt_out() -> None:
    model = replace(config().model, kind="llama", activation="silu", options={"num_experts": 8})
    run = replace(config(), model=model)
    saved = to_dict(run)
    for options, count in (({"num_experts": 16}, 1), ({"num_experts": 8, "tied": False}, 0), ({}, 1)):
        other = replace(run, model=replace(model, options=options))
        assert len(identity_errors(other, saved, "runs/a")) == count, options
