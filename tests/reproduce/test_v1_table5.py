"""v1-table5: its conclusion from made-up runs with a known answer, and what it needs of the user."""

import json
import re
from pathlib import Path

import pytest

from mlm.config.cli import main
from mlm.reproduce.conclusion import Conclusion, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.v1 import table5
from mlm.reproduce.v1.table5 import TRAININGS
from tests.reproduce.made_runs import made_results, write_result, write_run

SIZES = TRAININGS["laptop"].sizes


def concluded(folder: Path, scores: list[list[float]] | None, gain: float = 1.0) -> Conclusion:
    """Conclude from accuracies by size and seed, as shares; None: without GLUE.

    In pretraining each size ends `gain` below the one before.
    """
    settings = {"glue": str(folder), "seeds": len(scores[0])} if scores else {}
    results = made_results(table5.EXPERIMENT, folder, **settings)
    for number, size in enumerate(SIZES):
        run = folder / "runs" / size.pretraining
        write_run(run, total=1200, validation={100: 0})
        masked = f'"validation/mlm_loss": {6 - gain * number}, "loss": 0'
        (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace('"loss": 0', masked))
        if scores:
            every = [{"scores": {"validation": {"accuracy": each}}} for each in scores[number]]
            content = {"results": every} if len(every) > 1 else every[0]
            write_result(results.path(size.finetuning), content)
    return table5.conclude(results)


SMALL, MEDIUM, LARGE = [0.70, 0.71, 0.72], [0.73, 0.74, 0.75], [0.76, 0.77, 0.78]


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ([SMALL, MEDIUM, LARGE], Verdict.AGREES),
        ([SMALL, MEDIUM, MEDIUM], Verdict.PARTLY),
        ([SMALL, [0.71, 0.73, 0.74], MEDIUM], Verdict.PARTLY),
        ([LARGE, MEDIUM, SMALL], Verdict.CONTRADICTS),
        ([SMALL, SMALL, SMALL], Verdict.OPEN),
        ([[0.70], [0.73], [0.76]], Verdict.OPEN),
        (None, Verdict.OPEN),
    ],
    ids=["ordered", "two equal", "only the ends apart", "reversed", "equal", "one seed", "without GLUE"],
)
def test_a_larger_model_is_better_only_if_all_seeds_show_it(
    scores: list[list[float]] | None, verdict: Verdict, tmp_path: Path
) -> None:
    assert concluded(tmp_path, scores).verdict is verdict


def test_nothing_is_concluded_if_larger_models_have_not_learned_more(tmp_path: Path) -> None:
    found = concluded(tmp_path / "a", [LARGE, MEDIUM, SMALL], gain=0)
    assert found.verdict is Verdict.OPEN
    assert "ended pretraining no better than the smallest" in found.limits[0]
    assert "no better" not in concluded(tmp_path / "b", [LARGE, MEDIUM, SMALL]).limits[0]


def test_accuracies_and_losses_stand_beside_the_papers_table(tmp_path: Path) -> None:
    ours, paper = concluded(tmp_path, [SMALL, MEDIUM, LARGE]).tables
    assert ours.rows[2][1:] == ["4.000", "77 (76 to 78)"]
    assert [row[-1] for row in paper.rows] == [83.0, 87.3, 89.5]


def test_without_glue_it_names_what_to_give(tmp_path: Path) -> None:
    found = concluded(tmp_path, None)
    assert found.limits[0].startswith("Give glue=FOLDER with sst2/train.jsonl")
    assert not found.charts
    names = [step.name for step in table5.steps(ReproduceConfig())]
    assert names == [size.pretraining for size in reversed(SIZES)]


def test_the_papers_models_are_commands(tmp_path: Path) -> None:
    results = made_results(table5.EXPERIMENT, tmp_path, scale="paper")
    layout = {"tp": 1, "pp": 1, "dp": 128, "zero": 0, "recompute": "full", "micro_batch_size": 8, "days": 9.0}
    for step in results.steps.values():
        write_result(tmp_path / step.result, {"layouts": [layout]})
    found = table5.conclude(results)
    assert found.verdict is Verdict.PLANNED
    assert json.dumps(found.commands).count("mlm pretrain") == 3
    assert "mlm finetune race ckpt=runs/bert_3_9b seeds=5" in {line for _, line in found.commands}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["v1-table5", "glue=glue"],
            r"glue=glue: has no split validation of sst2; give .* sst2/validation.jsonl",
        ),
        (
            ["nanogpt-shakespeare", "peer=glue"],
            r"peer=glue: has no train.py; give a checkout of karpathy/nanoGPT",
        ),
    ],
    ids=["glue", "peer"],
)
def test_a_folder_without_its_files_is_rejected_before_training(
    words: list[str],
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("glue/sst2").mkdir(parents=True)
    Path("glue/sst2/train.jsonl").write_text("{}")
    assert main(["reproduce", *words, "out=out"]) == 2
    assert re.search(line, capsys.readouterr().err)
    assert not Path("out").exists()
