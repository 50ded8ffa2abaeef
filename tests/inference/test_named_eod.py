"""The end-of-document token of a run whose vocabulary has none of the usual names."""

import json
from pathlib import Path

import pytest
import torch

from mlm.checkpoint.native.save_load import read_manifest
from mlm.checkpoint.parameters import parameters
from mlm.convert.source import open_source
from mlm.corpus.train_tokenizer import train_bpe
from mlm.data.config import DataConfig
from mlm.data.tokenizer import Tokenizer
from mlm.data.tokenizer_settings import EOD
from mlm.runs.folder import imported_state, run_config, write_run
from mlm.runs.tokenizer import digests_of_tokenizer, tokenizer_now
from tests.convert.hf_models import MODEL, TEXT

NAME = "[DOC]"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer.json whose only special token is [DOC]."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe([TEXT] * 5, 300).content.replace(EOD.encode(), NAME.encode()))
    return path


def test_an_import_records_tokenizer_and_end_of_document(tokenizer: Path, tmp_path: Path) -> None:
    named = Tokenizer.load(tokenizer, eod=NAME)
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
    eod_id = Tokenizer.load(tokenizer, eod=NAME).eod_id
    (tmp_path / "corpus.json").write_text(json.dumps({"vocab_size": 300, "eod_id": eod_id}))
    for data in (DataConfig(path=str(tmp_path)), DataConfig(tokenizer=str(tokenizer), eod_id=eod_id)):
        found = tokenizer_now(data)
        assert found is not None
        assert found.eod_id == eod_id
