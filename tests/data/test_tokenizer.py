"""Tokenizers: files of all kinds, ids equal to transformers', and text that survives."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizerFast, GPT2TokenizerFast

from mlm.corpus.train_tokenizer import train_bpe, train_wordpiece
from mlm.data.tokenizer import Tokenizer
from mlm.data.tokenizer_settings import EOD
from mlm.data.vocabulary_files import BERT_SPECIAL
from mlm.util.errors import CorruptFileError, UserError
from tests.data.chats import NAMED, TEMPLATES, theirs, write_tokenizer

TEXTS = ["the cat sat on the mat, the cat sat", "a cat and a hat on a mat"] * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 270)


@pytest.mark.parametrize("text", ["the cat", " two  spaces\n\n\ttab ", "naïve — 漢字 🙂 \x00", ""])
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lengths_and_dropout_set_in_a_file_are_not_applied(tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = json.loads(tokenizer._content)
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("tokenizer.json", content) for content in (b"{", b'{"model": 1}', b"\xff\xfe", b"")),
        ("merges.txt", b"x y\n"),
        ("tokenizer_config.json", b"{"),
    ],
)
def test_malformed_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    if name == "merges.txt":
        (tmp_path / "vocab.json").write_text('{"a": 0}')
    if name == "tokenizer_config.json":
        write_vocabulary(tmp_path, PIECES)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["absent.json", ""])
def test_missing_tokenizer_is_a_users_mistake(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        Tokenizer.load(tmp_path / name)


def test_vocabulary_below_the_bytes_or_letters_is_rejected() -> None:
    with pytest.raises(UserError, match=r"vocab_size=256.*257"):
        train_bpe(TEXTS, 256)
    with pytest.raises(UserError, match=r"vocab_size=20 .* set vocab_size to \d+ or more"):
        train_wordpiece(lambda: TEXTS, 20)


VARIED = [
    "the cat sat",
    "  Two  SPACES\n\n\ttab \r\n end ",
    "Ünïcödé Ñandú, ﬁne — 漢字かな 🙂🏽 \u200b e\u0301",
    "don't; I'll (e.g.) 3.14 a_b [x] ##hat <s>",
    "a" * 300,
    "",
    "\x00\ufffd\xa0",
]
PIECES = ["the", "cat", "sat", "##s", "a", "##a", "h", "##at", "un", "##e", "two", "e", "3", ".", "漢"]
PIECES += ["#", "["]


def write_vocabulary(folder: Path, names: list[str]) -> Path:
    path = folder / "vocab.txt"
    path.write_text("\n".join([*BERT_SPECIAL, *names]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("lowercase", [True, False])
def test_ids_of_a_vocab_txt_are_those_of_transformers(tmp_path: Path, lowercase: bool) -> None:
    path = write_vocabulary(tmp_path, [*PIECES, *([] if lowercase else ["Two", "I"])])
    theirs = BertTokenizerFast(vocab=str(path), do_lower_case=lowercase)
    ours = Tokenizer.load(path)
    for text in VARIED:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_ids_of_gpt2_files_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model, (vocab, merges) = json.loads(tokenizer._content)["model"], ("vocab.json", "merges.txt")
    (tmp_path / vocab).write_text(json.dumps(model["vocab"]))
    (tmp_path / merges).write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])) + "\n")
    theirs = GPT2TokenizerFast(vocab=str(tmp_path / vocab), merges=str(tmp_path / merges))
    ours = Tokenizer.load(tmp_path)
    for text in VARIED:
        assert ours.encode(text) == theirs.encode(text), text


def test_special_tokens_of_bert_are_known_and_those_that_megatron_adds(tmp_path: Path) -> None:
    loaded = Tokenizer.load(write_vocabulary(tmp_path, PIECES))
    found = (loaded.pad_id, loaded.cls_id, loaded.sep_id, loaded.mask_id, loaded.eod_id, loaded.bos_id)
    assert found == (0, 2, 3, 4, 3, None)
    loaded = Tokenizer.load(write_vocabulary(tmp_path, [*PIECES, "[BOS]", "[EOS]"]))
    assert (loaded.bos_id, loaded.eod_id) == (loaded.vocab_size - 2, loaded.vocab_size - 1)


def test_words_start_at_bytes_after_white_space_and_pieces_without_a_mark(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for text in (" ", "\n", "\t"):
        assert tokenizer.is_word_start[tokenizer.encode(text)[0]]
    assert not tokenizer.is_word_start[tokenizer.encode("x")[0]]
    assert tokenizer.is_word_start[tokenizer.eod_id]
    loaded = Tokenizer.load(write_vocabulary(tmp_path, PIECES))
    expected = [True] * 5 + [not name.startswith("##") for name in PIECES]
    assert loaded.is_word_start.tolist() == expected


@pytest.mark.parametrize("lowercase", [True, False])
def test_config_beside_a_vocabulary_decides_on_case_and_accents(tmp_path: Path, lowercase: bool) -> None:
    path, config = write_vocabulary(tmp_path, ["the", "The", "é"]), tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"do_lower_case": lowercase}))
    assert Tokenizer.load(path).encode("The") == [5 if lowercase else 6]
    config.write_text('{"do_lower_case": true, "strip_accents": false}')
    assert Tokenizer.load(path).encode("É") == [7]


def test_settings_and_added_tokens_beside_a_vocabulary_are_kept(tmp_path: Path) -> None:
    """As transformers reads the same folders: add_prefix_space, tokenize_chinese_chars, added_tokens.json."""
    gpt2, bert = tmp_path / "gpt2", tmp_path / "bert"
    for folder in (gpt2, bert):
        folder.mkdir()
    letters = {name: id for id, name in enumerate(["a", "b", "\u0120", "ab", "\u0120ab", EOD])}
    (gpt2 / "vocab.json").write_text(json.dumps(letters))
    (gpt2 / "merges.txt").write_text("#version: 0.2\na b\n\u0120 ab\n")
    (gpt2 / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    (gpt2 / "added_tokens.json").write_text('{"<x>": 6, "<y>": 7}')
    tokenizer = Tokenizer.load(gpt2)
    assert tokenizer.encode("ab ab") == [4, 4]
    assert tokenizer.encode_special("<y>")[-1:] == [7]
    (bert / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n\u65e5\u672c\n")
    (bert / "tokenizer_config.json").write_text('{"tokenize_chinese_chars": false}')
    assert Tokenizer.load(bert).encode("\u65e5\u672c") == [5]
    (bert / "added_tokens.json").write_text('{"<x>": 9}')
    with pytest.raises(CorruptFileError, match="has id 9, 6 comes next"):
        Tokenizer.load(bert)


SAMPLES = ["It's 12345 cats.\n\n they'll", " é漢 \t x", "a  b", "", "the mat. \r\n\r\n\U0001f600"]


@pytest.mark.parametrize("style", TEMPLATES)
def test_text_equals_that_of_transformers(tmp_path: Path, style: str) -> None:
    folder = write_tokenizer(tmp_path, style)
    ours, other = Tokenizer.load(folder), theirs(folder)
    for text in SAMPLES:
        ids = ours.encode(text)
        assert ids == other.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == other.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    "files, eod",
    [
        ({"config.json": {"eos_token_id": [2, 4]}}, "<|im_end|>"),
        (
            {"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [0]}},
            "<|endoftext|>",
        ),
        ({"config.json": {}, "generation_config.json": {"eos_token_id": [2]}}, "<|im_end|>"),
        (
            {"config.json": {}, "tokenizer_config.json": {"eos_token": {"content": "<|im_start|>"}}},
            "<|im_start|>",
        ),
        ({"config.json": {}, "tokenizer_config.json": {}}, "<|endoftext|>"),
    ],
    ids=["config", "an ordinary token", "generation", "as an object", "by name"],
)
def test_end_of_document_is_that_of_the_model_folder(
    tmp_path: Path, files: dict[str, dict[str, Any]], eod: str
) -> None:
    """Of the special tokens; ids 0, 1, 2 stand for those of the folder's tokenizer in their order."""
    folder = write_tokenizer(tmp_path, "qwen2", **NAMED["qwen2"])
    first = Tokenizer.load(folder).vocab_size - 3
    for name, values in files.items():
        ids = values.get("eos_token_id")
        shifted = [first + id for id in ids] if isinstance(ids, list) else ids
        (folder / name).write_text(json.dumps({**values, "eos_token_id": shifted}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.name_of(tokenizer.eod_id) == eod
    assert Tokenizer.load(folder, eod="<|im_start|>").eod_id == first + 1  # what is asked for comes first
