"""Encoding from a cache of words gives the ids of the library, for every kind of tokenizer and text."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from mlm.corpus.train_tokenizer import train_wordpiece
from mlm.data import encoding_cache
from mlm.data.encoding_cache import KEY_BYTES, PATTERNS, chunk_starts, is_cacheable
from mlm.data.tokenizer import Tokenizer

SAMPLE = (
    "It's a test, isn't it? We'll see:  two spaces,\ta tab; 12345 numbers.\n\nNew paragraph\nnew line \n\r\n"
    "(brackets) [more] naïve cafés — “quotes” don't DON'T e\u0301 snake_case a/b/c http://x.org/a?b=c&d=1,\nAnd"
)
PIECES = ["a", "b", "Ab", "it", "ll", "s", "S", "é", "e\u0301", "\u0301", "中", "1", "23", "_", "🙂", "\x00"]
GAPS = [*" \n\t\r',.;:!?-/()\"<>|", "\u00a0", "\u2028", "", "'s", "'LL", ", ", ".\n", "\n\n", "  ", " \n"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.sampled_from(GAPS), max_size=40).map("".join)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    isolated = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([isolated, BYTE_LEVEL])


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}

SPLITTERS = {
    "gpt2": GPT2,
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    **{f"pattern{number}": split(pattern) for number, pattern in enumerate(sorted(PATTERNS))},
}


@cache
def trained(name: str) -> dict[str, Any]:
    if name == "wordpiece":
        return json.loads(train_wordpiece(lambda: [SAMPLE] * 3, 200).content)  # type: ignore[no-any-return]
    backend = Backend(models.BPE())
    backend.pre_tokenizer = SPLITTERS[name]
    if name == "digits":
        backend.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special)
    backend.train_from_iterator([SAMPLE] * 3, trainer)
    return json.loads(backend.to_str())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [*SPLITTERS, "wordpiece"])
@settings(deadline=None, max_examples=60)
@given(texts=st.lists(TEXTS | st.text(), max_size=3))
def test_ids_are_those_of_the_library(name: str, texts: list[str]) -> None:
    content = trained(name)
    assert is_cacheable(content)
    library, tokenizer = Backend.from_str(json.dumps(content)), Tokenizer(json.dumps(content))
    library.encode_special_tokens = True
    expected = [encoding.ids for encoding in library.encode_batch([*texts, SAMPLE], add_special_tokens=False)]
    for _ in range(2):  # the second time from the cache
        assert [ids.tolist() for ids in tokenizer.encode_batch([*texts, SAMPLE])] == expected


def test_the_library_encodes_a_chunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(json.dumps(trained("gpt2")))
    first = tokenizer.encode_batch([SAMPLE])
    cache = tokenizer.encode_batch.__self__  # type: ignore[attr-defined]
    monkeypatch.setattr(cache, "_encode", None)  # raises if it is asked
    assert tokenizer.encode_batch([SAMPLE]) == first
    assert len(chunk_starts(SAMPLE.encode())) > 30


def test_chunks_of_every_length_are_told_apart() -> None:
    """Those that end in NUL too, of a key's bytes or more."""
    tokenizer = Tokenizer(json.dumps(content := trained("gpt2")))
    lengths = [*range(KEY_BYTES + 3), 255, 256, 257, 1000]
    texts = [letter * length for letter in ("\x00", "a", "é", " ") for length in lengths]
    library = Backend.from_str(json.dumps(content))
    expected = [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]
    for batch in (texts, texts[::-1]):
        ids = [ids.tolist() for ids in tokenizer.encode_batch(batch)]
        assert dict(zip(batch, ids, strict=True)) == dict(zip(texts, expected, strict=True))


def test_a_full_cache_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_cache, "SIZE", 3)
    tokenizer = Tokenizer(json.dumps(trained("gpt2")))
    first = tokenizer.encode_batch([SAMPLE])
    assert tokenizer.encode_batch([SAMPLE]) == first
    assert tokenizer.encode_batch.__self__._size == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": METASPACE},
        {"pre_tokenizer": None},
        {"pre_tokenizer": json.loads(pre_tokenizers.ByteLevel().__getstate__())},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a b"}, "content": "c"}},
        {"added_tokens": [("a b", {})]},
        {"added_tokens": [("a,", {})]},
        {"added_tokens": [("<x>", {"rstrip": True})]},
        # found inside the special token's name in a chunk alone: the library passes over the whole name
        {"added_tokens": [("end", {})]},
        {"added_tokens": [("\u212a-", {"normalized": True})], "normalizer": {"type": "NFC"}},
        {"normalizer": json.loads(normalizers.BertNormalizer().__getstate__())},
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "BertPreTokenizer"}},
    ],
    ids=str,
)
def test_a_tokenizer_whose_words_may_cross_is_encoded_by_the_library(change: dict[str, Any]) -> None:
    content = trained("gpt2") | change
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    if "added_tokens" in change:
        added = [{"id": 400, "content": name} | plain | more for name, more in change["added_tokens"]]
        content["added_tokens"] = [*trained("gpt2")["added_tokens"], *added]
    tokenizer, library = Tokenizer(json.dumps(content)), Backend.from_str(json.dumps(content))
    library.encode_special_tokens = True
    assert not is_cacheable(content)
    texts = ["a b, a,<x> b", "a\nb <|endoftext|> K-", "d<\u0338", SAMPLE]
    expected = [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected
