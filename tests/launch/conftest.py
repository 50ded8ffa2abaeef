"""Jobs in processes of their own, without the variables of a launcher that the tests may run under."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith("SLURM_")] + ["RANK", "WORLD_SIZE", "LOCAL_RANK"]:
        monkeypatch.delenv(key, raising=False)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start_one(job: str, folder: Path, *before: str, **variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, *before, "-m", "tests.launch.jobs", job, str(folder)]
        started.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(folder), **variables},  # a killed job leaves its files here
                text=True,
                stderr=subprocess.PIPE,
            )
        )
        return started[-1]

    yield start_one
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
