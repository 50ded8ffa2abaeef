"""A run's folder is read whatever a kill or another program left in it."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from mlm.tracking.runs import number, read_run
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.lock import single_writer
from tests.tracking.page.made import some_run, started, stepped, validated, write_run

ERROR = "out of memory; lower train.micro_batch_size"
FAILED = {"kind": "failed", "time": 1011.0, "step": 10, "error": ERROR}


def test_a_damaged_file_shows_what_is_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", started(), stepped(1), stepped(2))
    with open(run / "metrics.jsonl", "ab") as f:
        f.write(b'{"kind": "step", "step": 3, "lo\n\xff\xfe\x00\n[1]\n{"step": 4}\n')
        f.write(b'{"kind": "step", "step": 5, "loss": NaN, "grad_norm": Infinity, "tokens": 1e999}\n')
        f.write(json.dumps(stepped(6, loss=2.5)).encode() + b"\n")
        f.write(b'{"kind": "step", "step": 7, "loss": 2')  # being written
    found = read_run(run, "a")
    assert found.damaged == 4
    assert found.tables["step"]["step"].tolist() == [1, 2, 5, 6]
    assert found.column("step", "loss")[-1] == 2.5
    assert len(found.column("step", "loss")) == 3


def test_a_resumed_run_is_one_curve(tmp_path: Path) -> None:
    first = [stepped(step, loss=1.0) for step in (1, 2, 3, 4)]
    again = [stepped(step, loss=2.0) for step in (3,)]
    found = read_run(write_run(tmp_path / "a", started(), *first, started(2), *again), "a")
    assert found.column("step", "loss").tolist() == [1.0, 1.0, 2.0]
    assert found.done == 3


def test_breaks_between_attempts_are_no_time_of_the_run(tmp_path: Path) -> None:
    records = [started(), stepped(10), started(10, time=9000.0), stepped(11, time=9005.0)]
    found = read_run(write_run(tmp_path / "a", *records), "a")
    assert found.seconds == 15.0
    assert found.tables["step"]["time"].tolist() == [10.0, 15.0]


def test_validations_have_the_tokens_of_their_step(tmp_path: Path) -> None:
    found = read_run(write_run(tmp_path / "a", started(), stepped(10), stepped(20), validated(15)), "a")
    assert found.tables["validation"]["tokens"].tolist() == [15 * 512]


def test_an_empty_run_and_broken_settings_are_no_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "config.yaml").write_text("command: [pretrain\n")
    (run / "eval-loss.json").write_text("{")
    found = read_run(run, "a")
    assert (found.done, found.settings, len(found.problems)) == (0, {}, 2)


def test_metrics_that_are_no_file_are_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(CorruptFileError, match="not a regular file"):
        read_run(run, "a")


@pytest.mark.parametrize(
    ("steps", "result", "is_finished"),
    [
        ((40,), {"steps": 40}, True),
        ((40,), {"steps": 30}, False),  # it was resumed since
        ((), {"seeds": [1, 2], "results": []}, True),  # metrics are in their folders
    ],
)
def test_a_run_that_patience_ended_or_whose_seeds_did_is_finished(
    tmp_path: Path, steps: tuple[int, ...], result: dict[str, Any], is_finished: bool
) -> None:
    records = [record for step in steps for record in (started(), stepped(step))]  # of 100 steps
    run = write_run(tmp_path / "a", *records)
    assert not read_run(run, "a").is_finished
    (run / "result.json").write_text(json.dumps({"task": "rte"} | result))
    assert read_run(run, "a").is_finished is is_finished


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], "not started"),
        ([started(), stepped(10)], "stopped"),
        ([started(), stepped(10), FAILED], "failed"),
        ([started(), stepped(10), FAILED, started(10, time=4000.0), stepped(11)], "stopped"),
        ([started(), stepped(100)], "finished"),
    ],
)
def test_a_run_has_its_state(tmp_path: Path, records: list[dict[str, Any]], expected: str) -> None:
    run = read_run(write_run(tmp_path / "a", *records), "a")
    assert run.state == expected
    lines = [line for line in run.notes if "failed" in line]
    assert lines == ([f"a: failed at step 10: {ERROR}"] if expected == "failed" else [])


def test_a_run_whose_checkpoints_are_locked_is_running(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", started(time=1.8e9), stepped(10))
    with single_writer(folder / "checkpoints"):
        assert read_run(folder, "a").state == "running since 2027-01-15 08:00"
        with pytest.raises(UserError, match="in use by"), single_writer(folder / "checkpoints", wait_s=0):
            pass
    assert read_run(folder, "a").state == "stopped"


def test_scores_and_checkpoints_that_are_there_are_found(tmp_path: Path) -> None:
    run = some_run(tmp_path / "a")
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "eval-loss.json").write_text('{"task": "loss", "loss": NaN}')
    found = read_run(run, "a")
    assert [name for name, _ in found.scores] == ["eval-loss.json"]
    assert found.checkpoints == {"step-1"}


@pytest.mark.parametrize("value", [None, True, "1", math.nan, math.inf, 10**400, [1]])
def test_what_is_no_finite_number_is_a_gap(value: object) -> None:
    assert math.isnan(number(value))
