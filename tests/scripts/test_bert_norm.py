"""The experiment on layer norm: what differs between runs, what is kept, what is said of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bert_norm
import numpy as np
import pytest
from bench import norm_report, norm_runs
from bench.norm_report import final_loss, masked_entropy, thinned, verdict
from bench.norm_runs import Runs, Sizes, Trial, settings_of

from mlm.cli.compose import load_config
from mlm.corpus.train_tokenizer import train_wordpiece
from mlm.data.indexed import IndexedWriter, token_dtype
from mlm.errors import UserError

SIZES = Sizes(
    hidden=16,
    heads=1,
    seq_length=16,
    batch=2,
    steps=100,
    warmup=5,
    vocab=50,
    init_std=0.16,
    corpus="corpus",
    threads=1,
)
POST = Trial(layers=12, norm="post", lr=1e-3, seed=7)
PRE = Trial(layers=12, norm="pre", lr=1e-3, seed=7)
ENTROPY = 5.0
FALLING = np.linspace(9.0, 4.0, 200).tolist()


def write_run(run: Path, *, steps: int = 100, loss: float | None = 4.5, validated: bool = True) -> None:
    """metrics.jsonl as a run leaves it."""
    run.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = [
        {"kind": "step", "step": step, "mlm_loss": loss, "grad_norm": 1.0} for step in range(1, steps + 1)
    ]
    if validated:
        parts = {"mlm_loss": 4.6, "mlm_accuracy": 0.25, "sop_loss": 0.7}
        records.append(
            {"kind": "validation", "step": steps, **{f"validation/{k}": v for k, v in parts.items()}}
        )
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_runs_of_a_pair_differ_in_norm_alone() -> None:
    both = zip(settings_of(POST, SIZES), settings_of(PRE, SIZES), strict=True)
    assert [pair for pair in both if pair[0] != pair[1]] == [("model.norm=post", "model.norm=pre")]


def test_settings_are_those_of_the_command() -> None:
    config = load_config("pretrain", settings_of(POST, SIZES))
    assert (config.model.num_layers, config.model.norm, config.model.init_std) == (12, "post", 0.16)
    assert (config.optimizer.lr, config.schedule.decay, config.schedule.decay_steps) == (1e-3, "linear", 100)
    assert config.model.hidden_dropout == 0


def test_init_std_keeps_the_weight_of_a_sublayer(tmp_path: Path) -> None:
    """0.02 at a width of 1024."""
    args = bert_norm.parse(["--corpus", str(make_corpus(tmp_path)), "--hidden", "64"])
    assert bert_norm.sizes_of(args).init_std == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("losses", "ended", "said"),
    [
        (FALLING, False, "learns"),
        (FALLING, True, "diverged"),
        ([*FALLING, *[6.0] * 20], False, "diverged"),
        ([*FALLING, None], False, "diverged"),
        ([9.0] * 20 + [5.0] * 200, False, "single tokens"),
        ([5.0, 4.0, 6.0], False, "single tokens"),  # too few for a rise to be more than chance
    ],
)
def test_verdict(losses: list[float | None], ended: bool, said: str) -> None:
    assert verdict(losses, ENTROPY, ended=ended) == said


def test_final_loss_is_the_mean_of_the_last_twentieth() -> None:
    assert final_loss([0.0] * 950 + [4.0] * 25 + [2.0] * 25) == 3.0


def test_a_thinned_curve_has_the_means_of_its_blocks() -> None:
    steps = 2 * norm_report.KEPT
    curve = thinned(
        {
            "step": [*range(1, steps + 1)],
            "mlm_loss": [1.0, 3.0] * norm_report.KEPT,
            "grad_norm": [None] * steps,
        }
    )
    assert curve["step"][:2] == [2, 4]
    assert curve["mlm_loss"] == [2.0] * norm_report.KEPT
    assert curve["grad_norm"][0] is None


def make_corpus(folder: Path) -> Path:
    """Documents of four sentences of three words, and one word in four is the second of two."""
    tokenizer = train_wordpiece(lambda: ["a sun and a moon"] * 3, 40)
    tokenizer.save(folder / "tokenizer.json")
    words = np.array([tokenizer.encode(word)[0] for word in ("sun", "moon")])
    drawn = np.random.default_rng(0).permutation(np.repeat([0, 0, 0, 1], 300)).reshape(100, 12)
    with IndexedWriter(folder / "train", token_dtype(1000)) as writer:
        for document in words[drawn]:
            writer.add_document(document, [3, 3, 3, 3])
    return folder


def test_entropy_is_that_of_masked_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_report, "SAMPLES", 5000)
    expected = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
    assert masked_entropy(make_corpus(tmp_path), 16) == pytest.approx(expected, abs=0.01)


def test_what_is_done_is_kept_and_what_is_not_continues(tmp_path: Path) -> None:
    with Runs([POST, PRE], SIZES, tmp_path, jobs=1) as runs:
        assert runs.waiting == [POST, PRE]
    write_run(tmp_path / POST.name)
    write_run(tmp_path / PRE.name, validated=False)
    with Runs([POST, PRE], SIZES, tmp_path, jobs=1) as runs:
        assert runs.waiting == [PRE]


def test_runs_of_other_settings_are_rejected(tmp_path: Path) -> None:
    Runs([POST], SIZES, tmp_path, jobs=1)
    with pytest.raises(UserError, match="made with other settings"):
        Runs([POST], Sizes(**{**norm_runs.asdict(SIZES), "batch": 4}), tmp_path, jobs=1)


def fake_runs(monkeypatch: pytest.MonkeyPatch, code: int, **left: Any) -> None:
    """Runs that leave a history and end at once."""

    def start(self: Runs, trial: Trial) -> None:
        (self.work / f"{trial.name}.log").write_text("mlm: step 9: not finite\n")
        if left:
            write_run(self.work / trial.name, **left)
        self.running[trial] = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])

    monkeypatch.setattr(Runs, "start", start)
    monkeypatch.setattr(norm_runs, "POLL_S", 0.02)
    monkeypatch.setattr(norm_report, "SAMPLES", 100)


WORDS = ["--hidden", "16", "--steps", "100", "--layers", "1", "2", "--jobs", "2"]


def test_it_ends_with_a_table_a_picture_and_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch, 0, steps=100)
    words = ["--corpus", str(make_corpus(tmp_path)), "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    assert bert_norm.main([*WORDS, *words]) == 0
    assert (tmp_path / "bert_norm.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "bert_norm.md").read_text().count("\n| ") == 2 + 4
    content = (tmp_path / "bert_norm.json").read_text()
    assert str(tmp_path) not in content  # no folder of this machine
    rows = json.loads(content)["rows"]
    assert [(row["layers"], row["norm"]) for row in rows] == [
        (1, "post"),
        (1, "pre"),
        (2, "post"),
        (2, "pre"),
    ]
    assert rows[0]["training_loss"] == 4.5
    assert rows[0]["validation_loss"] == 4.6


def test_a_run_that_ended_early_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch, 1, steps=9, loss=None, validated=False)
    words = ["--corpus", str(make_corpus(tmp_path)), "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    assert bert_norm.main([*WORDS, *words]) == 0
    row = json.loads((tmp_path / "bert_norm.json").read_text())["rows"][0]
    assert (row["verdict"], row["steps"], row["ended"]) == ("diverged", 9, "mlm: step 9: not finite")


def test_a_run_that_did_not_begin_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch, 2)
    words = ["--corpus", str(make_corpus(tmp_path)), "--work", str(tmp_path / "work")]
    assert bert_norm.main([*WORDS, *words]) == 2


@pytest.mark.parametrize(
    "words", [["--hidden", "20"], ["--steps", "0"], ["--corpus", "nowhere"], ["--out", "no"]]
)
def test_a_mistake_is_reported_by_the_exit_code(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bert_norm.main(["--corpus", str(make_corpus(tmp_path)), *words]) == 2
