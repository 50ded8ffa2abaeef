"""A folder that is not shared, cannot be written, renamed or locked is found on the rank that has it."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from mlm.launch.doctor import folder as folders
from mlm.launch.doctor.findings import CheckResult
from mlm.launch.doctor.folder import LOCKS, RENAMED, SHARED, SPEED, check_folder
from mlm.parallel.mesh import CPU, ParallelContext
from mlm.util.lock import Lock, LockError

FINE = {SHARED: "ok", RENAMED: "ok", SPEED: "ok", LOCKS: "ok"}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "SEEN_S", 0.1)
    monkeypatch.setattr(folders, "PIECES", 1)
    monkeypatch.setattr(folders, "SLOW_SPEED", 0.0)  # whatever the disk of the tests does


def checked(monkeypatch: pytest.MonkeyPatch, *folders_of_ranks: Path) -> list[list[CheckResult]]:
    """Findings of each rank in its folder; ranks are threads, and all the first of their host."""
    ranks = len(folders_of_ranks)
    slots, barrier = list[Any]([None] * ranks), Barrier(ranks, timeout=20.0)

    class Exchange:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def all_gather(self, value: Any) -> list[Any]:
            slots[self.rank] = value
            barrier.wait()
            answers = list(slots)
            barrier.wait()
            return answers

        def broadcast(self, value: Any) -> Any:
            return self.all_gather(value)[0]

    def work(rank: int) -> list[CheckResult]:
        ctx: Any = SimpleNamespace(rank=rank, world_size=ranks, is_main=rank == 0)
        return check_folder(folders_of_ranks[rank], ctx, is_first_of_host=True)

    monkeypatch.setattr(folders, "Ranks", SimpleNamespace(of=lambda ctx: Exchange(ctx.rank)))
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))


def alone(folder: Path) -> list[CheckResult]:
    return check_folder(folder, ParallelContext(device=CPU), is_first_of_host=True)


def statuses(found: list[CheckResult]) -> dict[str, str]:
    return {check_result.check: check_result.status for check_result in found}


def test_a_folder_of_one_disk_is_fine_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert statuses(alone(tmp_path)) == FINE
    assert list(map(statuses, checked(monkeypatch, *[tmp_path] * 3))) == [FINE] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_shared_or_written_is_found_on_the_rank_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = folders.write_atomic, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(folders, "write_atomic", Mock(side_effect=full))
        assert statuses(alone(tmp_path)) == {SHARED: "fail"}
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    found = checked(monkeypatch, *(tmp_path / name for name in ("one", "one", "other")))
    assert [ours[0].status for ours in found] == ["ok", "ok", "fail"]
    lost = lambda path, content: None if path.name == ".mlm-doctor-1" else write(path, content)  # noqa: E731
    monkeypatch.setattr(folders, "write_atomic", lost)
    assert "does not see what rank 1 wrote" in checked(monkeypatch, *[tmp_path] * 3)[0][0].result


def test_a_disk_on_which_a_replaced_file_stays_old_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = folders.write_atomic
    monkeypatch.setattr(
        folders, "write_atomic", lambda p, text: None if text == b"second" else write(p, text)
    )
    found = checked(monkeypatch, *[tmp_path] * 3)
    assert [statuses(each)[RENAMED] for each in found] == ["fail"] * 3
    assert "keeps its old content" in found[1][1].result


def test_a_disk_that_writes_slowly_is_a_warning_with_what_it_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync
    monkeypatch.setattr(folders, "SLOW_SPEED", 50e6)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (sync(descriptor), time.sleep(0.1)))
    found = next(one for one in alone(tmp_path) if one.check == SPEED)
    assert found.status == "warn"
    assert "MB/s: a checkpoint of a billion parameters takes" in found.result
    assert "checkpoint.save_every" in found.remedy


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "two processes hold one lock"),
        (LockError(errno.ENOLCK, "No locks available"), "No locks available"),
    ],
)
def test_locks_that_do_not_exclude_are_found(
    error: LockError | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(self: Lock, wait_s: float = 0.0) -> bool:
        if error is not None:
            raise error
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT)
        return True

    monkeypatch.setattr(Lock, "take", take)
    found = checked(monkeypatch, *[tmp_path] * 3)
    (mine,) = (one for one in found[1] if one.check == LOCKS)
    assert (mine.status, mine.result) == ("fail", said)
