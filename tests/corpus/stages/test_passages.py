"""Documents too few for the parts, which are split into passages."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm.corpus.build import run_build
from mlm.corpus.config import DataBuildConfig, DecontaminateConfig, FilterConfig, NormaliseConfig
from mlm.data.config import SPLITS
from mlm.data.corpus_files import split_of_document
from mlm.util.errors import UserError
from tests.corpus.texts import (
    build,
    documents,
    interrupted,
    output,
    plain,
    quiet,
    small_tokenizer,
    words,
    write_jsonl,
)

END = "<|endoftext|>"


def long_text(seed: int, paragraphs: int) -> str:
    return "\n\n".join(" ".join(words(random.Random((seed << 16) + i), 40)) for i in range(paragraphs))


def defaults(source: Path, **changes: Any) -> DataBuildConfig:
    config = DataBuildConfig(
        input=str(source),
        tokenizer=str(small_tokenizer(source.parent)),
        out=str(source.parent / "out"),
        normalise=NormaliseConfig(ftfy=False),
        workers=1,
    )
    return replace(config, **changes)


def write_texts(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:02d}.txt").write_text(text)
    return folder


def put_together(out: Path) -> list[str]:
    """The documents of a corpus, as the passages of the three parts make them up."""
    parts = [[text.removesuffix(END) for text in documents(out / part)] for part in SPLITS]
    assert len({len(part) for part in parts}) == 1
    return ["".join(passages) for passages in zip(*parts, strict=True)]


@pytest.mark.parametrize(("split", "form"), [("0.98,0.01,0.01", "txt"), ("0.5/0.25/0.25", "jsonl")])
def test_few_documents_build_at_defaults(tmp_path: Path, split: str, form: str) -> None:
    """Each gives all parts a passage that ends with a paragraph."""
    # a large share may give every part a document of 22 by luck, never of two
    texts = [long_text(number, 60) for number in range(22 if split.startswith("0.98") else 2)]
    source = tmp_path / "texts"
    if form == "txt":
        write_texts(source, texts)
    else:
        write_jsonl(source / "a.jsonl", texts)
    screen = quiet()
    receipt = run_build(defaults(source, split=split), screen)
    assert f"{len(texts)} documents are too few for split={split}" in screen.file.getvalue()
    assert put_together(tmp_path / "out") == texts
    for part in SPLITS[:2]:
        assert all(text.removesuffix(END).endswith("\n\n") for text in documents(tmp_path / "out" / part))
    assert receipt["passages"] == {"documents": len(texts), "pieces": 3 * len(texts)}
    shares = [receipt["splits"][part]["bytes"] / receipt["read"]["bytes"] for part in SPLITS[1:]]
    # a passage begins before the share does, by up to a paragraph of 1.6 % of its text
    expected = [max(float(share), 0.01) for share in split.replace("/", ",").split(",")[1:]]
    assert all(share <= found < share + 0.04 for share, found in zip(expected, shares, strict=True))


def test_documents_enough_for_every_part_stay_whole(tmp_path: Path) -> None:
    texts = [long_text(number, 4) for number in range(12)]
    seed = next(
        seed
        for seed in range(100)
        if {split_of_document(text.encode(), (0.6, 0.2, 0.2), seed) for text in texts} == set(SPLITS)
    )
    receipt = build(defaults(write_texts(tmp_path / "texts", texts), split="0.6,0.2,0.2", seed=seed))
    assert receipt["passages"] is None
    kept = [text.removesuffix(END) for part in SPLITS for text in documents(tmp_path / "out" / part)]
    assert sorted(kept) == sorted(texts)


@pytest.mark.parametrize("min_tokens, kept", [("auto", 3), (50, 3), (2000, 1)])
def test_a_number_of_min_tokens_holds_for_passages_and_the_default_is_off(
    tmp_path: Path, min_tokens: Any, kept: int
) -> None:
    source = tmp_path / "a.txt"
    source.write_text(" ".join(words(random.Random(0), 1000)))  # held out: 600 bytes, some 100 tokens, each
    config = defaults(source, filter=FilterConfig(min_tokens=min_tokens))
    if kept == 1:
        with pytest.raises(UserError, match=r"min_tokens 2 pieces"):
            build(config)
    else:
        assert build(config)["splits"]["test"]["documents"] == 1


def test_evaluation_text_is_cut_from_passages(tmp_path: Path) -> None:
    shared = " ".join(words(random.Random(99_999), 20))
    paragraphs = long_text(0, 60).split("\n\n")
    text = "\n\n".join([*paragraphs[:20], shared, *paragraphs[20:-1], shared, paragraphs[-1]])
    source = write_texts(tmp_path / "texts", [text])
    (tmp_path / "evaluation.txt").write_text(shared + "\n")
    against = DecontaminateConfig(
        against=(str(tmp_path / "evaluation.txt"),), margin=0, min_piece=1, parts=("train",)
    )
    receipt = build(defaults(source, decontaminate=against))
    assert receipt["cut"]["pieces"] == 2
    held_out = [text for part in SPLITS[1:] for text in documents(tmp_path / "out" / part)]
    assert sum(shared in text for text in held_out) == 1
    assert not any(shared in text for text in documents(tmp_path / "out/train"))


def test_kill_between_the_passes_changes_nothing(tmp_path: Path) -> None:
    texts = [long_text(number, 20) for number in range(3)]
    config = defaults(write_texts(tmp_path / "texts", texts))
    build(replace(config, out=str(tmp_path / "unhurt")))
    with interrupted("mlm.corpus.stages.tokenise.passages_of"):
        build(config)
    build(replace(config, workers=2))
    assert output(tmp_path / "out") == output(tmp_path / "unhurt")
    assert not (tmp_path / "out/work").exists()


def test_texts_that_are_all_too_short_name_the_rule(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "texts", ["a haiku", "and another"])
    with pytest.raises(UserError, match=r"min_tokens 2\); loosen the rules \(filter.min_tokens=null\)"):
        build(defaults(source))
    build(plain(source, split="0.98,0.01,0.01"))
    assert put_together(tmp_path / "out") == ["a haiku", "and another"]
