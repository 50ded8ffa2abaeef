"""The benchmark of scoring: what it asks of both sides, and how it ends."""

import json
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="lm-eval's own hf model needs it: pip install 'lm-eval[hf]'")
pytest.importorskip("lm_eval", reason="pip install 'mlm[lm-eval]'")

import bench_eval

from tests.checkpoint.commands.hf_models import TEXT, add_tokenizer


def test_it_ends_with_a_ratio_and_answers_that_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio of so small a model is not judged, only the exit code."""
    monkeypatch.setattr(bench_eval, "TARGETS", {"lambada": 0.0, "wikitext": 0.0})
    add_tokenizer(tmp_path)
    (tmp_path / "lambada.jsonl").write_text(json.dumps({"text": " ".join(TEXT.split())}) + "\n")
    (tmp_path / "wiki.tokens").write_text(f" = One = \n\n {TEXT}\n\n = Two = \n\n {TEXT} {TEXT}\n")
    words = f"--layers 1 --hidden 64 --positions 32 --rounds 1 --threads 1 --hf-batches 1 --articles 1 \
        --tokenizer {tmp_path / 'tokenizer.json'} --lambada {tmp_path / 'lambada.jsonl'} \
        --wikitext {tmp_path / 'wiki.tokens'} --out {tmp_path / 'out.json'}"
    assert bench_eval.BENCH.main(words.split()) == 0
    tasks = json.loads((tmp_path / "out.json").read_text())["tasks"]
    assert [tasks[name]["requests"] for name in ("lambada", "wikitext")] == [1, 1]
    assert all(task["agree"] and task["ratio"]["median"] > 0 for task in tasks.values())


def test_nothing_to_score_is_a_mistake() -> None:
    assert bench_eval.BENCH.main([]) == 2
