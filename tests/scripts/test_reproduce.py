"""scripts/reproduce.py: its commands compose, finished steps are kept, reports hold the numbers of runs."""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from reproduce import main as reproduce
from reproduce.main import EXPERIMENTS, Runner, Step, main, parse, report, stages_of

from mlm.cli.commands import COMMANDS
from mlm.cli.compose.composition import load_config
from mlm.util.errors import CheckFailedError
from tests.slow import thinned

ROOT = Path(__file__).resolve().parents[2]


def settings(folder: Path, *words: str) -> Namespace:
    return parse([*words, f"--out={folder / 'out'}", f"--peer={folder}", "--cores=2"])


@pytest.mark.parametrize("name", thinned([*EXPERIMENTS], 2))
def test_steps_are_commands_that_compose(name: str, tmp_path: Path) -> None:
    """One of all steps that set the same keys: they differ in numbers alone."""
    steps = [step for stage in stages_of(name, settings(tmp_path, "--seeds=1")) for step in stage]
    by_keys = {tuple(word.partition("=")[0] for word in step.words): step for step in steps}
    for step in by_keys.values():
        if step.words[0] == "mlm":
            commands = [each for each in COMMANDS if each.words == step.words[1 : 1 + len(each.words)]]
            command = max(commands, key=lambda each: len(each.words))
            load_config(command.config, list(step.words[1 + len(command.words) :]))


def test_timed_runs_take_turns_alone(tmp_path: Path) -> None:
    stages = stages_of("ptdp-interleaving", settings(tmp_path, "--seeds=2"))
    assert len(stages) == 2 * len(EXPERIMENTS["ptdp-interleaving"]["runs"])
    assert [stage[0].name.rpartition("-")[2] for stage in stages] == ["1"] * 6 + ["2"] * 6


WRITE = "import sys; open(sys.argv[1], 'x').write(sys.argv[2])"


def writing(name: str, content: str = "{}") -> Step:
    """A step that writes a file, and fails if it is there already."""
    return Step(name, ("python", "-c", WRITE, name, content), name)


def test_finished_steps_are_kept(tmp_path: Path) -> None:
    stages = [[writing("one"), writing("two")], [writing("three")]]
    for _ in range(2):
        Runner(tmp_path, 2).run(stages)
    (tmp_path / "two").unlink()
    Runner(tmp_path, 2).run(stages)
    assert {"one", "two", "three"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "program,message",
    [("import sys; print('tp=7: no'); sys.exit(2)", "ended with 2: tp=7: no"), ("pass", "stopped")],
)
def test_a_step_that_fails_or_leaves_nothing_is_not_remembered(
    tmp_path: Path, program: str, message: str
) -> None:
    with pytest.raises(CheckFailedError, match=message):
        Runner(tmp_path, 1).run([[Step("one", ("python", "-c", program), "result")]])
    assert not (tmp_path / "steps/one.json").exists()


@pytest.mark.slow
def test_a_signal_stops_what_runs(tmp_path: Path) -> None:
    """SIGTERM reaches the step, and the script says how to continue."""
    program = (
        "import sys; sys.path[:0] = [sys.argv[1]]; from reproduce import main as reproduce; "
        "text = \"import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)\"; "
        "step = reproduce.Step('sleeps', ('python', '-c', text), 'done'); "
        "reproduce.stages_of = lambda name, args: [[step]]; "
        "sys.exit(reproduce.main(['ptdp-bubble', '--out=' + sys.argv[2]]))"
    )
    command = [sys.executable, "-c", program, str(ROOT / "scripts"), str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_report_compares_runs_with_the_first_and_the_paper(tmp_path: Path) -> None:
    args = settings(tmp_path, "--seeds=1")
    for stage in stages_of("ptdp-bubble", args):
        count = int(stage[0].name.split("-")[2].removeprefix("m"))  # of micro-batches
        folder = args.out / stage[0].result
        folder.mkdir(parents=True)
        record = {"kind": "step", "step_time_s": 0.1 * (count + 1), "tflops": 1.0}
        lines = (json.dumps({**record, "step": n}) + "\n" for n in range(1, 13))
        (folder / "metrics.jsonl").write_text("".join(lines))
    text = report("ptdp-bubble", args)
    assert "| m=1 | 0.2 | 1.882 | 1.882 | 0 |" in text
    assert EXPERIMENTS["ptdp-bubble"]["claim"] in text


def test_kept_reports_are_those_of_the_experiments() -> None:
    kept = ROOT.glob("scripts/results/reproduce/*/result.json")
    assert {path.parent.name for path in kept} <= set(EXPERIMENTS)


@pytest.mark.slow
def test_an_experiment_runs_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "timed": "model.num_layers=2 model.hidden_size=16 model.num_heads=2 model.max_positions=16",
        "runs": {"pp=1": "pp=1 dp=1 train.global_batch_size=8"},
    }
    monkeypatch.setitem(reproduce.EXPERIMENTS, "ptdp-bubble", {**EXPERIMENTS["ptdp-bubble"], **words})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["ptdp-bubble", "--seeds=1", f"--out={tmp_path}"]) == 0
    assert "| pp=1 | " in capsys.readouterr().out
    assert json.loads((tmp_path / "ptdp-bubble/result.json").read_text())["rows"][0]["of the first"] == [1.0]
