"""A folder that is not shared, cannot be written, renamed or locked is found on the rank that has it."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlm.launch.doctor import folder as folders
from mlm.launch.doctor.findings import CheckResult, rows_of
from mlm.launch.doctor.folder import LOCKS, RENAMED, SHARED, SPEED, check_folder
from mlm.parallel.mesh import CPU, ParallelContext
from mlm.util.lock import Lock, LockError
from tests.launch.doctor.trials import on_threads

FINE = {SHARED: "ok", RENAMED: "ok", SPEED: "ok", LOCKS: "ok"}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "SEEN_S", 0.1)
    monkeypatch.setattr(folders, "PIECES", 1)
    monkeypatch.setattr(folders, "SLOW_SPEED", 0.0)  # whatever the disk of the tests does


def checked(monkeypatch: pytest.MonkeyPatch, *folders_of_ranks: Path) -> list[list[CheckResult]]:
    """Findings of each rank, in its folder; all are the first of their host."""

    def work(ctx: Any) -> list[CheckResult]:
        return check_folder(folders_of_ranks[ctx.rank], ctx, is_first_of_host=True)

    return on_threads(monkeypatch, work, len(folders_of_ranks))


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


def test_a_folder_that_is_not_shared_names_the_rank_that_does_not_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    found = checked(monkeypatch, *(tmp_path / name for name in ("one", "one", "other")))
    row = next(row for row in rows_of(found, ["h0", "h1", "h2"]) if row.check == SHARED)
    assert (row.status, row.ranks) == ("fail", (2,))
    assert "rank 2 (host h2)" in row.result
    assert row.remedy.startswith("name a folder on a file system that all hosts mount")


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_found(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folders, "write_atomic", full)
    (found,) = alone(tmp_path)
    assert (found.check, found.status) == (SHARED, "fail")
    assert os.strerror(number) in found.result


def forgetful(write: Callable[[Path, bytes], None]) -> Callable[[Path, bytes], None]:
    """Keep the old content of a file that is replaced."""
    return lambda path, content: None if content == b"second" else write(path, content)


def test_a_disk_on_which_a_replaced_file_stays_old_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "write_atomic", forgetful(folders.write_atomic))
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


def take_anyway(self: Lock, wait_s: float = 0.0) -> bool:
    self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT)
    return True


def not_supported(self: Lock, wait_s: float = 0.0) -> bool:
    raise LockError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize(
    ("take", "said"), [(take_anyway, "two processes hold one lock"), (not_supported, "No locks available")]
)
def test_locks_that_do_not_exclude_are_found(
    take: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lock, "take", take)
    found = checked(monkeypatch, *[tmp_path] * 3)
    (mine,) = (one for one in found[1] if one.check == LOCKS)
    assert (mine.status, mine.result) == ("fail", said)
