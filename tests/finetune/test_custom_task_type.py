"""A user's own type of task, named in YAML by its import path, from `mlm finetune` to `mlm eval`."""

import json
import random
import sys
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.config.imports import TRUST
from mlm.finetune.registry import task_type
from mlm.util.errors import UserError
from tests.finetune.material import write_rows
from tests.finetune.runs import read, words, write_model
from tests.pages import blocks

GUIDE = Path(__file__).parents[2] / "scripts/docs/pages/guides/finetuning.md"
(MODULE,) = (block.code for block in blocks(GUIDE.read_text(), GUIDE.name) if "TaskType" in block.code)
"""The example of the guide."""
YAML = """
name: reviews
kind: my_stars:TASK
columns: [review]
label: stars
metrics: [closeness]
max_length: 24
epochs: 2
batch_size: 8
lr: 0.01
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pretrained model, the user's module and YAML, and reviews."""
    draw = random.Random(0)
    (tmp_path / "my_stars.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(TRUST, raising=False)
    monkeypatch.delitem(sys.modules, "my_stars", raising=False)
    (tmp_path / "conf/task").mkdir(parents=True)
    (tmp_path / "conf/task/reviews.yaml").write_text(YAML)
    write_model(tmp_path / "bert")
    for name, count in (("train", 16), ("validation", 8), ("test", 3)):
        stars = [draw.randint(1, 5) for _ in range(count)]
        records = [{"review": words(draw, 1, 6), "stars": n} for n in stars]
        write_rows(tmp_path / "rows" / f"{name}.jsonl", records)
    return tmp_path


def command(folder: Path, *words: str) -> int:
    given = [f"--config-dir={folder / 'conf'}", f"data.path={folder / 'rows'}", "dist.device=cpu"]
    return main([*words, *given])


@pytest.mark.slow
def test_a_task_type_named_by_import_path_finetunes_and_evaluates(folder: Path) -> None:
    out = folder / "out"
    assert command(folder, "finetune", "reviews", f"ckpt={folder / 'bert'}", f"out={out}", "dropout=0") == 0
    result = read(out / "result.json")
    assert result["depends_on"]["task.kind"] == "my_stars:TASK"

    predictions = [f"predictions={folder / 'predictions'}", f"out={folder / 'eval.json'}"]
    assert command(folder, "eval", "reviews", f"ckpt={out}", *predictions) == 0
    (entry,) = read(folder / "eval.json")["results"]
    said = [int(value) for value in read(folder / "predictions/validation.json").values()]
    rows = [json.loads(line)["stars"] for line in (folder / "rows/validation.jsonl").read_text().splitlines()]
    errors = [abs(a - b) for a, b in zip(said, rows, strict=True)]
    assert entry["metrics"] == {"closeness": pytest.approx(1 - sum(errors) / len(errors) / 4)}
    assert entry["metrics"] == result["scores"]["validation"]


def test_a_custom_type_reports_its_own_problems_of_rows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder / "rows/train.jsonl", [{"review": "a cat", "stars": 7}])
    assert command(folder, "finetune", "reviews", f"ckpt={folder / 'bert'}", f"out={folder / 'out'}") == 2
    assert "train.jsonl:1: stars=7 is not 1 to 5: fix or delete it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, problem",
    [
        ("classificaton", "no such choice; did you mean task.kind=classification"),
        ("json:dumps", "not a TaskType"),
        ("my_stars:TASK", "if you trust it, type task.kind=my_stars:TASK or set MLM_TRUST=my_stars"),
    ],
)
def test_a_wrong_type_of_task_is_an_error_of_its_key(
    kind: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRUST, "json")
    with pytest.raises(UserError, match=f"task.kind={kind}: .*{problem}"):
        task_type(kind)
