"""Every run begins with the checks that cost nothing: versions and the folder of all ranks."""

import errno
import os
import time
from pathlib import Path

import pytest

from mlm.launch.doctor import folder as folders
from mlm.launch.doctor.findings import versions
from mlm.launch.doctor.folder import check_start
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from tests.ranks import run_on_ranks


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def said(ctx: ParallelContext, folder: Path, fault: str = "") -> tuple[str, float]:
    """The error of a start and its seconds; rank 1 has the fault."""
    before, waits, write = folders.versions, folders.SEEN_S, folders.write_atomic
    folders.SEEN_S = 0.2
    if ctx.rank == 1 and fault in ("local", "missing"):
        folder = folder / fault
    if ctx.rank == 1 and fault == "version":
        folders.versions = lambda: {**versions(), "torch": "1.0"}
    if ctx.rank == 1 and fault == "full":
        folders.write_atomic = full
    begin, found = time.monotonic(), ""
    try:
        check_start(str(folder), ctx)
    except UserError as error:
        found = str(error)
    finally:
        folders.versions, folders.SEEN_S, folders.write_atomic = before, waits, write
    return found.removeprefix(f"out={folder}: "), time.monotonic() - begin


def test_ranks_of_one_folder_and_version_start_at_once_and_leave_nothing(tmp_path: Path) -> None:
    found = run_on_ranks(said, tmp_path, dp=2)
    assert [text for text, _ in found] == ["", ""]
    assert max(seconds for _, seconds in found) < 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("local", "does not see what rank 0 wrote there within 0.2 s; name a folder on a file system"),
        ("missing", "cannot write to it: No such file or directory"),
        ("full", "cannot write to it: No space left on device; free space there"),
        ("version", "torch 1.0 on rank 1 (host "),
    ],
)
def test_all_ranks_report_the_rank_that_differs(fault: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (first, _), (second, _) = run_on_ranks(said, tmp_path, fault, dp=2)
    assert first == second
    assert "rank 1 (host " in first
    assert words in first
