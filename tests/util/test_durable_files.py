"""Files on disks that cannot do all that a disk should."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from mlm.util.files import fsync_directory, write_atomic


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_a_directory_still_takes_files(tmp_path: Path, number: int) -> None:
    with mock.patch("mlm.util.files.os.fsync", failing_for_directories(number)):
        write_atomic(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_directory_that_fails_to_reach_the_disk_is_an_error(tmp_path: Path) -> None:
    with (
        mock.patch("mlm.util.files.os.fsync", failing_for_directories(errno.EIO)),
        pytest.raises(OSError, match="Input/output"),
    ):
        fsync_directory(tmp_path)


def failing_for_directories(number: int) -> Callable[[int], None]:
    really = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        really(descriptor)

    return fsync
