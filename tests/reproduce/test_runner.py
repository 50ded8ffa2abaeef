"""Steps of experiments: each once, in order, beside each other, stopped and continued."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlm.reproduce import runner
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import ALL_CORES, Step
from mlm.reproduce.records import STEPS, log_path, read_records, record_path
from mlm.reproduce.results import Record, Results
from mlm.reproduce.runner import Runner
from mlm.util.errors import CheckFailedError, CorruptFileError, UserError
from tests.reproduce.made import writing


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / STEPS).mkdir()
    return tmp_path


def ran(folder: Path, *steps: Step, cores: int = 2) -> list[str]:
    """Run what is left of some steps; return the lines that were said."""
    said = list[str]()
    Runner(folder, steps, read_records(folder, steps), cores).run(lambda done, running: None, said.append)
    return said


def failing(code: int, **fields: object) -> Step:
    words = ("python", "-c", f"import sys; print('mlm x: y=1: too small; use y=2'); sys.exit({code})")
    return Step(name="failing", words=words, result="results/x", minutes=1, cores=1, **fields)  # type: ignore[arg-type]


def test_each_step_runs_once(folder: Path) -> None:
    steps = writing("one"), writing("two")
    assert len(ran(folder, *steps)) == 2
    assert ran(folder, *steps) == []
    assert ran(folder, *steps, writing("three"))[0].startswith("three: ")


def test_a_step_whose_result_is_gone_runs_again(folder: Path) -> None:
    ran(folder, writing("one"))
    (folder / "results/one.json").unlink()
    assert len(ran(folder, writing("one"))) == 1


def test_a_step_with_other_words_is_not_taken_for_the_same(folder: Path) -> None:
    ran(folder, writing("one", '{"a": 1}'))
    with pytest.raises(UserError, match=r"step one was done with other settings.*name another out"):
        ran(folder, writing("one", '{"a": 2}'))


def test_a_step_waits_for_those_that_it_needs(folder: Path) -> None:
    words = ("python", "-c", "import json; json.load(open('results/first.json'))")
    after = Step(name="after", words=words, result="results", minutes=1, cores=1, needs=("first",))
    ran(folder, after, writing("first"))
    assert set(read_records(folder, [after])) == {"after"}


def test_a_step_of_all_cores_runs_alone_and_is_not_starved(folder: Path) -> None:
    note = "import time, json; time.sleep(0.2)"
    one = [
        Step(name=f"s{n}", words=("python", "-c", note), result="results", minutes=1, cores=cores)
        for n, cores in enumerate((1, ALL_CORES, 1))
    ]
    made = Runner(folder, one, {}, 2)
    seen = list[list[str]]()
    (folder / "results").mkdir()
    made.run(lambda done, running: seen.append(list(running)), lambda line: None)
    assert ["s1"] in seen
    assert not any("s1" in running and len(running) > 1 for running in seen)
    assert list(made.records) == ["s0", "s1", "s2"]


def test_a_failure_ends_all_with_its_own_line_and_command(folder: Path) -> None:
    with pytest.raises(
        CheckFailedError, match=r"step failing ended with 1: mlm x: y=1.*The command: python -c"
    ):
        ran(folder, failing(1))
    assert not record_path(folder, "failing").exists()


def test_a_failure_that_is_a_result_is_remembered(folder: Path) -> None:
    assert ran(folder, failing(1, may_fail="too small"))[0].endswith("failed")
    found = read_records(folder, [failing(1, may_fail="too small")])["failing"]
    assert found.code == 1
    assert "too small" in found.said


def test_another_failure_is_never_a_result(folder: Path) -> None:
    with pytest.raises(UserError, match="ended with 2"):
        ran(folder, failing(2, may_fail="too large"))


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(143)"])
def test_a_step_that_was_killed_is_never_a_result(folder: Path, end: str) -> None:
    words = ("python", "-c", f"import os, signal, sys; {end}")
    step = Step(name="killed", words=words, result="results/x", minutes=1, cores=1, may_fail=".")
    with pytest.raises(CheckFailedError, match=r"step killed (was ended by SIGKILL|ended with 143)"):
        ran(folder, step)
    assert not record_path(folder, "killed").exists()


def test_a_step_that_leaves_nothing_is_an_error(folder: Path) -> None:
    step = Step(name="idle", words=("python", "-c", ""), result="results/x.json", minutes=1)
    with pytest.raises(CheckFailedError, match=r"left no results/x\.json"):
        ran(folder, step)


def test_a_program_that_is_not_installed_is_named(folder: Path) -> None:
    step = Step(name="other", words=("no-such-program",), result="x", minutes=1)
    with pytest.raises(UserError, match="step other: no-such-program: No such file or directory; install it"):
        ran(folder, step)


@pytest.mark.parametrize("taken", ["results", "steps/one.log", "steps/one.json"])
def test_a_place_that_cannot_be_written_is_named(folder: Path, taken: str) -> None:
    (folder / taken).symlink_to("/dev/full/x")
    if taken.endswith(".json"):
        (folder / taken).unlink()
        (folder / taken).mkdir()
    with pytest.raises(UserError, match=r"^out=.*choose a folder that can be written to$"):
        ran(folder, writing("one"))


def test_what_runs_is_asked_to_stop_when_another_step_fails(folder: Path) -> None:
    script = (
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path('saved').write_text('x') * 0))\n"
        "pathlib.Path('ready').touch(); time.sleep(60)"
    )
    slow = Step(name="slow", words=("python", "-c", script), result="saved", minutes=1, cores=1)
    wait = "import os, time\nwhile not os.path.exists('ready'): time.sleep(0.01)\nraise SystemExit(1)"
    bad = Step(name="bad", words=("python", "-c", wait), result="x", minutes=1, cores=1)
    begun = time.monotonic()
    with pytest.raises(CheckFailedError, match="step bad ended with 1"):
        ran(folder, slow, bad)
    assert (folder / "saved").exists()
    assert time.monotonic() - begun < 30
    assert not record_path(folder, "slow").exists()


def test_a_run_that_was_stopped_early_is_not_taken_for_a_whole_one(folder: Path) -> None:
    run = folder / "runs/a"
    run.mkdir(parents=True)
    lines = [{"kind": "step", "step": step, "loss": 1.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    step = Step(
        name="a", words=("mlm", "pretrain", "train.steps=3", "out=runs/a"), result="runs/a", minutes=1
    )
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    log_path(folder, "a").touch()
    with pytest.raises(CheckFailedError, match="stopped after 2 of 3 steps"):
        Runner(folder, [step], {}, 1).finish(runner.Running(step, done, 0.0))


def test_progress_counts_the_steps_of_a_training_run(folder: Path) -> None:
    (folder / "runs/a").mkdir(parents=True)
    (folder / "runs/a/metrics.jsonl").write_text('{"kind": "step", "step": 5}\n')
    step = Step(name="a", words=("mlm", "pretrain", "train.steps=10"), result="runs/a", minutes=4)
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    made = Runner(folder, [step, writing("b", minutes=1)], {}, 1)
    made.running.append(runner.Running(step, done, time.monotonic()))
    assert made.minutes_done() == pytest.approx(2.0)
    assert made.minutes == 5


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[1]",
        "{}",
        '{"words": 5, "code": 0, "seconds": 1, "said": ""}',
        '{"words": ["a"], "code": "x", "seconds": 1, "said": ""}',
        '{"words": ["a"], "code": 0, "seconds": null, "said": ""}',
    ],
)
def test_a_damaged_record_is_named(folder: Path, content: str) -> None:
    ran(folder, writing("one"))
    record_path(folder, "one").write_text(content)
    with pytest.raises(CorruptFileError, match=r"one\.json is damaged.*delete it, and the step runs again"):
        ran(folder, writing("one"))


@pytest.mark.parametrize("content", ['{"value": 1', "[1]", "{}"])
def test_a_damaged_result_is_named(folder: Path, content: str) -> None:
    step = writing("one", content)
    ran(folder, step)
    results = Results(ReproduceConfig(out=str(folder)), [step], read_records(folder, [step]))
    with pytest.raises(CorruptFileError, match=r"one\.json is damaged.*delete it, and the step runs again"):
        results.json("one")["value"]


def logged(*steps: int) -> str:
    """Return the history of a run with these steps."""
    return "".join(json.dumps({"kind": "step", "step": step, "loss": 1.0}) + "\n" for step in steps)


@pytest.mark.parametrize("content", [None, "", logged(2), logged(*range(1, 9)), logged(*range(1, 10))[:-5]])
def test_a_run_that_has_lost_its_history_is_named(folder: Path, content: str | None) -> None:
    step = Step(name="a", words=("mlm", "pretrain", "train.steps=9"), result="runs/a", minutes=1)
    (folder / "runs/a").mkdir(parents=True)
    if content is not None:
        (folder / "runs/a/metrics.jsonl").write_text(content)
    results = Results(ReproduceConfig(out=str(folder)), [step], {"a": Record(step.words, 0, 1.0, "")})
    with pytest.raises(CorruptFileError, match=r"metrics\.jsonl is damaged.* of 9; delete .*runs/a, and"):
        results.run("a")


@pytest.mark.parametrize("content", [logged(1, 2, 3, 6, 7, 8, 9), logged(*range(1, 10)) + "{half\n"])
def test_a_history_that_has_lost_lines_in_between_is_named(folder: Path, content: str) -> None:
    step = Step(name="a", words=("mlm", "pretrain", "train.steps=9"), result="runs/a", minutes=1)
    (folder / "runs/a").mkdir(parents=True)
    (folder / "runs/a/metrics.jsonl").write_text(content)
    (folder / "runs/a/config.yaml").write_text("log:\n  every: 1\n")
    results = Results(ReproduceConfig(out=str(folder)), [step], {"a": Record(step.words, 0, 1.0, "")})
    with pytest.raises(CorruptFileError, match=r"metrics\.jsonl is damaged: .*; delete .*runs/a, and"):
        results.run("a")
