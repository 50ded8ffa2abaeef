"""The lines of a run, which a program can split."""

import os
from pathlib import Path

import pytest

from mlm.tracking.display import Display, duration
from mlm.tracking.metrics import ExpertLoads
from mlm.tracking.reporter import training_console
from tests.tracking.reporting import Clock, read_metrics, reporter, shown, step_metrics, terminal


def pairs(line: str) -> dict[str, str]:
    words = line.split()
    return dict(zip(words[::2], words[1::2], strict=True))


def lines_of(tmp_path: Path, *metrics_of_steps: dict[str, object]) -> list[str]:
    """The plain lines of steps 10, 20, …, with the clock moving 5 s from one to the next."""
    clock, console = Clock(), terminal(width=40)
    with reporter(tmp_path, console, clock=clock, header=[]) as report:
        for index, changed in enumerate(metrics_of_steps, start=1):
            report.step(step_metrics(10 * index, **changed))
            clock.now += 5
    return shown(console).splitlines()


def test_a_plain_line_is_names_and_values_with_the_loss_scale_in_fp16(tmp_path: Path) -> None:
    line, fp16 = map(pairs, lines_of(tmp_path, {}, {"loss_scale": 65536.0, "skipped_steps": 2}))
    assert line == {
        "step": "10/100",
        "loss": "4.2500",
        "lr": "3.000e-04",
        "grad_norm": "0.7500",
        "tokens/s": "2000",
        "TFLOP/s": "0.1230",
        "MFU": "42.0%",
        "memory": "1.50GiB",
        "ETA": "0:00:45",
    }
    assert (fp16["loss_scale"], fp16["skipped"]) == ("65536", "2")


def test_a_plain_line_names_the_loss_of_every_corpus(tmp_path: Path) -> None:
    console = terminal(width=40)
    with reporter(tmp_path, console, header=[]) as report:
        report.validation(20, 3.5, 33.1155, {"wiki": 3.25, "web": 3.75})
        report.validation(30, 3.5, 33.1155)
    blended, single = map(pairs, shown(console).splitlines())
    assert (blended["validation/wiki"], blended["validation/web"]) == ("3.2500", "3.7500")
    assert list(single) == ["step", "validation_loss", "validation_ppl"]


def test_the_balance_of_experts_is_shown(tmp_path: Path) -> None:
    """Largest over mean: a line shows the least even layer, a record all."""
    (line,) = lines_of(
        tmp_path, {"loads": ExpertLoads({1: [3, 1, 0, 0], 2: [1, 1, 1, 1]}, {1: [2, 0, 0, 0], 2: [0] * 4})}
    )
    assert (pairs(line)["imbalance"], pairs(line)["dropped"]) == ("3.00", "25.00%")
    (record,) = (each for each in read_metrics(tmp_path) if each["kind"] == "step")
    assert record["imbalance"] == 3.0
    assert record["imbalance_by_layer"] == {"1": 3.0, "2": 1.0}
    assert record["dropped"] == 0.25


def test_a_log_names_micro_batches_ever_more_rarely_until_the_first_step() -> None:
    console, clock = terminal(), Clock()
    lines = Display(console, header=[], start_step=0, total_steps=100, clock=clock)
    for second in range(61):
        clock.now = 100.0 + second
        lines.micro_batch(second, 64)
    lines.step(step_metrics(1))
    clock.now = 1000.0
    lines.micro_batch(1, 64)
    *early, step = map(pairs, shown(console).splitlines())
    assert [line["elapsed"] for line in early] == ["0:00:10", "0:00:20", "0:00:40"]
    assert (early[0]["step"], early[0]["micro_batch"], step["step"]) == ("1/100", "10/64", "1/100")


def test_a_failed_save_is_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal()
    with reporter(tmp_path, console) as report:
        report.save_failed(2, "No space left on device")
        assert "SAVING FAILED" not in shown(console)
        report.save_failed(100, "No space left on device")
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("mlm: SAVING FAILED at step 2: No space left on device. Training continues")
    assert last == "mlm: SAVING FAILED at step 100: No space left on device"  # of 100: nothing continues


def test_training_outlives_the_reader_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As behind `| head`: lines are dropped, numbers stay in metrics.jsonl, one line on stderr says so."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        made = training_console(tmp_path / "metrics.jsonl")
        with reporter(tmp_path, made) as report:
            for step in (10, 20):
                report.step(step_metrics(step))
    assert [record["step"] for record in read_metrics(tmp_path) if record["kind"] == "step"] == [10, 20]
    path = tmp_path / "metrics.jsonl"
    expected = f"mlm: standard output: Broken pipe; training continues, its numbers are in {path}\n"
    assert capfd.readouterr().err == expected


@pytest.mark.parametrize(
    "seconds, text",
    [(None, "-:--:--"), (0, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (2 * 86400 + 61, "2d00:01:01")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
