"""Byte-level BPE: training, files, and text that survives."""

import json
from pathlib import Path

import pytest

from mlm.config.errors import CorruptFileError, UserError
from mlm.data.tokenizer import EOD, Tokenizer, train_bpe

TEXTS = ["the cat sat on the mat, the cat sat", "a cat and a hat on a mat"] * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 270)


@pytest.mark.parametrize("text", ["the cat", " two  spaces\n\n\ttab ", "naïve — 漢字 🙂 \x00", ""])
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_learns_merges_up_to_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 270
    assert len(tokenizer.encode("the cat sat")) < 11


def test_training_twice_gives_the_same_bytes(tokenizer: Tokenizer) -> None:
    assert train_bpe(TEXTS, 270).digest == tokenizer.digest


def test_end_of_document_decodes_to_its_name(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.eod_id]) == EOD


def test_end_of_document_written_in_a_text_is_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a {EOD} b")
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == f"a {EOD} b"


def test_encode_batch_equals_encode(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("name", ["tokenizer.json", ""])
def test_saved_tokenizer_loads_by_file_and_by_folder(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / name)
    assert loaded.digest == tokenizer.digest
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_gpt2_files_give_the_same_tokens_and_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = json.loads(tokenizer._content)["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])))
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.vocab_size, loaded.eod_id) == (270, tokenizer.eod_id)
    assert loaded.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


def test_gpt2_files_are_saved_with_their_special_token(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, EOD: 1}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    Tokenizer.load(tmp_path).save(tmp_path / "tokenizer.json")
    (added,) = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    assert (added["id"], added["content"], added["special"]) == (1, EOD, True)


def test_lengths_set_in_a_file_are_not_applied(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = json.loads(tokenizer._content)
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.load(tmp_path).encode(TEXTS[0])) > 2


@pytest.mark.parametrize("content", [b"{", b'{"model": 1}', b"\xff\xfe", b""])
def test_malformed_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_malformed_merges_are_named(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("x y\n")
    with pytest.raises(CorruptFileError, match=r"merges\.txt"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["absent.json", ""])
def test_missing_tokenizer_is_a_users_mistake(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        Tokenizer.load(tmp_path / name)


def test_tokenizer_without_end_of_document_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="no end-of-document token"):
        Tokenizer(tokenizer._content.replace(EOD, "<|other|>"))


def test_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(UserError, match=r"vocab_size=256.*257"):
        train_bpe(TEXTS, 256)
