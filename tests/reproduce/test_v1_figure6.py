"""v1-figure6 and v1-table3: their conclusions from made-up runs with a known answer, and their steps."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mlm.config.cli import main
from mlm.reproduce.conclusion import Conclusion, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.v1 import figure6, table3
from mlm.reproduce.v1.sizes import TRAININGS, run_name
from mlm.reproduce.v1.table3 import SCORES, step_name
from tests.reproduce.made_runs import made_results, write_result, write_run

SIZES = TRAININGS["laptop"].sizes
TIMES = dict(zip([size.name for size in SIZES], (0.1, 0.2, 0.4), strict=True))


def concluded(folder: Path, losses: dict[str, list[float]]) -> Conclusion:
    """Conclude from final losses of each size, one per seed; all begin at 8 and fall in a straight line."""
    seeds = len(next(iter(losses.values())))
    results = made_results(figure6.EXPERIMENT, folder, seeds=seeds)
    for size in SIZES:
        for seed, final in enumerate(losses[size.name], 1):
            curve = {step: 8 - (8 - final) * step / 1000 for step in range(100, 1001, 100)}
            name = run_name(size, seed)
            write_run(
                folder / f"runs/{name}",
                steps=1000,
                total=TRAININGS["laptop"].steps,
                seconds=TIMES[size.name],
                validation=curve,
                tflops=0.02,
            )
    return figure6.conclude(results)


ORDERED = {"small": [6.0, 6.1, 6.2], "medium": [5.0, 5.1, 5.2], "large": [4.0, 4.1, 4.2]}


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        (ORDERED, Verdict.AGREES),
        ({name: values[:2] for name, values in ORDERED.items()}, Verdict.OPEN),
        (dict(zip(ORDERED, reversed(ORDERED.values()), strict=True)), Verdict.CONTRADICTS),
        ({**ORDERED, "large": [5.3, 4.0, 4.1]}, Verdict.PARTLY),
        ({name: [5.0, 5.1, 5.2] for name in ORDERED}, Verdict.OPEN),
    ],
    ids=["ordered", "two seeds", "reversed", "one pair within its spread", "equal"],
)
def test_figure6_claims_a_difference_only_if_all_seeds_show_it(
    losses: dict[str, list[float]], verdict: Verdict, tmp_path: Path
) -> None:
    assert concluded(tmp_path, losses).verdict is verdict


def test_figure6_reads_equal_time_from_the_curves(tmp_path: Path) -> None:
    """The small model's 100 s are a quarter of the large one's, which has then fallen from 8 to 7."""
    tables = {table.title: table for table in concluded(tmp_path, ORDERED).tables}
    row = tables["Validation perplexity at equal time"].rows[0]
    assert row[0] == "1.7 min, the 0.098M model's whole run"
    assert str(row[3]).startswith(f"{math.exp(8 - 3.9 * 0.25):.3g} ")
    ended = tables["Validation perplexity at equal time"].rows[2][1]
    assert str(ended).startswith(f"{math.exp(6.1):.3g} ")
    assert str(ended).endswith("ended")


def test_figure6_counts_tokens_and_time_to_a_smaller_models_end(tmp_path: Path) -> None:
    """From 8 to 6.1 of the way to 4.1 the large model takes 49 % of its steps, each four times as long."""
    conclusion = concluded(tmp_path, ORDERED)
    assert "with 49 % of its tokens, in 1.9 times its time and with 1.9 times its comp" in conclusion.seen
    _, times, operations = conclusion.charts
    assert [series.x[-1] for series in times.series] == pytest.approx([100 / 60, 200 / 60, 400 / 60])
    assert [series.x[-1] for series in operations.series] == pytest.approx([2, 4, 8])


def table3_concluded(folder: Path, accuracies: list[list[float]], **settings: Any) -> Conclusion:
    """Conclude from made-up scores: perplexities fall with size, accuracies are given by size and seed."""
    results = made_results(table3.EXPERIMENT, folder, **settings)
    for number, size in enumerate(SIZES):
        for seed in results.seeds:
            low = 100.0 / (number + 1) + seed
            found: dict[str, Any] = {"test": {"perplexity": low, "bits_per_byte": low}}
            for score in SCORES:
                if score.task:
                    value = low if score.is_better_low else accuracies[number][seed - 1]
                    metrics = {"task": score.task, "metrics": {score.metric: {"value": value}}}
                    found.setdefault(score.evaluation, {"results": []})["results"].append(metrics)
            for evaluation, content in found.items():
                write_result(folder / f"results/{step_name(size, seed, evaluation)}.json", content)
    return table3.conclude(results)


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ([[0.1, 0.1, 0.1], [0.2, 0.2, 0.2], [0.3, 0.3, 0.3]], Verdict.AGREES),
        ([[0.0, 0.0, 0.0]] * 3, Verdict.PARTLY),
        ([[0.3, 0.3, 0.3], [0.2, 0.2, 0.2], [0.1, 0.1, 0.1]], Verdict.PARTLY),
    ],
    ids=["both better", "no word found", "accuracy reversed"],
)
def test_table3_agrees_if_both_scores_improve_with_size(
    accuracies: list[list[float]], verdict: Verdict, tmp_path: Path
) -> None:
    found = table3_concluded(tmp_path, accuracies, wikitext="w.tokens", lambada="l.jsonl")
    assert found.verdict is verdict
    assert len(found.tables[0].rows) == len(SCORES)


def test_table3_without_the_users_files_scores_held_out_documents_alone(tmp_path: Path) -> None:
    found = table3_concluded(tmp_path, [[0.0] * 3] * 3)
    assert found.verdict is Verdict.PARTLY
    assert [row[0] for row in found.tables[0].rows] == [SCORES[0].name, SCORES[1].name]
    assert "Without wikitext=FILE and lambada=FILE" in found.limits[1]


def test_table3_shares_its_training_runs_with_figure6() -> None:
    config = ReproduceConfig()
    training = {step.name: step for step in figure6.steps(config)}
    steps = {step.name: step for step in table3.steps(config)}
    assert training.items() <= steps.items()
    assert all(set(step.needs) <= training.keys() for step in steps.values())


@pytest.mark.parametrize(
    ("file", "seen"), [("r/data/w.tokens", "data/w.tokens"), ("w.tokens", "{here}/w.tokens")]
)
def test_table3_finds_the_users_file_from_the_folder_of_its_steps(
    file: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ReproduceConfig(out="r", wikitext=file)
    assert f"data.path={seen.format(here=tmp_path)}" in table3.evaluations(config)["wikitext103"]


@pytest.mark.parametrize("experiment", [figure6.EXPERIMENT, table3.EXPERIMENT], ids=["figure6", "table3"])
def test_at_the_papers_scale_the_plans_stand_beside_its_days(experiment: Any, tmp_path: Path) -> None:
    results = made_results(experiment, tmp_path, scale="paper")
    for step in results.steps.values():
        assert step.words[:3] == ("mlm", "plan", "layouts")
        write_result(tmp_path / step.result, {"layouts": [{"days": 30.0, "energy_mwh": 2.0}]})
    found = experiment.conclude(results)
    assert found.verdict is Verdict.PLANNED
    assert found.tables[0].rows[2] == ["8.3B", 512, "30.0", "2.0", "6.85", "2.10"]
    assert "tp=8" in found.commands[2][1]
    assert json.dumps(found.commands).count("mlm pretrain") == 3


@pytest.mark.parametrize("key", ["wikitext", "lambada"])
@pytest.mark.parametrize("there", [False, True], ids=["missing", "empty"])
def test_a_text_that_cannot_be_evaluated_on_is_rejected_before_training(
    key: str, there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.tokens"
    if there:
        file.write_text("")
    assert main(["reproduce", "v1-table3", f"{key}={file}", f"out={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert f"{key}={file}: " in error
    assert "give " in error
    assert not (tmp_path / "out").exists()
