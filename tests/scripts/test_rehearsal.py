"""The rehearsal's own parts: what it holds, compares and records. The cluster itself needs root and SLURM."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import rehearse
from rehearsal.cases import PHASES
from rehearsal.cluster import Failed
from rehearsal.training import RUN, compare

from mlm.cli.entry import main

PAUSE = Path(rehearse.__file__).parents[1] / "torture"
ALONE = {1: 4.0, 2: 3.0, 3: 2.0}


@pytest.mark.parametrize("phase", PHASES.values())
def test_every_phase_is_a_function_that_is_there(phase: str) -> None:
    name, path, _ = phase.split(":")
    place = import_module(name)
    for part in path.split(".") if path != "<module>" else ():
        place = getattr(place, part)
    assert path == "<module>" or callable(place)


def test_a_process_pauses_in_the_second_call_until_it_is_released(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("def do(): print('done', flush=True)\n")
    environ = {**os.environ, "PYTHONPATH": f"{PAUSE}:{tmp_path}", "PAUSE_AT": "work:do:2"}
    environ |= {"PAUSE_MARKS": str(tmp_path / "marks"), "PAUSE_S": "60"}
    (tmp_path / "marks").mkdir()
    command = [sys.executable, "-c", "import work; work.do(); work.do()"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "done\n"
        while not (marks := list((tmp_path / "marks").iterdir())):
            assert process.poll() is None
        assert [path.name for path in marks] == [str(process.pid)]
        (tmp_path / "marks" / "released").touch()
        assert process.stdout.read() == "done\n"


def test_the_settings_of_its_runs_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", *RUN, "train.steps=4", f"out={tmp_path / 'run'}", "--check", "2"]
    assert main(words) == 0, capsys.readouterr().err


def history(folder: Path, losses: list[tuple[int, float]]) -> Path:
    lines = [{"kind": "run", "start_step": 0, "layout": {"dp": 1}}]
    lines += [{"kind": "step", "step": step, "loss": loss} for step, loss in losses]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    "losses, said",
    [
        ([(1, 4.0), (3, 2.0)], "the history holds the steps"),
        ([(1, 4.0), (2, 3.001), (3, 2.0)], "step 2 has the loss 3.001, undisturbed 3.0"),
    ],
)
def test_skipped_repeated_and_other_samples_fail(
    tmp_path: Path, losses: list[tuple[int, float]], said: str
) -> None:
    with pytest.raises(Failed, match=said):
        compare(history(tmp_path, losses), ALONE, steps=3)
