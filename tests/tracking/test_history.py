"""metrics.jsonl stays one readable history through kills, resumes and full disks."""

import errno
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from mlm.tracking.history import FILE_NAME, MetricsFile, read_records, rewind
from tests.tracking.reporting import read_metrics, step_metrics


def begun(
    out: Path, last_step: int, *, start_step: int = 0, warnings: list[str] | None = None
) -> MetricsFile:
    """A history with the steps after `start_step` up to `last_step`."""
    warn = pytest.fail if warnings is None else warnings.append
    history = MetricsFile(out / FILE_NAME, start_step, warn=warn)
    history.start({"start_step": start_step})
    for step in range(start_step + 1, last_step + 1):
        history.step(step_metrics(step))
    return history


def attempt(out: Path, start_step: int, last_step: int) -> None:
    """Report steps after `start_step` up to `last_step`, each validated and saved."""
    history = begun(out, start_step, start_step=start_step)
    for step in range(start_step + 1, last_step + 1):
        history.step(step_metrics(step))
        history.validation(step, 4.0, 54.6)
        history.saved(step, out, 0.1, 0.0)
    history.close()


def test_resuming_cuts_off_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 5)
    attempt(tmp_path, 3, 4)
    history = [(r["kind"], r.get("step", r.get("start_step"))) for r in read_metrics(tmp_path)]
    kinds = ("step", "validation", "saved")
    before = [(kind, step) for step in (1, 2, 3) for kind in kinds]
    assert history == [("run", 0), *before, ("run", 3), *((kind, 4) for kind in kinds)]
    attempt(tmp_path, 0, 0)  # from scratch
    assert [r["kind"] for r in read_metrics(tmp_path)] == ["run"]


@pytest.mark.parametrize("rest", [b'{"kind": "step", "step": 2, "lo', b"\0" * 100 + b"\xff\n"])
def test_what_a_kill_or_a_power_loss_left_is_removed(tmp_path: Path, rest: bytes) -> None:
    """Half a line, and blocks of zeros."""
    attempt(tmp_path, 0, 2)
    with open(tmp_path / FILE_NAME, "ab") as file:
        file.write(rest)
    attempt(tmp_path, 2, 3)
    records = read_metrics(tmp_path)
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3]
    assert len(records) == 2 + 3 * 3


def test_a_whole_last_line_without_its_newline_is_kept_and_a_whole_file_not_rewritten(tmp_path: Path) -> None:
    attempt(tmp_path, 0, 2)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-1])
    attempt(tmp_path, 2, 3)
    assert [r["step"] for r in read_metrics(tmp_path) if r["kind"] == "saved"] == [1, 2, 3]
    attempt(tmp_path, 0, 2)
    inode = (tmp_path / FILE_NAME).stat().st_ino
    attempt(tmp_path, 2, 3)
    assert (tmp_path / FILE_NAME).stat().st_ino == inode


@pytest.mark.parametrize("step", [0, 2])
def test_returning_to_a_checkpoint_keeps_attempts_and_incidents(tmp_path: Path, step: int) -> None:
    history = begun(tmp_path, 3)
    history.event("incident", {"step": 3, "kinds": ["loss_outlier"]})
    history.rewound(step)
    history.step(step_metrics(step + 1))
    history.close()
    found = [(r["kind"], r.get("step", 0)) for r in read_metrics(tmp_path)]
    steps = [("step", done) for done in range(1, step + 1)]
    assert found == [("run", 0), *steps, ("incident", 3), ("step", step + 1)]


def test_a_file_beyond_its_limit_does_not_end_a_run_that_returns_to_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone has the file: its error would leave the other ranks waiting."""
    warnings: list[str] = []
    history = begun(tmp_path, 2, warnings=warnings)
    monkeypatch.setattr("mlm.tracking.history.MAX_BYTES", 10)
    history.rewound(1)
    history.step(step_metrics(2))
    history.close()
    (warning,) = warnings
    assert "10 is the limit" in warning
    assert warning.endswith("; it keeps steps that are trained again")
    assert [r["step"] for r in read_metrics(tmp_path) if r["kind"] == "step"] == [1, 2, 2]


def test_lines_wait_for_a_rewound_file_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open file was replaced: what is written to it is lost."""
    warnings: list[str] = []
    history = begun(tmp_path, 2, warnings=warnings)
    with monkeypatch.context() as patch:
        patch.setattr("mlm.tracking.history.open_regular", Mock(side_effect=PermissionError(13, "denied")))
        history.rewound(1)
        history.step(step_metrics(2))
        history.step(step_metrics(3))
    history.close()
    assert [warning.rpartition(": ")[2].partition(".")[0] for warning in warnings] == [
        "denied; its lines wait in memory"
    ]
    assert [r["step"] for r in read_metrics(tmp_path) if r["kind"] == "step"] == [1, 2, 3]


def test_a_long_file_is_rewound_in_time_proportional_to_it(tmp_path: Path) -> None:
    """20,000 steps take 0.1 s; adding a line to the bytes before it copies them, and took 4 s."""
    lines = [b'{"kind": "step", "step": %d, "rest": "%s"}\n' % (step, b"x" * 250) for step in range(20_000)]
    (tmp_path / FILE_NAME).write_bytes(b"".join(lines))
    begin = time.process_time()
    rewind(tmp_path / FILE_NAME, 19_990)
    assert time.process_time() - begin < 1.5
    assert (tmp_path / FILE_NAME).read_bytes() == b"".join(lines[:19_991])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_null(tmp_path: Path, value: float) -> None:
    history = MetricsFile(tmp_path / FILE_NAME, 0, warn=pytest.fail)
    history.start({"start_step": 0, "nested": {"values": [1.0, value]}})
    history.step(step_metrics(1, loss=value))
    history.close()
    run, step = read_metrics(tmp_path)
    assert step["loss"] is None
    assert run["nested"] == {"values": [1.0, None]}


def test_a_full_disk_warns_once_and_tears_no_line(tmp_path: Path) -> None:
    warnings, content, space = list[str](), bytearray(), [100]

    def write(data: bytes) -> int:
        if not space[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data[: space[0]]
        content.extend(taken)
        space[0] -= len(taken)
        return len(taken)

    history = MetricsFile(tmp_path / FILE_NAME, 0, warn=warnings.append)
    history.file = Mock(write=write)
    for step in (1, 2, 3):
        history.step(step_metrics(step))
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    space[0] = 10_000
    history.close()
    (tmp_path / FILE_NAME).write_bytes(content)
    assert [r["step"] for r in read_records(tmp_path / FILE_NAME)] == [1, 2, 3]
    assert len(warnings) == 1
