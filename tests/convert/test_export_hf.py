"""`mlm export hf`: a folder that `transformers` loads as the model it is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from mlm.cli.convert.run import preflight_export_hf
from mlm.cli.convert.settings import ExportHFConfig
from mlm.convert import conversion
from mlm.convert import source as sources
from mlm.convert.config import ConvertConfig
from mlm.convert.huggingface.folder import read_model
from mlm.convert.source import open_source
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError
from mlm.verify.huggingface import reference_outputs
from tests.convert.hf_models import (
    TEXT,
    add_tokenizer,
    edit_config,
    edit_tensors,
    export_model,
    import_model,
    make_model,
)


@pytest.fixture
def model(tmp_path: Path) -> GPT2LMHeadModel:
    model = make_model(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    return model


@pytest.fixture
def run(model: GPT2LMHeadModel, tmp_path: Path) -> Path:
    return import_model(tmp_path / "model", tmp_path / "run", verify=False)


def state(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = GPT2LMHeadModel.from_pretrained(folder, use_safetensors=True).state_dict()
    return weights


def test_import_and_export_give_back_every_bit(model: GPT2LMHeadModel, run: Path, tmp_path: Path) -> None:
    out = export_model(run, tmp_path / "out", max_file_gb=2e-5)
    found, want = state(out), model.state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_config_is_that_of_the_imported_model(model: GPT2LMHeadModel, run: Path, tmp_path: Path) -> None:
    out = export_model(run, tmp_path / "out", verify=False)
    found, want = GPT2Config.from_pretrained(out).to_dict(), model.config.to_dict()
    eod_id = Tokenizer.load(run).eod_id
    assert found["bos_token_id"] == found["eos_token_id"] == eod_id
    differing = {"bos_token_id", "eos_token_id", "_name_or_path", "transformers_version", "dtype"}
    assert found.keys() | differing == want.keys() | differing
    assert all(found[key] == want[key] for key in found.keys() - differing)


def test_auto_tokenizer_reads_text_as_ours_does(run: Path, tmp_path: Path) -> None:
    out = export_model(run, tmp_path / "out", verify=False)
    theirs, ours = AutoTokenizer.from_pretrained(out), Tokenizer.load(run)
    ids = theirs(TEXT)["input_ids"]
    assert ids == ours.encode(TEXT)
    assert theirs.decode(ids) == TEXT
    assert (theirs.eos_token_id, theirs.model_max_length) == (ours.eod_id, 48)


def test_model_without_a_tokenizer_is_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "tokenizer.json").unlink()
    out = export_model(run, tmp_path / "out")
    assert "note: no tokenizer" in capsys.readouterr().out
    files = [".mlm.json", "README.md", "config.json", "model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == files


def test_a_model_of_mup_is_neither_exported_nor_converted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = open_source(str(run)).config
    config = replace(config, model=replace(config.model, mup_base_width=8))
    monkeypatch.setattr(sources, "trained_config", lambda *_: config)
    exported = preflight_export_hf(ExportHFConfig(ckpt=str(run), out=str(tmp_path / "out")))
    to = ConvertConfig(source=str(run), out=str(tmp_path / "out"), to="hf")
    for (problem,) in (exported, conversion.preflight(to)):
        assert "model.mup_base_width=8 divides what the output layer reads" in problem


class TestHeads:
    """Those for finetuning."""

    @pytest.mark.parametrize(
        ("name", "head"), [("SequenceClassification", "classification"), ("QuestionAnswering", "span")]
    )
    def test_it_comes_in_and_goes_out(self, tmp_path: Path, name: str, head: str) -> None:
        model = make_model(
            tmp_path / "model",
            kind=f"GPT2For{name}",
            **({"num_labels": 3} if head == "classification" else {}),
        )
        run = import_model(tmp_path / "model", tmp_path / "run")
        assert open_source(str(run)).config.model.head == head
        back = type(model).from_pretrained(export_model(run, tmp_path / "out")).state_dict()
        assert all(torch.equal(value, back[key]) for key, value in model.state_dict().items())

    def test_padding_comes_back_with_its_name(self, tmp_path: Path) -> None:
        """The classifier looks for the last token that is not this one."""
        folder = tmp_path / "model"
        make_model(folder, kind="GPT2ForSequenceClassification", num_labels=3, pad_token_id=0)
        add_tokenizer(folder)
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        backend.add_special_tokens(["<|pad|>"])
        backend.save(str(folder / "tokenizer.json"))
        pad = backend.token_to_id("<|pad|>")
        edit_config(folder, pad_token_id=pad)
        out = export_model(import_model(folder, tmp_path / "run", verify=False), tmp_path / "out")
        assert GPT2Config.from_pretrained(out).pad_token_id == pad
        assert AutoTokenizer.from_pretrained(out).pad_token == "<|pad|>"

    def biased(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Any = lambda tensors: None
    ) -> Path:
        """The run directory of a classifier whose bias was trained."""
        make_model(tmp_path / "model", kind="GPT2ForSequenceClassification", num_labels=3)
        edit_tensors(tmp_path / "model", edit)
        values = lambda model, names, seed: {name: torch.tensor([1.0, -2.0, 0.5]) for name in names}  # noqa: E731
        monkeypatch.setattr("mlm.convert.targets.initial_values", values)
        return import_model(tmp_path / "model", tmp_path / "run", verify=False)

    def test_bias_that_has_no_place_is_carried_by_the_norm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = self.biased(tmp_path, monkeypatch)
        out = export_model(run, tmp_path / "out")  # compares logits
        assert "note: the classifier's bias" in capsys.readouterr().out
        logits = [reference_outputs(read_model(folder))["logits"] for folder in (out, tmp_path / "model")]
        want = torch.tensor([1.0, -2.0, 0.5]).expand(2, 3)
        torch.testing.assert_close(logits[0] - logits[1], want, rtol=0, atol=1e-5)

    def test_bias_that_cannot_be_carried_is_rejected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two labels with the same weights."""
        run = self.biased(tmp_path, monkeypatch, lambda t: t["score.weight"][0].copy_(t["score.weight"][1]))
        with pytest.raises(UserError, match="has no bias in its classifier"):
            export_model(run, tmp_path / "out")
        assert not (tmp_path / "out").exists()
