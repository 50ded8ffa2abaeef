"""v1-figure7: its runs differ in what is compared alone, and its conclusion from made-up runs."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm.config.cli.compose import load_config
from mlm.corpus.train_tokenizer import train_wordpiece
from mlm.data.config import DataConfig
from mlm.data.indexed import IndexedWriter, token_dtype
from mlm.reproduce.conclusion import Conclusion, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.results import Record
from mlm.reproduce.v1 import figure7, masked_tokens
from mlm.reproduce.v1.norm_orders import ORDERS, TRAININGS, Trial, trials
from tests.reproduce.made_runs import made_results, write_result, write_run

TRAINING = replace(
    TRAININGS["laptop"],
    best={"post": {12: 3e-3, 24: 1e-3, 48: 1e-3}, "pre": {12: 1e-3, 24: 1e-3, 48: 3e-3}},
)
"""Settings in which each order has a best rate of its own, at 12 and at 48 layers."""
SINGLE = 6.5
"""Entropy of masked tokens in these tests."""


@pytest.fixture(autouse=True)
def training(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRAINING in place of the laptop's."""
    monkeypatch.setitem(TRAININGS, "laptop", TRAINING)


def step_words(trial: Trial, corpus: str = "auto") -> list[str]:
    """Return the settings of a run without its folder."""
    found = next(step for step in figure7.steps(ReproduceConfig(corpus=corpus)) if step.name == trial.name)
    return [word for word in found.words[2:] if not word.startswith("out=")]


def test_the_two_orders_differ_in_norm_alone() -> None:
    both = zip(*(step_words(Trial(48, order, TRAINING.shared, 2)) for order in ORDERS), strict=True)
    assert [pair for pair in both if pair[0] != pair[1]] == [("model.norm=post", "model.norm=pre")]


def test_settings_are_those_of_the_command() -> None:
    config = load_config("pretrain", step_words(Trial(48, "post", TRAINING.shared, 2)))
    assert (config.model.num_layers, config.model.norm, config.optimizer.lr) == (48, "post", TRAINING.shared)
    assert config.model.init_std == pytest.approx(0.02 * math.sqrt(1024 / TRAINING.width))
    assert config.model.hidden_dropout == 0
    assert config.seed == 2


def test_a_corpus_of_the_users_is_taken_as_it_is() -> None:
    words = step_words(Trial(48, "post", TRAINING.shared, 2), corpus="mine")
    assert {"data.path=corpus-bert", "model.vocab_size=8192"} <= set(words)
    assert figure7.text_steps(ReproduceConfig(corpus="mine")) == []


def test_all_seeds_run_at_the_compared_rates_and_the_sweep_has_one_seed() -> None:
    found = trials(TRAINING, 3)
    for layers in TRAINING.depths:
        for order in ORDERS:
            compared = {TRAINING.shared, TRAINING.best[order][layers]}
            mine = [trial for trial in found if (trial.layers, trial.order) == (layers, order)]
            for rate in {*compared, *(TRAINING.swept if layers == 48 else ())}:
                seeds = [trial.seed for trial in mine if trial.rate == rate]
                assert seeds == ([1, 2, 3] if rate in compared else [1])


Losses = dict[tuple[int, str, str], list[float]]
"""Last losses of all seeds by depth, order, and `shared` or `best` rate."""


def concluded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, losses: Losses, *, seeds: int = 3, **changed: Any
) -> Conclusion:
    """Conclude from last losses, 6.2 where none is given. The sweep ends at 6.6, or as `changed` says."""
    monkeypatch.setattr(figure7, "entropy", lambda *_: SINGLE)
    results = made_results(figure7.EXPERIMENT, folder, seeds=seeds)
    for trial in trials(TRAINING, seeds):
        best = TRAINING.best[trial.order][trial.layers]
        kind = "best" if trial.rate == best else "shared" if trial.rate == TRAINING.shared else ""
        same = "best" if kind and best == TRAINING.shared else kind
        given = losses.get((trial.layers, trial.order, same), [6.2] * seeds)
        write_masked(
            folder / "runs" / trial.name, given[trial.seed - 1] if kind else changed.get("swept", 6.6)
        )
    for name in changed.get("failed", ()):
        results.records[name] = Record(results.steps[name].words, 1, 1.0, "not finite")  # type: ignore[index]
    return figure7.conclude(results)


def write_masked(run: Path, loss: float) -> None:
    """Write a run whose losses of masked tokens fall from 7 to 6.8, then end at `loss`."""
    write_run(run, total=TRAINING.steps, validation={1: 0, 2: 0, 3: 0}, grad_norm=2.5)
    text = (run / "metrics.jsonl").read_text()
    for step, value in zip((1, 2, 3), (7.0, 6.8, loss), strict=True):
        text = text.replace(
            f'"step": {step}, "loss": 0', f'"step": {step}, "validation/mlm_loss": {value}, "loss": 0'
        )
    (run / "metrics.jsonl").write_text(text)


