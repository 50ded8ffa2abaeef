"""The command `mlm reproduce`: list, run, continue, report."""

import errno
import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from mlm.config.cli import main
from mlm.reproduce import preflight, run, runner
from mlm.reproduce.catalogue import EXPERIMENTS
from mlm.reproduce.conclusion import Conclusion, Table, Verdict
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.results import Results
from mlm.util.lock import Lock
from tests.reproduce.made import experiment, writing


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Experiment:
    """The only experiment, in an empty working directory."""
    found = experiment([writing("one", '{"value": 1}'), writing("two", '{"value": 2}')])
    monkeypatch.setattr(runner, "POLL_S", 0.01)
    for module in (run, preflight):
        monkeypatch.setattr(module, "EXPERIMENTS", (found,))
    monkeypatch.chdir(tmp_path)
    return found


def test_without_a_name_the_experiments_are_listed(
    made: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce"]) == 0
    shown = capsys.readouterr().out
    assert "v1-made" in shown
    assert not os.listdir(".")


def test_an_experiment_is_run_and_reported(made: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "v1-made", "out=r"]) == 0
    shown = capsys.readouterr().out
    assert "Seen here: the values add up to 3" in shown
    assert "agrees with the paper" in shown
    folder = Path("r/v1-made")
    assert {path.name for path in folder.iterdir()} == {
        *("report.html", "report.md", "result.json", "values.svg", "values.png")
    }
    result = json.loads((folder / "result.json").read_bytes())
    assert result["verdict"] == "agrees"
    assert result["steps"]["one"]["words"][0] == "python"
    assert result["charts"][0]["series"][1]["published"] is True
    text = (folder / "report.md").read_text()
    assert "| one | 1 |" in text
    assert "mlm pretrain model=gpt2_8b tp=4 out=runs/v1-made-2" in text
    page = (folder / "report.html").read_text()
    assert "Values &lt;b&gt;" in page
    assert "<b>Verdict:</b> agrees with the paper." in page
    assert len(page) < 2_000_000


def test_the_same_command_continues(made: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "v1-made", "out=r"]) == 0
    before = Path("r/results/one.json").stat().st_mtime_ns
    assert main(["reproduce", "all", "out=r"]) == 0
    assert Path("r/results/one.json").stat().st_mtime_ns == before
    assert "steps to run" not in capsys.readouterr().out.rpartition("Seen here")[0].partition("Seen here")[2]


def test_a_report_names_the_machine_that_measured(made: Experiment) -> None:
    assert main(["reproduce", "v1-made", "out=r"]) == 0
    record = Path("r/steps/two.json")
    fields = json.loads(record.read_bytes())
    record.write_text(json.dumps({**fields, "hardware": "another machine", "versions": "mlm 9"}))
    assert main(["reproduce", "v1-made", "out=r"]) == 0
    text = Path("r/v1-made/report.md").read_text()
    assert f"{fields['hardware']}; another machine" in text
    assert f"{fields['versions']}; mlm 9" in text


def test_numbers_that_are_not_finite_are_null(made: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    def infinite(results: Results) -> Conclusion:
        table = Table(title="Losses", headings=("run", "loss"), rows=[("one", math.inf), ("two", math.nan)])
        return Conclusion(verdict=Verdict.OPEN, seen="both diverged", limits=("all",), tables=(table,))

    for module in (run, preflight):
        monkeypatch.setattr(module, "EXPERIMENTS", (replace(made, conclude=infinite),))
    assert main(["reproduce", "v1-made", "out=r"]) == 0
    text = Path("r/v1-made/result.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["tables"][0]["rows"] == [["one", None], ["two", None]]


@pytest.mark.parametrize(
    "words,line",
    [
        (["v1-mad"], r"name=v1-mad: is no experiment; use all, .*did you mean 'v1-made'\?"),
        (["v1-made", "cores=5000"], r"cores=5000 must be from 1 to 4096"),
        (["v1-made", "cores=4096"], r"cores=4096: this process may use \d+; use cores="),
        (["v1-made", "seeds=0"], r"seeds=0 must be from 1 to 100"),
        (["v1-made", "scale=moon"], r"scale=moon"),
        (["v1-made", "out=mine"], r"out=mine: holds runs, which mlm did not write; name a new folder"),
        (["v1-made", "out=."], r"out=\.: "),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(
    made: Experiment, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    Path("mine").mkdir()
    Path("mine/runs").write_text("notes")
    assert main(["reproduce", *words]) == 2
    assert re.search(line, capsys.readouterr().err)
    assert os.listdir(".") == ["mine"]


def test_a_node_of_gpus_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["reproduce", "ptdp-tp-pp", "scale=node"]) == 2
    line = "scale=node: trains on 8 GPUs, and there are 1; use scale=laptop, or scale=paper"
    assert line in capsys.readouterr().err
    assert not os.listdir(".")


def test_two_at_once_in_one_folder_are_rejected(made: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "v1-made", "out=r"]) == 0
    other = Lock(Path("r/.lock"))
    assert other.take()
    try:
        assert main(["reproduce", "v1-made", "out=r"]) == 2
    finally:
        other.release()
    assert re.search(r"out=r: .* runs experiments there; wait, or name another out", capsys.readouterr().err)


def test_a_folder_that_cannot_be_made_is_one_line(
    made: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(*args: object) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "out")

    monkeypatch.setattr(run, "claim_folder", read_only)
    assert main(["reproduce", "v1-made", "out=out"]) == 2
    assert "out=out: Read-only file system (out); choose a folder" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_lets_running_steps_save(
    made: Experiment, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    script = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path('saved').write_text('x') * 0))\n"
        f"os.kill(os.getppid(), {int(number)}); time.sleep(60)"
    )
    slow = Step(name="slow", words=("python", "-c", script), result="saved", minutes=1, cores=1)
    for module in (run, preflight):
        monkeypatch.setattr(module, "EXPERIMENTS", (experiment([slow]),))
    before = signal.signal(number, unexpected)  # by default it would end the tests
    try:
        assert main(["reproduce", "v1-made"]) == 128 + number
    finally:
        signal.signal(number, before)
    assert Path("runs/reproduce/saved").exists()
    assert not list(Path("runs/reproduce/steps").glob("*.json"))


def unexpected(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"signal {number} reached the tests")


def test_experiments_have_names_of_their_own() -> None:
    names = [each.name for each in EXPERIMENTS]
    assert len(set(names)) == len(names)
