"""One writer per folder of checkpoints."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from mlm.util.errors import UserError
from mlm.util.lock import HELD, remove_abandoned, single_writer

HOLD = "import sys, time; from pathlib import Path; from mlm.util.lock import single_writer\n"
HOLD += "with single_writer(Path(sys.argv[1])): print('mine', flush=True); time.sleep(60)"


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "mine\n"
    yield process  # type: ignore[misc]
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_writer_is_rejected_with_the_name_of_the_first(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    told = rf"in use by process {holder.pid} on .* set out=… to another folder"
    with pytest.raises(UserError, match=told), single_writer(tmp_path, wait_s=0.2):
        pass


def test_a_killed_writer_leaves_no_lock(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with single_writer(tmp_path, wait_s=0.0):
        pass


def test_a_writer_about_to_leave_is_waited_for(tmp_path: Path, holder: "subprocess.Popen[str]") -> None:
    def leave(_: float) -> None:
        holder.kill()
        holder.wait()

    with mock.patch("mlm.util.lock.time.sleep", leave), single_writer(tmp_path):
        pass


def test_a_folder_that_its_last_writer_deleted_is_not_called_write_protected(tmp_path: Path) -> None:
    """Two exports to one folder: the second waits, and the first deletes what it worked in."""
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "gone")
    with (
        mock.patch("mlm.util.lock.Lock.take", side_effect=gone),
        pytest.raises(UserError, match="another process has ended here and deleted it; set out="),
        single_writer(tmp_path),
    ):
        pass


def test_a_file_system_without_locks_warns_and_continues_and_a_disk_that_fails_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused, broken = (OSError(number, os.strerror(number)) for number in (errno.ENOLCK, errno.EIO))
    with mock.patch.object(fcntl, "flock", side_effect=refused), single_writer(tmp_path):
        assert "cannot be locked here" in caplog.text
    with (
        mock.patch.object(fcntl, "flock", side_effect=broken),
        pytest.raises(UserError, match="when locking"),
    ):
        single_writer(tmp_path).__enter__()


def test_a_full_disk_is_locked_without_a_note(tmp_path: Path) -> None:
    """`mlm ckpt prune` is what frees it."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("mlm.util.lock.os.pwrite", side_effect=full), single_writer(tmp_path):
        other = os.open(tmp_path / ".lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)


HOLD_FOLDER = """
import os, sys, time
from pathlib import Path
from mlm.util.lock import held_folder

os.mkdir(sys.argv[1])
with held_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_temporary_folder_goes_once_its_process_was_killed_and_not_before(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_FOLDER, str(tmp_path / "t-1")], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    os.utime(tmp_path / "t-1", (0, 0))
    remove_abandoned(tmp_path, "t-*")
    assert (tmp_path / "t-1").exists()
    # of another host, or of none, it goes after an hour
    for name, note in (("t-2", '{"host": "elsewhere"}'), ("t-3", None), ("t-4", '{"host": "elsewhere"}')):
        (tmp_path / name).mkdir()
        if note:
            (tmp_path / name / HELD).write_text(note)
        os.utime(tmp_path / name, (0, 0) if name != "t-4" else None)
    remove_abandoned(tmp_path, "t-*")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t-1", "t-4"]
    shutil.rmtree(tmp_path / "t-4")
    process.kill()
    process.communicate()
    remove_abandoned(tmp_path, "t-*")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("note", ["", '{"host": "another", "pid": 1, "since": "now"}'])
def test_a_folder_that_this_host_did_not_lock_stays(tmp_path: Path, note: str) -> None:
    (tmp_path / "t-1").mkdir()
    (tmp_path / "t-1" / HELD).write_text(note)
    remove_abandoned(tmp_path, "t-*")
    assert (tmp_path / "t-1").exists()
