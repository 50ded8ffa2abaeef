"""The commands: layouts and batch sizes, receipts, resuming after a stop, and rejected settings."""

import io
import json
import math
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm.cli.compose.composition import load_config
from mlm.cli.evaluate import check_zero_shot, loss
from mlm.cli.evaluate import zero_shot as evaluate
from mlm.cli.evaluate.settings import (
    AllDataConfig,
    EvalAllConfig,
    EvalLambadaConfig,
    EvalWikitext103Config,
    LambadaDataConfig,
    WikitextDataConfig,
)
from mlm.convert.source import open_source
from mlm.corpus.train_tokenizer import train_bpe
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util.files import digest_file
from tests.convert.hf_models import import_model
from tests.evaluate.zero_shot.texts import (
    PASSAGES,
    SEQ_LENGTH,
    write_lambada,
    write_trained_model,
    write_wikitext,
)
from tests.ranks import run_on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of a model that has learnt some of the passages, and the files."""
    made = tmp_path_factory.mktemp("zero_shot")
    write_trained_model(made / "model", PASSAGES[::2])
    import_model(made / "model", made / "run")
    write_wikitext(made)
    write_lambada(made)
    return made


def everything(folder: Path, **changes: Any) -> EvalAllConfig:
    config = EvalAllConfig(
        ckpt=str(folder / "run"),
        out=str(folder / "eval-all.json"),
        seq_length=SEQ_LENGTH,
        overlapping_eval=5,
        data=AllDataConfig(
            wikitext103=str(folder / "wiki.test.tokens"), lambada=str(folder / "lambada.jsonl")
        ),
    )
    return replace(config, **changes)


def cloze(folder: Path, **changes: Any) -> EvalLambadaConfig:
    config = EvalLambadaConfig(
        ckpt=str(folder / "run"),
        out=str(folder / "eval-lambada.json"),
        data=LambadaDataConfig(path=str(folder / "lambada.jsonl")),
    )
    return replace(config, **changes)


def run(config: Any, ctx: ParallelContext | None = None) -> dict[str, Any]:
    """Files that a command writes."""
    assert evaluate.preflight(config) == []
    evaluate.run(config, ctx or ParallelContext())
    out = Path(config.out or evaluate.default_path(config, open_source(config.ckpt)))
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def metrics(result: dict[str, Any]) -> dict[str, float]:
    """Every number, by protocol and name."""
    return {
        f"{entry['protocol']} {name}": metric["value"]
        for entry in result["results"]
        for name, metric in entry["metrics"].items()
    }


def check_layout(ctx: ParallelContext, config: EvalAllConfig) -> str:
    """Output of a rank."""
    with redirect_stdout(io.StringIO()) as printed:
        evaluate.run(config, ctx)
    return printed.getvalue()


def test_scores_are_those_of_one_process_at_another_layout_and_batch_size(folder: Path) -> None:
    """Of requests at every layout: tests/inference/test_scoring.py."""
    alone = run(everything(folder, out=str(folder / "alone.json")))
    out = folder / "split.json"
    config = everything(folder, out=str(out), parallel=ParallelConfig(tp=2, dp=2), batch_size=7)
    printed = run_on_ranks(check_layout, config, tp=2, dp=2)
    assert [bool(text) for text in printed] == [True, False, False, False]
    assert metrics(json.loads(out.read_text())) == pytest.approx(metrics(alone), rel=1e-5)
    assert 0 < metrics(alone)["Megatron-LM accuracy"] < 1


def test_a_receipt_says_what_the_scores_depend_on(folder: Path) -> None:
    result = run(everything(folder))
    named = {"checkpoint", "checkpoint_digest", "trained_on", "step", "tokenizer_digest", "precision"}
    assert {*named, "config", "versions", "seconds", "vocabulary_digest"} <= result.keys()
    wikitext, _, strict, _ = result["results"]
    windows = 1 + math.ceil((wikitext["T"] - 1 - SEQ_LENGTH) / 5)
    assert (wikitext["stride"], wikitext["seq_length"], wikitext["N"]) == (5, SEQ_LENGTH, windows)
    assert wikitext["file_digest"] == digest_file(folder / "wiki.test.tokens")
    assert strict["N"] == len(PASSAGES)
    assert all(m["standard_error"] > 0 for r in result["results"] for m in r["metrics"].values())


def test_all_is_both_of_its_parts(folder: Path) -> None:
    together = metrics(run(everything(folder)))
    apart = metrics(run(cloze(folder, seq_length=SEQ_LENGTH)))
    wikitext = EvalWikitext103Config(
        ckpt=str(folder / "run"),
        out=str(folder / "eval-wikitext103.json"),
        seq_length=SEQ_LENGTH,
        overlapping_eval=5,
        data=WikitextDataConfig(path=str(folder / "wiki.test.tokens")),
    )
    assert together == pytest.approx(apart | metrics(run(wikitext)), rel=1e-6)


def test_a_command_that_was_stopped_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores are kept beside the result until that is written, and are not computed again."""
    config = cloze(folder, out=str(folder / "stopped.json"))
    expected = metrics(run(config))
    Path(config.out or "").unlink()
    assert not partial(folder)
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "result_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config)
    (kept,) = partial(folder)
    assert not Path(config.out or "").exists()
    content = kept.read_bytes()
    run(replace(config, limit=3, out=str(folder / "trial.json")))
    run(replace(config, limit=2))
    assert kept.read_bytes() == content  # a trial leaves what is kept of the full evaluation
    Path(config.out or "").unlink()
    capsys.readouterr()
    assert metrics(run(config)) == expected
    assert f"requests were scored before the last stop, in {kept}; 0 are left" in capsys.readouterr().err
    assert not kept.exists()


