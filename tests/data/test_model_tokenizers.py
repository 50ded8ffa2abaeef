"""Tokenizers in the style of Llama, Qwen and Mistral, and the end of a document by a model folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlm.data.tokenizer import Tokenizer
from tests.data.chats import NAMED, SPECIAL, TEMPLATES, theirs, write_tokenizer

TEXTS = ["It's 12345 cats.\n\n they'll", " é漢 \t x", "a  b", "", "the mat. \r\n\r\n\U0001f600"]


@pytest.mark.parametrize("style", TEMPLATES)
def test_text_equals_that_of_transformers(tmp_path: Path, style: str) -> None:
    folder = write_tokenizer(tmp_path, style)
    ours, other = Tokenizer.load(folder), theirs(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == other.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == other.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("style", TEMPLATES)
def test_special_tokens_in_a_text_are_tokens_only_when_asked_for(tmp_path: Path, style: str) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, style))
    text = "".join(SPECIAL[style])
    assert not tokenizer.special_ids & set(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)).strip() == text
    assert set(tokenizer.encode_special(text)) >= tokenizer.special_ids


@pytest.mark.parametrize(
    "files, eod",
    [
        ({"config.json": {"eos_token_id": [2, 4]}}, "<|im_end|>"),
        (
            {"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [0]}},
            "<|endoftext|>",
        ),
        ({"config.json": {}, "generation_config.json": {"eos_token_id": [2]}}, "<|im_end|>"),
        ({"config.json": {"eos_token_id": None}}, "<|im_end|>"),
        (
            {"config.json": {}, "tokenizer_config.json": {"eos_token": {"content": "<|im_start|>"}}},
            "<|im_start|>",
        ),
        ({"config.json": {}, "tokenizer_config.json": {}}, "<|endoftext|>"),
        ({}, "<|endoftext|>"),
    ],
    ids=["config", "an ordinary token", "generation", "tokenizer", "as an object", "by name", "no model"],
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
