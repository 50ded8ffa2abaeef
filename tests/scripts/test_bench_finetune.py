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
from bench.finetune_runs import Finetune, Outcome, hidden_difference, run_mlm, seconds_of, write_subset
from omegaconf import OmegaConf
from transformers import AutoModel, BertTokenizerFast

from mlm.cli import main
from mlm.errors import UserError
from tests.convert.hf_berts import make_bert

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "very", "##ly", "."]
TEXTS = ["a good film .", "bad", "very very bad film", "good good"]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script sets for its own process."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a tiny BERT with its tokenizer, as `transformers` saves both."""
    folder = tmp_path_factory.mktemp("bert")
    make_bert(folder, "bert", "Model", vocab_size=len(WORDS))
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizerFast.from_pretrained(folder).save_pretrained(folder)
    return folder


@pytest.fixture
def sst2(tmp_path: Path) -> Path:
    folder = tmp_path / "sst2"
    folder.mkdir()
    for name, count in (("train", 12), ("validation", 5)):
        rows = ({"sentence": TEXTS[i % 4], "label": (i + 1) % 2, "idx": i} for i in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(model: Path, data: Path) -> Finetune:
    return Finetune(
        model=str(model),
        data=str(data),
        batch=4,
        lr=1e-3,
        warmup=0.1,
        weight_decay=0.1,
        seed=1,
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


def test_a_subset_is_drawn_by_its_seed(sst2: Path, tmp_path: Path) -> None:
    def chosen(seed: int) -> list[int]:
        write_subset(sst2, 6, seed, tmp_path / "out")
        return [json.loads(line)["idx"] for line in (tmp_path / "out/train.jsonl").read_text().splitlines()]

    assert chosen(1) == chosen(1) != chosen(2)
    assert len(set(chosen(1))) == 6
    assert (tmp_path / "out/validation.jsonl").read_text() == (sst2 / "validation.jsonl").read_text()


@pytest.mark.parametrize(("rows", "name"), [(13, "sst2"), (1, "nowhere")])
def test_rows_that_are_not_there_are_refused(rows: int, name: str, sst2: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--rows 13 is more than the 12|--data .*nowhere"):
        write_subset(sst2.with_name(name), rows, 0, tmp_path / "out")


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


def test_the_plain_loop_trains_on_all_rows(
    model: Path, sst2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(asdict(settings(model, sst2))))
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "settings.json"), str(tmp_path / "result.json")])
    finetune_peer.main()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["rows"] == 12
    assert result["train_s"] > 0
    assert result["accuracy"] * 5 == pytest.approx(round(result["accuracy"] * 5))  # of the 5 held out


def test_the_command_trains_on_all_rows(
    model: Path, sst2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: starting another is slow."""

    def here(command: Sequence[str], threads: int) -> tuple[float, float]:
        assert command[:3] == [sys.executable, "-m", "mlm"]
        assert main([*command[3:]]) == 0
        return 1.0, 1.0

    monkeypatch.setattr(finetune_runs, "timed_process", here)
    found = run_mlm(settings(model, sst2), ["log.every=2"], tmp_path / "run")
    assert found.rows == 12
    assert found.train_s > 0
    assert found.accuracy * 5 == pytest.approx(round(found.accuracy * 5))
    config = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert (config.optimizer.lr, config.train.epochs, config.dist.threads_per_rank) == (1e-3, 1, 1)


def test_a_failed_run_says_why() -> None:
    program = "import sys; print('mlm finetune: no such key', file=sys.stderr); sys.exit(2)"
    with pytest.raises(UserError, match=r"ended with 2: mlm finetune: no such key"):
        finetune_runs.timed_process([sys.executable, "-c", program], 1)


@pytest.mark.parametrize(("rate", "code"), [(1.5, 0), (1.3, 1)])
def test_pairs_alternate_and_the_ratio_decides(
    rate: float, code: int, sst2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def fake(name: str, train_s: float) -> Outcome:
        ran.append(name)
        return Outcome(train_s, 12, 0.8, 2 * train_s, train_s)

    def mlm(settings: Finetune, overrides: Sequence[str], out: Path) -> Outcome:
        return fake("mlm", 1 / rate)

    monkeypatch.setattr(bench_finetune, "run_mlm", mlm)
    monkeypatch.setattr(bench_finetune, "run_peer", lambda settings, out: fake("transformers", 1.0))
    monkeypatch.setattr(bench_finetune, "hidden_difference", lambda model, texts: 0.0)
    words = ["--model", str(tmp_path), "--data", str(sst2), "--rows", "12", "--pairs", "2"]
    assert bench_finetune.main([*words, "--out", str(tmp_path / "out.json")]) == code
    assert ran == ["mlm", "transformers", "transformers", "mlm"]
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["ratio"]["median"] == pytest.approx(rate)
    assert str(tmp_path) not in (tmp_path / "out.json").read_text()  # no folder of this machine


def test_two_models_are_not_timed(sst2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_finetune, "hidden_difference", lambda model, texts: float("nan"))
    assert bench_finetune.main(["--model", str(tmp_path), "--data", str(sst2), "--rows", "4"]) == 1


@pytest.mark.parametrize("words", [["--rows", "0"], ["--rows", "99"], ["--out", "nowhere/out.json"]])
def test_a_mistake_is_told_by_the_exit_code(words: list[str], model: Path, sst2: Path) -> None:
    assert bench_finetune.main(["--model", str(model), "--data", str(sst2), *words]) == 2
