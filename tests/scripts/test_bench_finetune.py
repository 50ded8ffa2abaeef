"""The benchmark of finetuning: the same rows and weights for both sides, and what is counted. No time is
asserted."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import bench_finetune
import pytest
import torch
from bench import finetune_peer, finetune_runs
from bench.finetune_runs import (
    Finetune,
    Outcome,
    hidden_difference,
    run_mlm,
    seconds_of,
    task_facts,
    write_subset,
)
from omegaconf import OmegaConf
from transformers import AutoModel, BertTokenizerFast

from mlm.config.cli import main
from mlm.util.errors import UserError
from tests.checkpoint.commands.hf_berts import make_bert

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very", "##ly", "."]
TEXTS = ["a good film .", "bad", "very very bad film", "good good"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a tiny BERT with its tokenizer, as `transformers` saves both."""
    folder = tmp_path_factory.mktemp("bert")
    make_bert(folder, "bert", "Model", vocab_size=len(WORDS))
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizerFast.from_pretrained(folder).save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A folder whose rows have the columns of both tasks."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, count in (("train", 12), ("validation", 5)):
        pairs = ({"sentence1": TEXTS[i % 4], "sentence2": TEXTS[i % 3]} for i in range(count))
        rows = (
            {"sentence": TEXTS[i % 4], **pair, "label": (i + 1) % 2, "idx": i} for i, pair in enumerate(pairs)
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(model: Path, data: Path, task: str, dtype: str = "fp32") -> Finetune:
    return Finetune(
        model=str(model),
        data=str(data),
        **task_facts(task),
        epochs=2,
        batch=4,
        lr=1e-3,
        warmup=0.1,
        weight_decay=0.1,
        seed=1,
        dtype=dtype,
        threads=1,
    )


def test_seconds_are_those_of_every_step() -> None:
    """A logged step tells the mean of the steps since the one before."""
    records: list[dict[str, object]] = [
        {"kind": "run"},
        {"kind": "step", "step": 1, "step_time_s": 5.0},
        {"kind": "scores", "step": 3},
        {"kind": "step", "step": 4, "step_time_s": 2.0},
    ]
    assert seconds_of(records) == 11.0


def test_a_subset_is_drawn_by_its_seed(rows: Path, tmp_path: Path) -> None:
    def chosen(seed: int) -> list[int]:
        write_subset(rows, 6, seed, tmp_path / "out")
        return [json.loads(line)["idx"] for line in (tmp_path / "out/train.jsonl").read_text().splitlines()]

    assert chosen(1) == chosen(1) != chosen(2)
    assert len(set(chosen(1))) == 6
    assert (tmp_path / "out/validation.jsonl").read_text() == (rows / "validation.jsonl").read_text()


@pytest.mark.parametrize(("count", "name"), [(13, "rows"), (1, "nowhere")])
def test_rows_that_are_not_there_are_rejected(count: int, name: str, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--rows 13 is more than the 12|--data .*nowhere"):
        write_subset(rows.with_name(name), count, 0, tmp_path / "out")


def test_both_sides_begin_with_equal_hidden_states(model: Path) -> None:
    assert hidden_difference(model, TEXTS) < 1e-5


def test_another_model_shows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = AutoModel.from_pretrained

    def changed(folder: Path) -> torch.nn.Module:
        found: torch.nn.Module = load(folder)
        with torch.no_grad():
            found.get_parameter("encoder.layer.0.attention.self.query.weight").mul_(1.1)
        return found

    monkeypatch.setattr(AutoModel, "from_pretrained", changed)
    assert hidden_difference(model, TEXTS) > finetune_runs.HIDDEN_TOLERANCE


def assert_of_five(accuracies: Sequence[float], epochs: int) -> None:
    """A score of the 5 rows that were held out after each epoch."""
    assert len(accuracies) == epochs
    assert [5 * each for each in accuracies] == pytest.approx([round(5 * each) for each in accuracies])


@pytest.mark.parametrize(
    ("task", "dtype"),
    [pytest.param("sst2", "fp32", marks=pytest.mark.slow), ("rte", "fp32"), ("rte", "bf16")],
)
def test_the_plain_loop_trains_on_all_rows(
    task: str, dtype: str, model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(asdict(settings(model, rows, task, dtype))))
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "settings.json"), str(tmp_path / "result.json")])
    finetune_peer.main()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["rows"] == 2 * 12
    assert result["train_s"] > 0
    assert_of_five(result["accuracies"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sst2", "rte"])
def test_the_command_trains_on_all_rows(
    task: str, model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: starting another is slow."""

    def here(command: Sequence[str], threads: int) -> tuple[float, float]:
        assert command[:3] == [sys.executable, "-m", "mlm"]
        assert main([*command[3:]]) == 0
        return 1.0, 1.0

    monkeypatch.setattr(finetune_runs, "timed_process", here)
    found = run_mlm(settings(model, rows, task), tmp_path / "run", ["log.every=2"])
    assert found.rows == 2 * 12
    assert found.train_s > 0
    assert_of_five(found.accuracies, 2)
    config = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert config.task.name == task
    assert (config.optimizer.lr, config.train.epochs, config.dist.threads_per_rank) == (1e-3, 2, 1)


def test_a_failed_run_says_why() -> None:
    program = "import sys; print('mlm finetune: no such key', file=sys.stderr); sys.exit(2)"
    with pytest.raises(UserError, match=r"ended with 2: mlm finetune: no such key"):
        finetune_runs.timed_process([sys.executable, "-c", program], 1)


@pytest.mark.parametrize(("rate", "code"), [(1.5, 0), (1.3, 1)])
def test_pairs_alternate_and_the_ratio_decides(
    rate: float, code: int, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def fake(name: str, train_s: float) -> Outcome:
        ran.append(name)
        return Outcome(train_s, 12, (0.8, 0.7), 2 * train_s, train_s)

    def mlm(settings: Finetune, out: Path, overrides: Sequence[str]) -> Outcome:
        return fake("mlm", 1 / rate)

    monkeypatch.setattr(bench_finetune, "run_mlm", mlm)
    monkeypatch.setattr(bench_finetune, "run_peer", lambda settings, out: fake("transformers", 1.0))
    monkeypatch.setattr(bench_finetune, "hidden_difference", lambda model, texts: 0.0)
    words = ["--model", str(tmp_path), "--data", str(rows), "--rows", "12", "--pairs", "2"]
    assert bench_finetune.BENCH.main([*words, "--out", str(tmp_path / "out.json")]) == code
    assert ran == ["mlm", "transformers", "transformers", "mlm"]
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["ratio"]["median"] == pytest.approx(rate)
    assert (result["accuracy"]["mlm"], result["accuracy_last"]["mlm"]) == (0.8, 0.7)
    assert str(tmp_path) not in (tmp_path / "out.json").read_text()  # no folder of this machine


def test_two_models_are_not_timed(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_finetune, "hidden_difference", lambda model, texts: float("nan"))
    assert bench_finetune.BENCH.main(["--model", str(tmp_path), "--data", str(rows), "--rows", "4"]) == 1


@pytest.mark.parametrize("words", [["--rows", "0"], ["--rows", "99"], ["--out", "nowhere/out.json"]])
def test_a_mistake_is_reported_by_the_exit_code(words: list[str], model: Path, rows: Path) -> None:
    assert bench_finetune.BENCH.main(["--model", str(model), "--data", str(rows), *words]) == 2
