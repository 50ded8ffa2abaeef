"""The commands: layouts and batch sizes, receipts, resuming after a stop, and rejected settings."""

import io
import json
import math
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
    config = everything(folder)
    apart = metrics(run(cloze(folder, seq_length=SEQ_LENGTH)))
    wikitext = EvalWikitext103Config(
        ckpt=config.ckpt,
        out=str(folder / "eval-wikitext103.json"),
        seq_length=SEQ_LENGTH,
        overlapping_eval=5,
        data=WikitextDataConfig(path=config.data.wikitext103),
    )
    assert metrics(run(config)) == pytest.approx(apart | metrics(run(wikitext)), rel=1e-6)


def test_a_command_that_was_stopped_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores are kept beside the result until that is written, and are not computed again."""
    config = cloze(folder, out=str(folder / "stopped.json"))
    expected = metrics(run(config))
    Path(config.out or "").unlink()
    assert not partial(folder)
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "result_of", Mock(side_effect=KeyboardInterrupt))
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


def test_another_tokenizer_is_rejected_unless_forced_and_a_larger_one_always(
    folder: Path, tmp_path: Path
) -> None:
    other, large = tmp_path / "other.json", tmp_path / "large.json"
    other.write_bytes(train_bpe(["quite another text, of other words"] * 9, 280).content)
    large.write_bytes(train_bpe([" ".join(f"w{n:03}" for n in range(300))] * 9, 400).content)
    (problem,) = evaluate.preflight(cloze(folder, tokenizer=str(other)))
    assert f"tokenizer={other}: tokens of " in problem
    assert evaluate.preflight(cloze(folder, tokenizer=str(other), force=True)) == []
    for force in (False, True):
        (problem,) = evaluate.preflight(cloze(folder, tokenizer=str(large), force=force))
        assert "model.vocab_size=331" in problem


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("loss", ["path=corpus"]),
        ("lambada", ["data.path=texts"]),
        ("all", ["data.wikitext103=w", "data.lambada=l"]),
    ],
)
def test_windows_longer_than_the_model_reads_name_the_key_as_typed(
    folder: Path, command: str, words: list[str]
) -> None:
    config = load_config(f"eval_{command}", [f"ckpt={folder / 'run'}", "seq_length=49", *words])
    assert (loss if command == "loss" else evaluate).preflight(config) == [
        "seq_length=49: more than the checkpoint's max_positions=48; use seq_length=48 or less"
    ]


def test_a_stride_longer_than_the_window_is_rejected(folder: Path) -> None:
    config = everything(folder, overlapping_eval=25)
    for problems in (
        evaluate.preflight(config),
        check_zero_shot(config, world_size=None, local_devices=None),
    ):
        assert any("overlapping_eval=25" in problem for problem in problems)
