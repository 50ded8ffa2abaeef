"""Splitting a trained model over a layout, and its saved tokenizer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mlm.checkpoint.native.save_load import Manifest, read_manifest
from mlm.checkpoint.parameters import parameters
from mlm.config.build import to_dict
from mlm.convert import source
from mlm.convert.source import Checkpoint, open_source
from mlm.corpus.train_tokenizer import train_bpe
from mlm.data.config import DataConfig
from mlm.data.corpus_files import tokenizer_beside
from mlm.data.tokenizer import Tokenizer
from mlm.data.tokenizer_settings import EOD
from mlm.inference.trained import prediction_problem
from mlm.models.config import ModelConfig
from mlm.parallel.config import ParallelConfig
from mlm.runs.checks import split_problems
from mlm.runs.config import PretrainConfig
from mlm.runs.folder import imported_state, run_config, write_run
from mlm.runs.tokenizer import digests_of_tokenizer, tokenizer_now
from mlm.util.errors import UserError
from tests.convert.hf_models import TEXT
from tests.util.special_files import put

MODEL = ModelConfig(num_layers=6, hidden_size=24, num_heads=4, ffn_hidden_size=60, vocab_size=331)


@pytest.mark.parametrize(
    "layout, problems",
    [
        (ParallelConfig(tp=2, pp=6), []),
        (ParallelConfig(pp=2, zero=3, pipeline="zb_h1", vp=3, sequence_parallel=True), []),
        (
            ParallelConfig(tp=3),
            ["tp=3 does not divide the checkpoint's num_heads=4; use tp=2 or tp=4 (its divisors: 1, 2, 4)"],
        ),
        (ParallelConfig(pp=7), ["pp=7 stages are more than the checkpoint's num_layers=6; use pp=6"]),
    ],
)
def test_split_of_a_trained_model_names_the_nearest_that_works(
    layout: ParallelConfig, problems: list[str]
) -> None:
    assert split_problems(MODEL, layout) == problems


@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_special_file_in_place_of_a_tokenizer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A run's, a corpus's and one that was typed: none is reported as missing, none blocks."""
    checkpoint = tmp_path / "checkpoints/step-00000001"
    put(kind, tmp_path / "tokenizer.json")
    state = {"config": to_dict(PretrainConfig(name="run", out="run", model=MODEL))}
    monkeypatch.setattr(source, "read_manifest", lambda path: Manifest(1, "", {}, {}, state))
    monkeypatch.setattr(source, "check_stored_parameters", lambda *_: None)
    for load in (
        Checkpoint(checkpoint).load_tokenizer,
        lambda: tokenizer_beside(tmp_path),
        lambda: Tokenizer.load(tmp_path),
        lambda: Tokenizer.load(tmp_path / "tokenizer.json"),
    ):
        with pytest.raises(UserError, match=rf"tokenizer\.json: is a {kind}, no regular file"):
            load()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"kind": "bert", "token_types": 2}, "does not read from left to right"),
        ({"head": "classification", "num_labels": 2}, "predicts no tokens"),
    ],
)
def test_a_model_that_cannot_continue_texts_is_rejected(changes: dict[str, Any], problem: str | None) -> None:
    found = prediction_problem("runs/a", replace(MODEL, **changes), causal=True)
    assert found is None if problem is None else problem in (found or "")


# ----- the end of a document in a vocabulary with none of the usual names


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer.json whose only special token is [DOC]."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe([TEXT] * 5, 300).content.replace(EOD.encode(), b"[DOC]"))
    return path


def test_an_import_records_tokenizer_and_end_of_document(tokenizer: Path, tmp_path: Path) -> None:
    named = Tokenizer.load(tokenizer, eod="[DOC]")
    (tmp_path / "run").mkdir()
    run = write_run(
        tmp_path / "run",
        {f"model.{name}": one for name, one in parameters(MODEL).items()},
        lambda name, part: torch.zeros(part.size),
        state=imported_state(run_config("zeros", MODEL), {"kind": "test"}, ()),
        tokenizer=named,
    )
    assert read_manifest(run).state["tokenizer"] == digests_of_tokenizer(named).encode()
    source = open_source(str(run))
    assert source.load_tokenizer().eod_id == source.load_tokenizer(str(tokenizer)).eod_id == named.eod_id


def test_a_run_takes_the_end_of_document_of_its_corpus(tokenizer: Path, tmp_path: Path) -> None:
    eod_id = Tokenizer.load(tokenizer, eod="[DOC]").eod_id
    (tmp_path / "corpus.json").write_text(json.dumps({"vocab_size": 300, "eod_id": eod_id}))
    for data in (DataConfig(path=str(tmp_path)), DataConfig(tokenizer=str(tokenizer), eod_id=eod_id)):
        found = tokenizer_now(data)
        assert found is not None
        assert found.eod_id == eod_id
