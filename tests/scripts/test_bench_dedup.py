"""The benchmark of deduplication: what it plants, how it counts, and how it ends."""

import json
from pathlib import Path

import bench_dedup
import numpy as np
import pytest
from bench.dedup_corpus import Corpus, plant, score, similar_pairs


def paragraphs(num_words: int) -> list[str]:
    """Made-up text: paragraphs of 60 words."""
    drawn = np.minimum(np.random.default_rng(6).zipf(1.3, num_words), 30_000).tolist()
    return [" ".join(f"w{n}" for n in drawn[i : i + 60]) for i in range(0, num_words, 60)]


def test_planted_similarities_spread_over_the_range_asked_for() -> None:
    corpus = plant(paragraphs(60_000), seed=1)
    pairs = similar_pairs(corpus.texts, "word", least=0.0)
    similarities = np.array([pairs[pair] for pair in corpus.planted])
    for low in np.arange(0.5, 0.95, 0.05):
        assert np.mean((similarities > low) & (similarities < low + 0.05)) > 0.02
    assert all(90 <= len(text.split()) <= 1200 for text in corpus.texts)


def test_similar_pairs_are_those_of_sets_compared_one_by_one() -> None:
    texts = ["a b c d e f", "a b c d e f g", "a b c d e", "x y", "x  Y!"]
    assert similar_pairs(texts, "word", least=0.1) == {
        (0, 1): pytest.approx(2 / 3),
        (0, 2): 0.5,
        (1, 2): pytest.approx(1 / 3),
        (3, 4): 1.0,
    }


def test_score_counts_pairs_and_partners_that_stay() -> None:
    corpus = Corpus(["a", "b", "c", "d"], [(0, 1), (2, 3)])
    pairs = {(0, 1): 0.8, (2, 3): 0.6, (1, 2): 0.75}
    found = score(corpus, pairs, {1, 3}, threshold=0.7)
    assert found["recall"] == 1  # of (0, 1)
    assert found["precision"] == 0.5  # 3 has no partner above 0.7
    assert score(corpus, pairs, set(), threshold=0.7)["recall"] == 0


def test_it_ends_with_numbers_and_names_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = tmp_path / "text.jsonl", tmp_path / "out.json"
    text.write_text(json.dumps({"text": "\n\n".join(paragraphs(20_000))}) + "\n")
    monkeypatch.setattr("bench.dedup_contenders.find_spec", lambda name: name if name == "rensa" else None)
    assert bench_dedup.BENCH.main(["--text", str(text), "--rounds", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["contenders"]["mlm"]["precision"] == 1
    assert result["left_out"]["datasketch"] == "not installed: datasketch"
    assert "datasketch left out: not installed: datasketch" in capsys.readouterr().out


def test_it_ends_with_1_where_pairs_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "\n\n".join(paragraphs(20_000))}) + "\n")
    monkeypatch.setattr("bench.dedup_contenders.find_spec", lambda name: name if name == "rensa" else None)
    words = ["--text", str(text), "--rounds", "1", "--bands", "1", "--rows", "20"]
    assert bench_dedup.BENCH.main(words) == 1
