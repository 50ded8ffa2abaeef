"""`mlm data tokenizer`: inputs, conversion, and training as a function of the text alone."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlm.cli.data.run import run_tokenizer
from mlm.cli.data.settings import DataTokenizerConfig
from mlm.data.tokenizer import Tokenizer
from mlm.data.vocabulary_files import BERT_SPECIAL
from mlm.util.errors import UserError
from tests.corpus.texts import write_jsonl

LEARN = """
import sys
from mlm.corpus.train_tokenizer import train_bpe, train_wordpiece
texts = open(sys.argv[1], encoding="utf-8").read().splitlines()
print(train_bpe(texts, 400).digest, train_wordpiece(lambda: texts, 400).digest)
"""


def made(source: Path, out: Path, **keys: Any) -> Tokenizer:
    config = DataTokenizerConfig(input=str(source), out=str(out), **{"vocab_size": 300, **keys})
    return Tokenizer.load(run_tokenizer(config))


def test_training_is_a_function_of_the_text_alone(tmp_path: Path) -> None:
    """In processes of their own: each has hash tables of another order, and other threads."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijkléö", k=rng.randint(1, 7))) for _ in range(300)]
    text = tmp_path / "text"
    text.write_text("\n".join(" ".join(rng.choices(words, k=20)) for _ in range(200)), encoding="utf-8")
    runs = [
        subprocess.run(
            [sys.executable, "-c", LEARN, str(text)],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    ]
    assert len(set(runs)) == 1


def test_held_out_parts_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    write_jsonl(folder / "train.jsonl", ["aa aa aa"] * 9)
    write_jsonl(folder / "validation.jsonl", ["zz zz zz"] * 9)
    assert len(made(folder, tmp_path / "out").encode("zz")) == 2
    assert len(made(folder, tmp_path / "out").encode("aa")) == 1


def test_wordpiece_is_trained_where_asked(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["The Cat sat"] * 5)
    cased = made(tmp_path / "a.jsonl", tmp_path / "cased", kind="wordpiece", lowercase=False)
    lower = made(tmp_path / "a.jsonl", tmp_path / "lower", kind="wordpiece")
    assert cased.decode(cased.encode("The Cat")) == "The Cat"
    assert lower.decode(lower.encode("The Cat")) == "the cat"
    assert [lower.id_of(name) for name in BERT_SPECIAL] == [0, 1, 2, 3, 4]


def test_vocabulary_of_bert_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*BERT_SPECIAL, "the", "cat"]) + "\n")
    assert made(folder, tmp_path / "out").encode("the cat") == [5, 6]


def test_bad_line_is_named_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nnonsense\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2"):
        made(tmp_path / "a.jsonl", tmp_path / "out")


def test_another_tokenizer_is_not_overwritten(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["the cat sat"] * 5)
    made(tmp_path / "a.jsonl", tmp_path / "out")
    with pytest.raises(UserError, match="is another tokenizer"):
        made(tmp_path / "a.jsonl", tmp_path / "out", vocab_size=258)
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(UserError, match="exists and is not a tokenizer"):
        made(tmp_path / "a.jsonl", tmp_path / "mine.json")


def test_name_of_another_kind_of_file_becomes_no_folder(tmp_path: Path) -> None:
    name = "vocab.txt"
    write_jsonl(tmp_path / "a.jsonl", ["the cat sat"] * 9)
    with pytest.raises(UserError) as caught:
        made(tmp_path / "a.jsonl", tmp_path / name, kind="wordpiece")
    assert str(caught.value) == (
        f"out={tmp_path / name}: would be a folder of that name: a tokenizer is one tokenizer.json, its "
        f"settings included; use out={tmp_path / 'tokenizer.json'}"
    )
    assert not (tmp_path / name).exists()


def test_vocabulary_that_the_text_does_not_support_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", ["one word and another"])
    learned = made(source, tmp_path / "a.json", vocab_size=1000).vocab_size
    line = f"vocab_size=1000 is more than the text supports: {learned} tokens were learned"
    assert line in capsys.readouterr().out
    made(source, tmp_path / "b.json", vocab_size=learned)
    made(tmp_path / "b.json", tmp_path / "c.json", vocab_size=1000)  # imported, not learned
    assert "supports" not in capsys.readouterr().out
