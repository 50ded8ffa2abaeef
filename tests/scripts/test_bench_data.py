"""The data benchmarks: tiny runs end with the numbers they promise, and nothing is left on the disk."""

import json
import random
import sys
from pathlib import Path

import bench_data
import pytest
from bench import build_runs
from bench.text_supply import read_passages, write_documents, write_evaluation

from mlm.corpus.train_tokenizer import train_bpe
from mlm.util.errors import UserError


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl of 150 paragraphs of random words, and a tokenizer beside it."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 8))) for _ in range(500)]
    paragraphs = [" ".join(rng.choices(words, k=40)) for _ in range(150)]
    lines = [json.dumps({"text": "\n\n".join(paragraphs[i : i + 10])}) for i in range(0, 150, 10)]
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    train_bpe(paragraphs, 400).save(folder / "tokenizer.json")
    return folder / "text.jsonl"


def run(tmp_path: Path, *words: str, code: int = 0) -> dict[str, object]:
    """The result of a run, which leaves its result file alone."""
    out = tmp_path / "out.json"
    assert bench_data.BENCH.main([*words, "--folder", str(tmp_path), "--out", str(out)]) == code
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    return dict(json.loads(out.read_text()))


@pytest.mark.slow
def test_tokenise_pairs_the_command_with_the_bare_library(tmp_path: Path, text: Path) -> None:
    words = ["--text", str(text), "--mb", "0.02", "--workers", "1", "--rounds", "1", "--target", "0"]
    (row,) = run(tmp_path, "tokenise", "--tokenizer", str(text.parent), *words)["rows"]
    assert row["ratio"]["median"] == pytest.approx(row["bare"][0]["wall"] / row["build"][0]["wall"])


@pytest.mark.slow
def test_memory_sees_the_process_and_counts_what_was_removed(tmp_path: Path, text: Path) -> None:
    words = ["--text", str(text), "--mb", "0.05", "--workers", "1"]
    (row,) = run(tmp_path, "memory", "--tokenizer", str(text.parent), *words)["rows"]
    assert row["peaks"]["main"]["resident"] > 50e6
    assert row["documents"] == row["kept"] + sum(rule["documents"] for rule in row["removed"].values())


def test_growing_memory_misses_the_target() -> None:
    def row(anonymous: int) -> dict[str, object]:
        return {"peaks": {who: {"resident": 9, "anonymous": anonymous} for who in ("main", "worker")}}

    for last, met in ((125, True), (126, False)):
        assert bench_data.is_success({"what": "memory", "rows": [row(100), row(last)]}) == met


def test_peaks_are_those_of_the_largest_descendant() -> None:
    child = "import time; x = b'1' * 100_000_000; time.sleep(0.3); del x; time.sleep(0.2)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    peaks = build_runs.watched([sys.executable, "-c", code], threads=1).peaks
    assert min(peaks["worker"].values()) > 1e8 > peaks["main"]["resident"]


def test_cpu_time_is_that_of_all_descendants() -> None:
    child = "import time; [None for _ in iter(lambda: time.process_time() > 0.5, True)]; time.sleep(0.2)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert 0.5 <= build_runs.watched([sys.executable, "-c", code], threads=1).cpu < 1.5


def test_command_that_fails_is_quoted() -> None:
    words = [sys.executable, "-c", "raise SystemExit('out=x: no space')"]
    for start in (build_runs.finished, build_runs.watched):
        with pytest.raises(UserError, match="ended with 1: out=x: no space"):
            start(words, threads=1)


def test_documents_hold_no_evaluation_text(tmp_path: Path, text: Path) -> None:
    passages = read_passages(text)
    count = write_documents(tmp_path / "documents.jsonl", passages, 100_000)
    write_evaluation(tmp_path / "evaluation.jsonl", passages)
    content = (tmp_path / "documents.jsonl").read_text()
    held_out = [json.loads(line)["text"] for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert (len(held_out), count) == (3, content.count("\n"))
    assert not any(text in content for text in held_out)
