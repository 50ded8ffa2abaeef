"""No text becomes a special token, whatever the tokenizer; ordinary text is encoded as the library does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from mlm.cli import main
from mlm.data.indexed import IndexedDataset
from mlm.data.tokenizer import Tokenizer

LETTERS = "▁abcehtdofxnSEPCLKIM<>|/_[]s ."
TEXTS = ["a cat sat on the mat.", "  two  spaces ", "bed [x] <b> ", "</ s> <|end", "", "unknown: é漢"]


def unigram(*, special: bool | None = None, name: str = "</s>") -> Backend:
    """Pieces for every letter and for the name; `special`: whether it is an added token too."""
    pieces = [("<unk>", 0.0), (name, -0.5), ("▁cat", -1.0), *((letter, -3.0) for letter in LETTERS)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    if special is not None:
        backend.add_tokens([AddedToken(name, special=special, normalized=False)])
    return backend


def bpe(*merges: tuple[str, str], ignore_merges: bool = False, added: bool | None = None) -> Backend:
    """Letters and merges; `added`: whether the end of a document is an added token, and special."""
    joined = ["".join(pair) for pair in merges]
    vocabulary = {name: id for id, name in enumerate(dict.fromkeys([*LETTERS, *joined, "<s>"]))}
    model = models.BPE(vocabulary, list(merges), ignore_merges=ignore_merges, unk_token=None)
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")
    if added is not None:
        backend.add_tokens([AddedToken("</s>", special=added, normalized=False)])
        backend.add_tokens([AddedToken("<|user|>", special=False, normalized=False)])
    return backend


def words(kind: type[Any]) -> Backend:
    """Whole words, split at white space alone."""
    names = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "cat", "a", "##t", "<b>"]
    backend = Backend(kind({name: id for id, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


SPELT = (("<", "/"), ("</", "s"), ("</s", ">"))
KINDS: dict[str, Callable[[], Backend]] = {
    "unigram": unigram,
    "unigram, added": lambda: unigram(special=False),
    "unigram, added as special": lambda: unigram(special=True),
    "unigram, GPT-2's name": lambda: unigram(special=False, name="<|endoftext|>"),
    "merges that spell it": lambda: bpe(*SPELT),
    "merges that spell more": lambda: bpe(*SPELT, ("</s>", "x")),
    "whole words before merges": lambda: bpe(*SPELT, ignore_merges=True),
    "added as an ordinary token": lambda: bpe(("a", "t"), added=False),
    "added as a special token": lambda: bpe(("a", "t"), added=True),
    "word pieces": lambda: words(models.WordPiece),
    "words": lambda: words(models.WordLevel),
}


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_written_in_a_text_are_text(kind: str) -> None:
    """Alone, between words, inside a word, doubled; by each way to encode."""
    tokenizer = Tokenizer(KINDS[kind]().to_str())
    ids = {tokenizer.eod_id, tokenizer.bos_id, tokenizer.sep_id, tokenizer.cls_id, tokenizer.mask_id} - {None}
    names = [name for name, id in tokenizer._vocabulary.items() if id in ids]
    texts = [text for n in names for text in (n, f"a {n} cat", f"a{n}b", f"{n}{n}", f" {n}\n", f"{n}x")]
    assert texts
    found = [tokenizer.encode(text) for text in texts]
    assert [text for text, one in zip(texts, found, strict=True) if ids & set(one)] == []
    assert [list(one) for one in tokenizer.encode_batch(texts)] == found
    assert [one.tolist() for one, _ in tokenizer.encode_with_offsets(texts)] == found


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_text_is_encoded_as_by_the_library(kind: str) -> None:
    backend = KINDS[kind]()
    tokenizer = Tokenizer(backend.to_str())
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids, text


def test_added_tokens_that_are_not_special_stay_tokens() -> None:
    tokenizer = Tokenizer(KINDS["added as an ordinary token"]().to_str())
    ids = tokenizer.encode("a <|user|> </s>")
    assert tokenizer._vocabulary["<|user|>"] in ids
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode([tokenizer.eod_id]) == "</s>"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A corpus of documents that hold the end of a document as text, by a Unigram tokenizer."""
    (tmp_path / "tokenizer.json").write_text(unigram(special=False).to_str())
    rows = [{"text": f"a cat </s> and </s></s> {n}"} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "corpus"
    words = ["input=" + str(tmp_path / "rows.jsonl"), f"tokenizer={tmp_path / 'tokenizer.json'}"]
    split = ["split=1/0/0", "recipe=plain", "workers=1"]
    assert main(["data", "build", *words, f"out={out}", *split]) == 0
    return out


def test_a_built_corpus_holds_one_end_for_each_document(built: Path) -> None:
    """And verify counts them: with one more, written into a file that is otherwise listed, it fails."""
    receipt = json.loads((built / "corpus.json").read_text())
    corpus = IndexedDataset(built / "train")
    assert receipt["splits"]["train"]["end_tokens"] == corpus.num_documents == 6
    assert (corpus.tokens == receipt["eod_id"]).sum() == 6
    assert main(["data", "verify", str(built)]) == 0


def test_verify_counts_the_ends_of_documents(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlm.data.receipt import file_entry

    tokens = bytearray((built / "train.bin").read_bytes())
    receipt = json.loads((built / "corpus.json").read_text())
    tokens[0:2] = receipt["eod_id"].to_bytes(2, "little")
    (built / "train.bin").write_bytes(tokens)
    receipt["files"]["train.bin"] = file_entry(built / "train.bin")
    (built / "corpus.json").write_text(json.dumps(receipt))
    assert main(["data", "verify", str(built)]) == 1
    assert "7 end_tokens, corpus.json records 6" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "tokenizer.json"])
def test_verify_reads_no_file_of_another_size(
    built: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 GiB without content would take minutes to read."""
    with open(built / name, "r+b") as f:
        f.truncate(1 << 34)
    assert main(["data", "verify", str(built)]) == 1
    assert name in capsys.readouterr().err
