"""A chat template is kept from import to export, with the tokens that end an answer."""

import json
from pathlib import Path

import pytest

import mlm
from mlm.cli import main
from tests.data.chats import CHATML, TALK, theirs
from tests.finetune.chats import write_llama


def test_template_survives_import_and_export(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source")
    mlm.import_hf(source, tmp_path / "run", verify=False)
    mlm.export_hf(tmp_path / "run", tmp_path / "exported", verify=False)
    rendered = [
        theirs(folder).apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
        for folder in (source, tmp_path / "exported")
    ]
    assert rendered[0]["input_ids"] == rendered[1]["input_ids"]
    assert rendered[0]["assistant_masks"] == rendered[1]["assistant_masks"]
    ends = json.loads((tmp_path / "exported" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == theirs(source).convert_tokens_to_ids("<|im_end|>")


def test_template_that_cannot_be_read_is_left_out_of_an_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_llama(tmp_path / "source", CHATML + "{% if %}")
    assert main(["import", "hf", str(source), f"out={tmp_path / 'run'}", "verify=false"]) == 0
    assert "the chat template was not taken: " in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "run" / "chat_template.jinja").exists()
