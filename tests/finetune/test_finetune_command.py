"""`mlm finetune` as it is typed: several seeds, a task of one's own, stops and kills."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from mlm.cli import main
from mlm.finetune import training
from mlm.finetune.config import FinetuneConfig
from mlm.launch.child_run import child_run
from mlm.parallel.mesh import ParallelContext
from tests.finetune.material import WORDS, write_table
from tests.finetune.runs import check_same_run, finetune, finetuning, losses, read, records, write_data

REVIEWS = """# Is a book liked?
name: reviews
columns: [body]
label: stars
id: number
labels: [bad, good]
max_length: 24
epochs: 1
batch_size: 4
min_steps: 0
"""


def seeded(folder: Path, out: Path, **changes: Any) -> FinetuneConfig:
    return finetuning(folder, out=str(out), seed=5, seeds=3, train={"epochs": 1}, **changes)


def test_each_seed_has_a_folder_and_the_medians_are_reported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = finetune(seeded(folder, tmp_path))
    assert result["seeds"] == [5, 6, 7]
    each = [read(tmp_path / f"seed-{seed}/result.json") for seed in (5, 6, 7)]
    assert result["results"] == each
    values = sorted(one["scores"]["validation"]["accuracy"] for one in each)
    assert result["medians"] == {"validation": {"accuracy": values[1]}}
    assert len({tuple(losses(tmp_path / f"seed-{seed}")) for seed in (5, 6, 7)}) == 3
    assert "median" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_of_seeds_continues_with_the_one_that_is_not_done(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, whole = [], training.finetune

    def stopped(seeded: FinetuneConfig, *args: Any) -> Any:
        begun.append(seeded.seed)
        if seeded.seed == 6:
            raise KeyboardInterrupt
        return whole(seeded, *args)

    monkeypatch.setattr(training, "finetune", stopped)
    with pytest.raises(KeyboardInterrupt):
        training.run(seeded(folder, tmp_path), ParallelContext())
    monkeypatch.setattr(training, "finetune", lambda c, *args: (begun.append(c.seed), whole(c, *args))[1])
    assert len(finetune(seeded(folder, tmp_path))["results"]) == 3
    assert begun == [5, 6, 6, 7]


def test_a_stop_at_the_end_of_one_seed_begins_no_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = training.FinetuneLoop.count

    def count(self: training.FinetuneLoop) -> None:
        whole(self)
        if self.trainer.step == 3:  # of 3
            self.stop.request(signal.SIGINT)

    monkeypatch.setattr(training.FinetuneLoop, "count", count)
    training.run(seeded(folder, tmp_path), ParallelContext())
    assert [path.name for path in tmp_path.glob("seed-*/checkpoints/step-*")] == ["step-00000003"]
    assert not (tmp_path / "seed-6").exists()
    assert not (tmp_path / "result.json").exists()


def test_a_task_of_ones_own_by_csv_on_the_command_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_configs/task").mkdir(parents=True)
    (tmp_path / "my_configs/task/reviews.yaml").write_text(REVIEWS)
    stars = ("good", "bad")
    rows = [{"number": f"n{n}", "body": " ".join(WORDS[n:][:4]), "stars": stars[n % 2]} for n in range(9)]
    (tmp_path / "rows").mkdir()
    for name in ("train", "validation", "test"):
        write_table(tmp_path / f"rows/{name}.csv", rows)
    monkeypatch.chdir(tmp_path)
    words = ["reviews", "--config-dir", "my_configs", "data.path=rows", "dist.device=cpu"]
    assert main(["finetune", *words, f"ckpt={folder / 'bert'}", "data.predict_tests=true"]) == 0
    result = read(tmp_path / "runs/reviews/result.json")
    assert (result["steps"], result["task"], list(result["tests"])) == (3, "reviews", ["test"])
    table = (tmp_path / "runs/reviews/predictions/test.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in table] == ["index", *(row["number"] for row in rows)]
    assert {line.split("\t")[1] for line in table[1:]} <= {"bad", "good"}
    assert main(["eval", *words, "ckpt=runs/reviews"]) == 0
    scores = read(tmp_path / "runs/reviews/eval-reviews.json")["results"][0]["metrics"]
    assert scores == result["scores"]["validation"]
    capsys.readouterr()
    assert main(["finetune", "resume=runs/reviews"]) == 0
    assert "is finished" in capsys.readouterr().out
    for word, problem in (
        ("seeds=2", "seeds=2: out=runs/reviews holds a run of one; set another out=…"),
        ("out=runs/other", "a finetuning run continues in its own folder"),
        ("checkpoint.resume=false", "set checkpoint.resume=true to resume from it"),
    ):
        assert main(["finetune", "resume=runs/reviews", word]) == 2
        assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_killed_and_interrupted_by_the_system(folder: Path, tmp_path: Path) -> None:
    """SIGKILL, then Ctrl-C, which saves; the third start ends the run as one that nothing disturbed."""
    rows = write_data(tmp_path / "race", "choice", train=24)
    words = ["finetune", "race", f"ckpt={folder / 'bert'}", f"data.path={rows}", "precision=fp64"]
    words += ["task.max_length=24", "train.epochs=10", "train.global_batch_size=4", "train.validate_every=5"]
    words += ["log.every=1", "dist.device=cpu", "dist.threads_per_rank=1", "optimizer.lr=1e-4"]
    out = tmp_path / "out"
    for sign, step in ((signal.SIGKILL, 6), (signal.SIGINT, 12)):
        with child_run([*words, f"out={out}"], tmp_path / "log") as process:
            wait_for_step(out, step, process)
            process.send_signal(sign)
            code = process.wait(60)
        assert code == (-signal.SIGKILL if sign is signal.SIGKILL else 130), (tmp_path / "log").read_text()
    assert "stopped by Ctrl-C after step" in (tmp_path / "log").read_text()
    assert not (out / "result.json").exists()
    assert main([*words, f"out={out}"]) == 0
    assert main([*words, f"out={tmp_path / 'whole'}"]) == 0
    check_same_run(out, tmp_path / "whole")


def wait_for_step(out: Path, step: int, process: "subprocess.Popen[bytes]") -> None:
    end, file = time.monotonic() + 90, out / "metrics.jsonl"
    while not file.exists() or max((r["step"] for r in records(out, "step")), default=0) < step:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