def partial(folder: Path) -> list[Path]:
    """Scores kept of evaluations that were stopped, to `stopped.json`."""
    return list(folder.glob(".stopped.*.partial.jsonl"))


def test_a_trial_says_so_and_does_not_replace_a_full_result(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = cloze(folder, out=None)
    full = folder / "run" / "eval-lambada.json"
    run(config)
    before = full.read_bytes()
    capsys.readouterr()
    run(replace(config, limit=2))
    assert "limit=2" in capsys.readouterr().out
    assert full.read_bytes() == before
    trial = json.loads((folder / "run" / "eval-lambada-limit2.json").read_text())
    assert {entry["N"] for entry in trial["results"]} == {2}


def test_the_result_of_another_evaluation_is_kept_under_a_name_with_its_digest(folder: Path) -> None:
    config = cloze(folder, out=None)
    run(config)
    before = (folder / "run" / "eval-lambada.json").read_bytes()
    run(replace(config, seq_length=SEQ_LENGTH))
    assert before in [path.read_bytes() for path in (folder / "run").glob("eval-lambada.*.json")]


def interrupted(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


# ----- rejected before any rank starts


def test_another_tokenizer_is_rejected_unless_forced(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(train_bpe(["quite another text, of other words"] * 9, 280).content)
    (problem,) = evaluate.preflight(cloze(folder, tokenizer=str(other)))
    assert f"tokenizer={other}: tokens of " in problem
    assert evaluate.preflight(cloze(folder, tokenizer=str(other), force=True)) == []


@pytest.mark.parametrize("force", [False, True])
def test_a_tokenizer_larger_than_the_model_is_rejected(folder: Path, tmp_path: Path, force: bool) -> None:
    large = tmp_path / "large.json"
    words = [f"w{n:03}" for n in range(300)]
    large.write_bytes(train_bpe([" ".join(words)] * 9, 400).content)
    (problem,) = evaluate.preflight(cloze(folder, tokenizer=str(large), force=force))
    assert "model.vocab_size=331" in problem


@pytest.mark.parametrize("command", ["loss", "lambada", "all"])
def test_windows_longer_than_the_model_reads_name_the_key_as_typed(folder: Path, command: str) -> None:
    run, words = f"ckpt={folder / 'run'}", ["seq_length=49"]
    words += ["path=corpus"] if command == "loss" else ["data.wikitext103=w", "data.lambada=l"]
    if command == "lambada":
        words[1:] = ["data.path=texts"]
    preflight = loss.preflight if command == "loss" else evaluate.preflight
    assert preflight(load_config(f"eval_{command}", [run, *words])) == [
        "seq_length=49: more than the checkpoint's max_positions=48; use seq_length=48 or less"
    ]


def test_a_stride_longer_than_the_window_is_rejected(folder: Path) -> None:
    (problem,) = evaluate.preflight(everything(folder, overlapping_eval=25))
    assert "overlapping_eval=25" in problem
    problems = check_zero_shot(everything(folder, overlapping_eval=25), world_size=None, local_devices=None)
    assert any("overlapping_eval=25" in problem for problem in problems)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"out": "missing/folder/x.json"}, "out=missing/folder/x.json"),
        ({"ckpt": "missing"}, "ckpt=missing"),
    ],
)
def test_a_wrong_path_is_named(folder: Path, changes: dict[str, Any], setting: str) -> None:
    (problem,) = evaluate.preflight(cloze(folder, **changes))
    assert setting in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"limit": 0}, "limit=0 must be greater than 0"),
        ({"data": LambadaDataConfig(path="missing.jsonl")}, "data.path=missing.jsonl: no such file"),
        ({"seq_length": 4}, ""),
    ],
)
def test_settings_are_checked(folder: Path, changes: dict[str, Any], problem: str) -> None:
    problems = check_zero_shot(cloze(folder, **changes), world_size=None, local_devices=None)
    assert [found[: len(problem)] for found in problems] == ([problem] if problem else [])
