"""The table of a sweep: every run with what it varied, how it ended and what it reached."""

from pathlib import Path

import pytest

from mlm.tracking.sweep import best_of, cells, report_sweep, run_of
from tests.tracking.reporting import reporter, step_metrics


def trained(out: Path, done: int, *losses: float) -> None:
    """A run of 100 steps that got to `done`, validated every ten."""
    with reporter(out) as report:
        for number, loss in enumerate(losses, start=1):
            report.validation(10 * number, loss, 10.0)
        report.step(step_metrics(done, loss=2.0, tokens_per_s=2e6))


def sweep(folder: Path) -> list[dict[str, object]]:
    """A finished run, one that was stopped, one that failed and one that was not started."""
    rates, ends = ("1e-3", "2e-3", "4e-3"), ((100, 0), (50, 0), (20, 2))
    runs = []
    for rate, (done, code) in zip(rates, ends, strict=True):
        trained(folder / f"lr={rate}", done, 5.0, 3.0 + done / 100, 4.5)
        runs.append(run_of([f"lr={rate}"], str(folder / f"lr={rate}"), code))
    return [*runs, run_of(["lr=8e-3"], None, None)]


def test_each_run_has_its_settings_numbers_and_state(tmp_path: Path) -> None:
    headings, rows = cells(sweep(tmp_path))
    table = [dict(zip(headings, row, strict=True)) for row in rows]
    assert table[0] == {
        "": "",
        "lr": "1e-3",
        "loss#": "4.5000",
        "best#": "4.0000",
        "at step#": "20",
        "tokens/s#": "2M",
        "state": "finished",
        "folder": str(tmp_path / "lr=1e-3"),
    }
    states = ["finished", "stopped after step 50 of 100", "failed (exit code 2)", "not started"]
    assert [row["state"] for row in table] == states
    assert [row[""] for row in table] == ["", "", "best", ""]
    assert set(table[3].values()) == {"", "8e-3", "not started"}


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 1), ("loss", 0), ("wer", 0)])
def test_the_best_run_on_a_task_has_the_highest_score_or_the_least_error(
    tmp_path: Path, metric: str, best: int
) -> None:
    """A type of task says which of its scores are errors."""
    for name, value in (("a", 0.8), ("b", 0.9)):
        with reporter(tmp_path / name, run={"less_is_better": ["loss", "wer"]}) as report:
            report.scores(10, "dev", {metric: value}, is_best=True)
            report.scores(20, "dev", {metric: 0.1}, is_best=False)
    runs = [run_of([], str(tmp_path / name), 0) for name in "ab"]
    assert best_of(runs) is runs[best]
    assert (runs[1]["score"], runs[1]["best_step"], runs[1]["metric"]) == (0.9, 10, f"dev {metric}")


def test_the_table_is_kept_beside_the_runs(tmp_path: Path) -> None:
    runs = sweep(tmp_path)
    for _ in range(2):
        report_sweep(runs)
    text = (tmp_path / "sweep.md").read_text()
    assert "| best | 4e-3 | 4.5000 |" in text
    assert "failed (exit code 2)" in text


def test_a_file_of_the_user_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.md").write_text("mine")
    report_sweep(sweep(tmp_path))
    assert (tmp_path / "sweep.md").read_text() == "mine"
    assert "sweep.md was not written by mlm: the table is not kept" in capsys.readouterr().out


def test_runs_without_a_folder_in_common_have_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report_sweep([run_of([], out, 0) for out in ("a/run", "b/run")])
    assert list(tmp_path.rglob("*")) == []


def test_a_full_disk_fails_no_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    runs = sweep(tmp_path)
    monkeypatch.setattr("mlm.tracking.sweep.write_atomic", full)
    report_sweep(runs)
    assert "the table is not kept" in capsys.readouterr().out


def test_a_row_of_the_table_is_one_line_however_narrow_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    report_sweep(sweep(tmp_path))
    lines = [line for line in capsys.readouterr().out.splitlines() if str(tmp_path / "lr=") in line]
    assert [line.split()[-1] for line in lines] == [str(tmp_path / f"lr={n}e-3") for n in (1, 2, 4)]
