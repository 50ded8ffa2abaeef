"""`mlm pretrain`, `mlm eval loss` and `mlm generate` from text to a passage, and their bad days."""

import json
import math
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from mlm.cli import main
from mlm.data.indexed import IndexedDataset
from mlm.util.files import digest_file
from tests.data.corpora import write_corpus
from tests.slow import thinned
from tests.training.records import losses, records

SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a small model learns a small corpus by heart",
    "rank zero speaks and the others keep silent",
    "two processes hold one layer between them",
]
TINY = """
    model=gpt2_tiny model.vocab_size=400 data.seq_length=32 train.steps=6 train.global_batch_size=8
    train.micro_batch_size=4 train.validate_every=3 train.validate_batches=2 checkpoint.save_every=3
    schedule=constant schedule.warmup_steps=2 optimizer.lr=1e-3 log.every=1
""".split()  # noqa: SIM905


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus folder built by the commands themselves: text, tokenizer, .bin/.idx."""
    root = tmp_path_factory.mktemp("corpus")
    text = root / "text"
    text.mkdir()
    for split, copies in (("train", 60), ("validation", 20)):
        lines = [json.dumps({"text": f"{s} {i}"}) for i in range(copies) for s in SENTENCES]
        (text / f"{split}.jsonl").write_text("\n".join(lines))
    tokenizer = root / "tokenizer.json"
    assert main(["data", "tokenizer", f"input={text}", "vocab_size=400", f"out={tokenizer}"]) == 0
    built = [f"input={text}", f"tokenizer={tokenizer}", f"out={root / 'built'}"]
    assert main(["data", "build", *built, "recipe=plain"]) == 0  # v1 keeps no document as short as these
    return root / "built"


@pytest.fixture(scope="session")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    assert main(["pretrain", *TINY, f"data.path={corpus}", f"out={out}"]) == 0
    return out


def test_a_run_leaves_config_checkpoint_metrics_and_tokenizer(run: Path) -> None:
    names = {p.name for p in run.iterdir()}
    assert {"config.yaml", "checkpoints", "metrics.jsonl", "tokenizer.json"} <= names
    assert (run / "checkpoints" / "latest").read_text().split()[0] == "step-00000006"
    assert [r["step"] for r in records(run, "step")] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records(run, "validation")] == [3, 6]


def test_the_mixture_of_a_laptop_learns(corpus: Path, tmp_path: Path) -> None:
    """experiment=moe_laptop, narrower and shorter; its validation is of the mixture too."""
    sizes = ["model.num_layers=2", "model.hidden_size=64", "model.vocab_size=400", "data.seq_length=32"]
    steps = ["train.steps=6", "train.validate_every=3", "train.validate_batches=2", "log.every=1"]
    out = tmp_path / "moe"
    words = ["experiment=moe_laptop", *sizes, *steps, f"data.path={corpus}", f"out={out}"]
    assert main(["pretrain", *words]) == 0
    found = losses(out)
    assert found[0] == pytest.approx(math.log(400), abs=0.15)
    assert found[-1] < found[0] - 0.3  # type: ignore[operator]
    assert [r["step"] for r in records(out, "validation")] == [3, 6]


def test_two_tensor_parallel_processes_give_the_same_losses_and_files(
    corpus: Path, run: Path, tmp_path: Path
) -> None:
    """float32 after five Adam steps: equal to 1e-3; then scored at another layout."""
    out = tmp_path / "tp2"
    assert main(["pretrain", *TINY, f"data.path={corpus}", f"out={out}", "tp=2"]) == 0
    assert losses(out) == pytest.approx(losses(run), abs=1e-3)
    scores = [score_of(path, tmp_path) for path in (run, out)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)


def score_of(run: Path, folder: Path, *words: str) -> float:
    assert main(["eval", "loss", f"ckpt={run}", f"out={folder / 'score.json'}", *words]) == 0
    return float(json.loads((folder / "score.json").read_text())["loss"])


def test_a_run_continues_bit_equal_with_the_command_that_it_prints(
    corpus: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    stopped = [*TINY, f"data.path={corpus}", f"out={out}", "train.steps=3"]
    assert main(["pretrain", *stopped]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train on: ")]
    assert line == f"train on: mlm pretrain resume={out} train.steps=6"
    assert main(shlex.split(line)[3:]) == 0
    assert losses(out) == losses(run)
    assert records(out, "validation")[-1]["loss"] == records(run, "validation")[-1]["loss"]


def test_eval_loss_agrees_with_the_validation_of_training(run: Path, corpus: Path, tmp_path: Path) -> None:
    """validate_batches covers 16 windows; score the same 16 by cutting the corpus there."""
    tokens = IndexedDataset(corpus / "validation").tokens[: 16 * 32 + 1].tolist()
    write_corpus(tmp_path / "cut", [tokens])
    score_of(run, tmp_path, f"path={tmp_path / 'cut'}", "batch_size=3")
    score = json.loads((tmp_path / "score.json").read_text())
    assert score["loss"] == pytest.approx(records(run, "validation")[-1]["loss"], rel=1e-6)
    assert (score["tokens"], score["perplexity"]) == (512, pytest.approx(math.exp(score["loss"])))


def test_bits_per_byte_follow_from_the_loss_and_the_texts_bytes(run: Path, corpus: Path) -> None:
    assert main(["eval", "loss", f"ckpt={run}", f"path={corpus / 'validation'}"]) == 0
    score = json.loads((run / "eval-loss-validation.json").read_text())
    size = sum(len(f"{s} {i}".encode()) for i in range(20) for s in SENTENCES)
    assert score["bits_per_byte"] == pytest.approx(score["loss"] * score["tokens"] / math.log(2) / size)
    assert score["corpus_digest"] == digest_file(corpus / "validation.bin")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_while_saving_names_the_file_and_keeps_the_last_checkpoint(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A 3 MB tmpfs holds the first checkpoint and its own files, not two more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        words = ["pretrain", *TINY, f"data.path={corpus}", f"out={disk / 'run'}", "checkpoint.save_every=1"]
        assert main([*words, "checkpoint.keep_last=9"]) in (1, 2)
        said = capfd.readouterr().err
        assert "Traceback" not in said
        assert "out=" in said
        kept = disk / "run" / "checkpoints" / (disk / "run" / "checkpoints" / "latest").read_text().split()[0]
        assert f"{kept.name} is intact" in said
        assert main(["eval", "loss", f"ckpt={kept}", f"out={tmp_path / 'score.json'}"]) == 0
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("tp", thinned([1, 2], 2))
def test_ctrl_c_while_a_run_starts_is_obeyed_after_its_first_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tp: int
) -> None:
    """It comes before torch's processes, or any handler of training, are there."""
    monkeypatch.setattr("mlm.training.preflight.preflight", lambda config: signal.raise_signal(signal.SIGINT))
    out = tmp_path / "run"
    assert main(["pretrain", *TINY, f"data.path={corpus}", f"out={out}", f"tp={tp}"]) == 130
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == ["step-00000001"]
    said = capfd.readouterr()
    assert "mlm: Ctrl-C: noted; if training starts, it stops and saves after its first step" in said.err
    assert "stopped by Ctrl-C after step 1, saved" in said.out


def test_too_little_memory_of_the_host_is_one_line_with_what_still_helps(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's own error, of a tensor of 2^52 bytes."""
    monkeypatch.setattr("mlm.cli.pretrain.run.Trainer", lambda config, ctx: torch.empty(1 << 50))
    words = [*TINY, "train.micro_batch_size=1", "recompute=full"]
    assert main(["pretrain", *words, f"data.path={corpus}", f"out={tmp_path / 'run'}"]) == 2
    forecast, line = capsys.readouterr().err.splitlines()
    assert forecast.startswith("mlm pretrain: needs ")
    assert line.startswith(
        "mlm pretrain: train.micro_batch_size=1 is too much for the memory of this host: set zero=3"
    )


@pytest.mark.slow
def test_a_run_whose_steps_all_overflowed_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["model=gpt2_tiny", "data=synthetic", "precision=fp16", "train.steps=2"]
    sizes = ["train.global_batch_size=2", "train.micro_batch_size=2", "train.validate_every=0"]
    assert main(["pretrain", *words, *sizes, "dist.device=cpu", f"out={tmp_path / 'run'}"]) == 0
    assert "=4.29497e+09: all 2 steps overflowed, no weight has changed; set it to 1.07374e+09" in caplog.text
