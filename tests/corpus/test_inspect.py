"""`mlm data inspect`: counts against NumPy's, and what is safe to print."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm.cli.data.run import run_inspect
from mlm.cli.data.settings import DataInspectConfig
from mlm.corpus.train_tokenizer import train_bpe
from mlm.data.indexed import IndexedWriter, token_dtype
from tests.data.corpora import write_corpus


def inspected(path: Path, **keys: Any) -> dict[str, Any]:
    """The facts of the only corpus at `path`."""
    out = path.parent / "facts.json"
    run_inspect(DataInspectConfig(path=str(path), out=str(out), **keys))
    (facts,) = json.loads(out.read_text())["corpora"]
    return dict(facts)


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_lengths_are_those_of_numpy(tmp_path: Path, count: int) -> None:
    lengths = np.random.default_rng(count).integers(0, 90, count).tolist()
    write_corpus(tmp_path / "c", [[5] * length for length in lengths])
    found = inspected(tmp_path / "c")["tokens_per_document"]
    assert (found["min"], found["max"]) == (min(lengths), max(lengths))
    assert found["median"] == sorted(lengths)[(count - 1) // 2]
    assert found["mean"] == pytest.approx(np.mean(lengths))


def test_sequences_documents_and_ends_are_counted(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text('{"vocab_size": 400, "eod_id": 300}')
    with IndexedWriter(tmp_path / "c", token_dtype(400)) as writer:
        writer.add_document([1, 2, 300], [1, 2])
        writer.add_document([300, 4])
        writer.add_document([])
        writer.add_document([5, 6, 300], [1, 1, 1])
    found = inspected(tmp_path / "c")
    assert (found["sequences"], found["documents"], found["tokens"]) == (7, 4, 8)
    assert (found["ends_with_eod"], found["looked_at"]) == (0.5, 4)


def test_samples_are_text_and_cannot_steer_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = train_bpe(["a b c"], 260)
    tokenizer.save(tmp_path)
    write_corpus(tmp_path / "c", [tokenizer.encode("red \x1b[31m [bold] text")])
    (sample,) = inspected(tmp_path / "c")["samples"]
    shown = capsys.readouterr().out
    assert sample["text"] == "red \x1b[31m [bold] text"
    assert "\x1b" not in shown
    assert r"red \x1b[31m [bold] text" in shown


def test_corpus_without_a_tokenizer_shows_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "c", [[11, 22, 33]])
    (sample,) = inspected(tmp_path / "c")["samples"]
    assert (sample["text"], sample["ids"]) == (None, [11, 22, 33])
    assert "set tokenizer=" in capsys.readouterr().out
