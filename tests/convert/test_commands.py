"""`mlm ckpt` as it is typed, from the command line to the disk."""

from pathlib import Path

import pytest

from mlm.cli import main
from tests.checkpoints_on_disk import checkpoint, damage, read, write_run


def test_commands_as_typed_end_as_they_should(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", value=2.0)
    damage(checkpoint(b, 1))
    out = tmp_path / "out.json"
    for line, code in (
        (f"ckpt inspect {a} --tensors --out {out}", 0),
        (f"ckpt verify ckpt={b}", 1),
        (f"ckpt diff {a} {b} out={out}", 1),
        (f"ckpt prune {a} --keep-last 1", 0),
    ):
        assert main(line.split()) == code, line
        captured = capsys.readouterr()
        assert captured.out
        assert captured.err.count("\n") == code, line
    assert read(out)["task"] == "ckpt diff"
    assert [path.name for path in (a / "checkpoints").glob("step-*")] == ["step-00000003"]
