"""The account of a build: what came in, what went out and why."""

import bz2
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mlm.cli.data.run import run_verify
from mlm.cli.data.settings import DataVerifyConfig
from mlm.corpus.build import run_build
from mlm.corpus.config import DecontaminateConfig, FilterConfig
from mlm.corpus.stages import clean as clean_stage
from mlm.corpus.train_tokenizer import train_bpe
from mlm.data.indexed import IndexedDataset
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError
from tests.corpus.texts import (
    build,
    documents,
    plain,
    quiet,
    thorough,
    with_changes,
    words,
    write_jsonl,
)

END = "<|endoftext|>"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Documents that exercise every rule; one that is cut has a piece that is too short."""
    rng = random.Random(1)
    leak = words(rng, 40)
    originals = [words(rng, 60) for _ in range(8)]
    texts = [" ".join(text) + " “quoted”" for text in originals]
    texts += [" ".join(with_changes(text, 50)) for text in originals[:2]]
    texts += ["too short", "", "  "]
    texts += [" ".join([*words(rng, 50), *leak[:20], *words(rng, 8), *leak[20:], *words(rng, 40)])]
    texts += [" ".join(leak)]
    (tmp_path / "evaluation.txt").write_text(" ".join(leak[:20]) + "\n" + " ".join(leak[20:]) + "\n")
    write_jsonl(tmp_path / "text/a.jsonl", texts)
    return tmp_path / "text"


def test_receipt_balances_in_documents_and_bytes(source: Path) -> None:
    receipt = build(thorough(source, split="1,0,0"))
    removed, kept, cut = receipt["removed"].values(), receipt["splits"]["train"], receipt["cut"]
    assert {"near_duplicate", "min_tokens", "empty", "contaminated"} <= receipt["removed"].keys()
    assert (cut["documents"], cut["pieces"]) == (1, 3)
    assert receipt["removed"]["min_tokens"]["pieces"] == 1
    documents = sum(count["documents"] for count in removed)
    pieces = sum(count.get("pieces", 0) for count in removed)
    whole = kept["documents"] - (cut["pieces"] - pieces)
    assert receipt["read"]["documents"] == documents + cut["documents"] + whole
    assert receipt["fixed"]["bytes"] == -32  # curly quotes take three bytes each
    assert (
        receipt["read"]["bytes"] + receipt["fixed"]["bytes"]
        == sum(count["bytes"] for count in removed) + cut["bytes"] + kept["bytes"]
    )


@pytest.mark.parametrize("size", ["equal", "shorter"])
def test_file_rewritten_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "six"])
    content = path.read_bytes().replace(b"six", b"ten" if size == "equal" else b"")
    read_shard, before = clean_stage.read_shard, path.stat()

    def read_and_rewrite(*args: Any, **kwargs: Any) -> Any:
        documents = read_shard(*args, **kwargs)
        yield next(documents)
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        yield from documents

    with monkeypatch.context() as patch:
        patch.setattr(clean_stage, "read_shard", read_and_rewrite)
        with pytest.raises(UserError, match=r"a\.jsonl changed while the build read it"):
            run_build(plain(path), quiet())
    build(plain(path))
    assert documents(tmp_path / "out/train")[:2] == [f"one{END}", f"two{END}"]


@pytest.mark.parametrize(
    ("name", "between"), [("a.txt", "\n\n"), ("a.txt.bz2", "\n"), ("a.txt", " ")], ids=repr
)
def test_one_text_file_builds(tmp_path: Path, name: str, between: str) -> None:
    """Consecutive parts make it up, split where a paragraph, a line or a word ends."""
    text = between.join(" ".join(words(random.Random(i), 20)) for i in range(60))
    content = text.encode()
    (tmp_path / name).write_bytes(bz2.compress(content) if name.endswith("bz2") else content)
    small = plain(tmp_path / name, split="0.98,0.01,0.01", filter=FilterConfig())
    receipt = build(small)
    parts = [documents(tmp_path / "out" / part) for part in ("train", "validation", "test")]
    assert "".join(piece.removesuffix(END) for part in parts for piece in part) == text
    assert all(len(part) == 1 for part in parts)
    for piece in (parts[0][0], parts[1][0]):
        assert piece.removesuffix(END).endswith(between)
    held_out = [receipt["splits"][part]["bytes"] for part in ("validation", "test")]
    assert all(len(text) * 0.09 < size < len(text) * 0.13 for size in held_out)


def test_end_of_document_token_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "named.json"
    path.write_bytes(train_bpe([" ".join(words(random.Random(0), 500))], 300).content)
    path.write_text(path.read_text().replace(END, "<stop>"))
    source = write_jsonl(tmp_path / "t.jsonl", ["one", "two"])
    with pytest.raises(UserError, match="no end-of-document token"):
        run_build(plain(source, tokenizer=str(path)), quiet())
    with pytest.raises(UserError, match="eod=<end> is not a token of"):
        run_build(plain(source, tokenizer=str(path), eod="<end>"), quiet())
    receipt = build(plain(source, tokenizer=str(path), eod="<stop>"))
    tokens = IndexedDataset(tmp_path / "out/train").document(0).tolist()
    assert tokens[-1] == receipt["eod_id"] == Tokenizer.load(path, eod="<stop>").eod_id
    run_verify(DataVerifyConfig(path=str(tmp_path / "out")))


@pytest.mark.parametrize(
    "hide",
    [
        lambda text: "\u00ad".join((text[:7], text[7:30], text[30:])),
        lambda text: "".join(letter + "\u200b\ufeff" * (i % 5 == 0) for i, letter in enumerate(text)),
        lambda text: "".join(chr(ord(c) + 0xFEE0) if c.isalpha() else c for c in text),
    ],
    ids=["soft hyphens", "zero width", "full width"],
)
def test_evaluation_text_in_disguise_is_cut_out(tmp_path: Path, hide: Any) -> None:
    rng = random.Random(3)
    leak = " ".join(words(rng, 20))
    (tmp_path / "evaluation.txt").write_text(leak + "\n")
    before, after = " ".join(words(rng, 20)) + "…", "½ " + " ".join(words(rng, 20))
    source = write_jsonl(tmp_path / "t.jsonl", [f"{before} {hide(leak)} {after}"])
    against = DecontaminateConfig(against=(str(tmp_path / "evaluation.txt"),), margin=0, min_piece=1)
    build(plain(source, decontaminate=against))
    assert documents(tmp_path / "out/train") == [before + END, after + END]
