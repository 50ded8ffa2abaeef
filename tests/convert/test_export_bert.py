"""`mlm export hf` of a BERT: import, export, and import by `transformers`."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mlm.checkpoint.native.format import read_manifest
from mlm.data.tokenizer import Tokenizer
from tests.convert.hf_berts import add_word_pieces, make_bert
from tests.convert.hf_models import edit_config, export_model, import_model


def test_auto_tokenizer_reads_pairs_as_berts_does(tmp_path: Path) -> None:
    make_bert(tmp_path / "model", "bert", "Model")
    add_word_pieces(tmp_path / "model")
    run = import_model(tmp_path / "model", tmp_path / "run", verify=False)
    out = export_model(run, tmp_path / "out", verify=False)
    theirs, ours = AutoTokenizer.from_pretrained(out), Tokenizer.load(run)
    pair = theirs("The fox", "jumps again")
    first, second = ours.encode("The fox"), ours.encode("jumps again")
    assert pair["input_ids"] == [ours.cls_id, *first, ours.sep_id, *second, ours.sep_id]
    assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert [theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id, theirs.pad_token_id] == [
        ours.cls_id,
        ours.sep_id,
        ours.mask_id,
        ours.pad_id,
    ]
    assert (theirs.unk_token, theirs.model_max_length) == ("[UNK]", 48)


NAMES = {"0": "no", "1": "yes", "2": "maybe"}


def test_padding_and_names_of_labels_come_back(tmp_path: Path) -> None:
    model = make_bert(tmp_path / "model", "bert", "ForSequenceClassification", num_labels=3, pad_token_id=7)
    edit_config(tmp_path / "model", id2label=NAMES, label2id={name: int(n) for n, name in NAMES.items()})
    run = import_model(tmp_path / "model", tmp_path / "run", verify=False)
    back = type(model.config).from_pretrained(export_model(run, tmp_path / "out", verify=False))
    assert back.pad_token_id == 7
    assert back.id2label == {int(n): name for n, name in NAMES.items()}
    assert back.label2id == {"no": 0, "yes": 1, "maybe": 2}


@pytest.mark.parametrize(
    ("name", "said", "note"),
    [
        ("Model", {"id2label": NAMES}, "id2label is not kept: there is no classifier"),
        ("ForSequenceClassification", {"id2label": {"0": "no", "2": "yes"}}, "it does not give 2 labels a"),
        ("Model", {"pad_token_id": 331}, "pad_token_id=331 is not kept: the model reads ids from 0 to 330"),
    ],
)
def test_padding_and_names_that_are_not_kept_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: dict[str, Any], note: str
) -> None:
    make_bert(tmp_path / "model", "bert", name)
    edit_config(tmp_path / "model", **said)
    run = import_model(tmp_path / "model", tmp_path / "run", verify=False)
    assert note in capsys.readouterr().out
    source = read_manifest(run / "checkpoints/step-00000000").state["source"]
    assert "labels" not in source
    assert source.get("pad_token_id") != 331
