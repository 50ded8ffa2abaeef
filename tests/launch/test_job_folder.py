"""Temporary folders of launches that were killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlm.launch.job_folder import PREFIX, job_folder, remove_abandoned

HOLD = "import time; from mlm.launch.job_folder import job_folder\n"
HOLD += "with job_folder() as folder: print(folder, flush=True); time.sleep(60)"


def test_a_folder_goes_with_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with job_folder() as folder:
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_only_what_a_killed_launch_left_is_removed(tmp_path: Path) -> None:
    """A folder in use, a young one and one of somebody else's making stay."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    (tmp_path / f"{PREFIX}without-a-lock").mkdir()
    remove_abandoned(tmp_path, young_s=0.0)
    assert folder.is_dir()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    remove_abandoned(tmp_path)
    assert folder.is_dir()
    remove_abandoned(tmp_path, young_s=0.0)
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}without-a-lock"]