LOW, MIDDLE, NOT_LEARNED = [6.0, 6.05, 6.1], [6.2, 6.25, 6.3], [6.49, 6.5, 6.51]


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ({"post": NOT_LEARNED, "pre": MIDDLE, "best": LOW}, Verdict.AGREES),
        ({"post": LOW, "pre": MIDDLE, "best": MIDDLE}, Verdict.CONTRADICTS),
        ({"post": MIDDLE, "pre": MIDDLE, "best": LOW}, Verdict.PARTLY),
        ({"post": NOT_LEARNED, "pre": MIDDLE, "best": [6.4, 6.5, 6.6]}, Verdict.PARTLY),
        ({"post": [6.2, 6.5, 6.5], "pre": MIDDLE, "best": MIDDLE}, Verdict.OPEN),
        ({"post": [6.6, 6.6, 6.6], "pre": NOT_LEARNED, "best": NOT_LEARNED}, Verdict.OPEN),
        ({"post": [6.6, 6.6], "pre": LOW[:2], "best": LOW[:2]}, Verdict.OPEN),
    ],
    ids=[
        "stable and better",
        "as stable, worse",
        "as stable, better",
        "stable, not better",
        "one seed learns",
        "lower, but not learned",
        "two seeds",
    ],
)
def test_it_agrees_where_pre_is_stable_and_post_is_not_and_pre_is_better(
    losses: dict[str, list[float]], verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 48 layers norm=post has its best rate in common with norm=pre, whose own is another."""
    assert TRAINING.best["post"][48] == TRAINING.shared != TRAINING.best["pre"][48]
    given = {(48, "post", "best"): losses["post"], (48, "pre", "shared"): losses["pre"]}
    given[48, "pre", "best"] = losses["best"]
    found = concluded(tmp_path, monkeypatch, given, seeds=len(losses["post"]))
    assert found.verdict is verdict


def test_a_lead_at_24_layers_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    low: Losses = {(24, "pre", "best"): LOW, (24, "post", "best"): MIDDLE}
    assert concluded(tmp_path / "a", monkeypatch, low).verdict is Verdict.PARTLY
    low = {(24, "post", "best"): LOW, (24, "pre", "best"): MIDDLE}
    assert concluded(tmp_path / "b", monkeypatch, low).verdict is Verdict.CONTRADICTS


def test_runs_at_the_loss_of_token_frequencies_have_not_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {(48, "post", "best"): [*NOT_LEARNED[:2], 6.2], (48, "pre", "best"): LOW}
    found = concluded(tmp_path, monkeypatch, losses)
    assert "48 layers: 1 learn, 2 stay at token frequencies with post, 3 learn with pre" in found.seen
    assert "48 layers 6.49 (6.2 to 6.5) with post, 6.05 (6 to 6.1) with pre" in found.seen


def test_a_depth_at_which_nothing_learned_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {(48, "post", "best"): NOT_LEARNED, (48, "pre", "best"): NOT_LEARNED}
    limits = " ".join(concluded(tmp_path, monkeypatch, losses).limits)
    assert "At 48 layers no run learned from context" in limits
    assert "At 24 layers" not in limits


def test_a_run_that_failed_or_rose_has_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of 48 layers stopped, the second ends 0.4 above its lowest loss."""
    name = Trial(48, "post", TRAINING.shared, 1).name
    losses = {(48, "post", "best"): [6.5, 7.2, 6.5]}
    found = concluded(tmp_path, monkeypatch, losses, failed=[name])
    row = next(row for row in found.tables[0].rows if row[:2] == ["48, post", f"{TRAINING.shared:g} (best)"])
    assert row[3] == "1 stay at token frequencies, 2 diverge"
    assert list(found.charts[0].series[0].x) == [12, 24]  # what is not finite is not drawn


def test_a_rate_is_the_best_only_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = concluded(tmp_path, monkeypatch, {}).tables[0].rows
    assert [row[1] for row in rows if row[0] == "24, post"] == [f"{TRAINING.shared:g}"]
    assert [row[1] for row in rows if row[0] == "48, post"].count(f"{TRAINING.shared:g} (best)") == 1


def test_a_better_learning_rate_of_the_sweep_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = concluded(tmp_path / "a", monkeypatch, {}, swept=5.0)
    assert "48 layers post at" in found.limits[-1]
    assert "Another learning rate" not in " ".join(concluded(tmp_path / "b", monkeypatch, {}).limits)


def test_the_papers_models_are_commands(tmp_path: Path) -> None:
    results = made_results(figure7.EXPERIMENT, tmp_path, scale="paper")
    layout = {"tp": 1, "pp": 1, "dp": 128, "zero": 0, "recompute": "full", "micro_batch_size": 8, "days": 9.0}
    for step in results.steps.values():
        write_result(tmp_path / step.result, {"layouts": [layout]})
    found = figure7.conclude(results)
    assert found.verdict is Verdict.PLANNED
    assert [name.rpartition(",")[2] for name, _ in found.commands[2:]] == [
        " layer norm after the sums",
        " layer norm before sublayers",
    ]
    assert all("model.num_layers=48" in line for _, line in found.commands[2:])


def test_entropy_is_that_of_masked_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One word in four is the second of two."""
    monkeypatch.setattr(masked_tokens, "SAMPLES", 5000)
    tokenizer = train_wordpiece(lambda: ["a sun and a moon"] * 3, 40)
    tokenizer.save(tmp_path / "tokenizer.json")
    words = np.array([tokenizer.encode(word)[0] for word in ("sun", "moon")])
    drawn = np.random.default_rng(0).permutation(np.repeat([0, 0, 0, 1], 300)).reshape(100, 12)
    with IndexedWriter(tmp_path / "train", token_dtype(1000)) as writer:
        for document in words[drawn]:
            writer.add_document(document, [3, 3, 3, 3])
    expected = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
    assert masked_tokens.entropy(tmp_path, DataConfig(seq_length=16)) == pytest.approx(expected, abs=0.01)
