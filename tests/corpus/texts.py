"""Text and builds for the tests of this folder."""

import io
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mlm.corpus.build import run_build
from mlm.corpus.config import DataBuildConfig, DecontaminateConfig, DedupConfig, FilterConfig, NormaliseConfig
from mlm.corpus.train_tokenizer import train_bpe
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import Receipt
from mlm.data.tokenizer import Tokenizer
from mlm.util.terminal import Screen

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
TEXTS = ["the cat sat", "é on the mat", "a hat", "the rat", "sat in the hat", "that cat"]


def words(rng: random.Random, count: int) -> list[str]:
    """So many made-up words: two texts of them share no 5-gram but by rare chance."""
    return ["".join(rng.choices(SYLLABLES, k=3)) for _ in range(count)]


def with_changes(text: Sequence[str], every: int) -> list[str]:
    """The same words, every so-manieth replaced."""
    return [f"x{word}" if i % every == every // 2 else word for i, word in enumerate(text)]


def write_jsonl(path: Path, texts: Sequence[str], **more: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text} | {key: values[i] for key, values in more.items()} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def quiet() -> Screen:
    return Screen(file=io.StringIO(), width=200, highlight=False, markup=False, soft_wrap=True)


def build(config: DataBuildConfig) -> Receipt:
    return run_build(config, quiet())


def keep_work(patch: pytest.MonkeyPatch) -> None:
    """Leave the files between the stages of a build where they are."""
    patch.setattr("mlm.corpus.build.delete_owned", lambda *_, **__: None)


def small_tokenizer(folder: Path) -> Path:
    """tokenizer.json that knows all bytes."""
    path = folder / "tokenizer.json"
    if not path.exists():
        path.write_bytes(train_bpe([" ".join(words(random.Random(0), 2000))], 400).content)
    return path


def plain(source: Path, **changes: Any) -> DataBuildConfig:
    """Settings of a build that takes documents as they are, into `out` beside the source."""
    root = source.parent
    config = DataBuildConfig(
        input=str(source),
        tokenizer=str(small_tokenizer(root)),
        out=str(root / "out"),
        split="1,0,0",
        normalise=NormaliseConfig(ftfy=False),
        filter=FilterConfig(min_tokens=None),
        dedup=DedupConfig(enabled=False),
        workers=1,
    )
    return replace(config, **changes)


def thorough(source: Path, **changes: Any) -> DataBuildConfig:
    """Settings that use every stage, on documents of some dozens of words."""
    against = source.parent / "evaluation.txt"
    config = plain(
        source,
        split="0.8,0.1,0.1",
        normalise=NormaliseConfig(),
        filter=FilterConfig(min_tokens=20),
        dedup=DedupConfig(),
        decontaminate=DecontaminateConfig(against=(str(against),), margin=10, min_piece=20),
    )
    return replace(config, **changes)


@contextmanager
def interrupted(at: str) -> Iterator[None]:
    """Within, Ctrl-C comes as a function is called, and ends what was begun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(at, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            yield


def documents(prefix: Path) -> list[str]:
    """The documents of a corpus as text, their ends written out."""
    corpus, tokenizer = IndexedDataset(prefix), Tokenizer.load(prefix.parent)
    bounds = corpus.document_starts.tolist()
    return [tokenizer.decode(corpus.tokens[a:b].tolist()) for a, b in pairwise(bounds)]


def output(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}
