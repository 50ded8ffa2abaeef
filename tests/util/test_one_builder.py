"""The order of a large epoch is built by one process, whoever else needs it at that time."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from mlm.data.gpt import GPTDataset
from mlm.util import lock as module
from mlm.util.lock import single_builder
from tests.data.corpora import counting_corpus

LENGTHS = [5, 1, 17, 3, 9, 2]
WORKER = """
import sys, time
from pathlib import Path
import numpy as np
from mlm.data.gpt import Epoch, GPTDataset
from mlm.data.indexed import IndexedDataset

folder, slow = Path(sys.argv[1]), float(sys.argv[2])

class Marking(GPTDataset):
    def _build(self, number: int) -> Epoch:
        with open(folder / "built", "a") as f:
            f.write("x")
        time.sleep(slow)
        return super()._build(number)

corpus = IndexedDataset(folder / "c")
data = Marking(corpus, seq_length=4, num_samples=9, seed=3, cache_dir=folder / "cache", cache_from=0)
epoch = data.epoch(0)
print(epoch.documents.tolist(), epoch.ends.tolist(), epoch.windows.tolist())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    counting_corpus(tmp_path / "c", LENGTHS)
    return tmp_path


def start(folder: Path, slow: float) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", WORKER, str(folder), str(slow)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def expected(folder: Path) -> str:
    corpus = counting_corpus(folder / "again", LENGTHS)
    epoch = GPTDataset(corpus, seq_length=4, num_samples=9, seed=3).epoch(0)
    return f"{epoch.documents.tolist()} {epoch.ends.tolist()} {epoch.windows.tolist()}\n"


def test_one_of_several_processes_builds_and_all_get_the_same(folder: Path) -> None:
    workers = [start(folder, 0.5) for _ in range(3)]
    said = [worker.communicate()[0] for worker in workers]
    assert said == [expected(folder)] * 3
    assert (folder / "built").read_text() == "x"
    assert [path.suffix for path in (folder / "cache").iterdir()] == [".npy"]  # and nothing else stays


def test_a_builder_that_is_killed_leaves_the_work_to_the_next(folder: Path) -> None:
    first = start(folder, 600.0)
    end = time.monotonic() + 60
    while not (folder / "built").exists() and time.monotonic() < end:
        time.sleep(0.02)
    second = start(folder, 0.0)
    first.kill()
    first.communicate()
    assert second.communicate()[0] == expected(folder)
    assert (folder / "built").read_text() == "xx"


def test_a_holder_that_never_ends_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with single_builder(tmp_path / "x"), single_builder(tmp_path / "x", wait_s=0.1):
        pass


def test_a_file_system_without_locks_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(single_builder(tmp_path / "x"))
    assert len(os.listdir("/proc/self/fd")) == before
