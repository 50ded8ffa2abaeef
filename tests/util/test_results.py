"""mlm/util/results.py: what a result replaces, and what it is written to."""

import errno
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import pytest

from mlm.util.errors import UserError
from mlm.util.files import fsync_directory, write_atomic
from mlm.util.results import result_problems, write_result

OURS = json.dumps({"task": "loss", "versions": {"mlm": "0.1"}}).encode()
RESULTS = {
    "json": OURS,
    "plan": b'{"format": "mlm-schedule-1"}',
    "generated": b'{"prompt":"","sample":0,"continuation":"","tokens":[],"stop":"eod","seed":1}\n',
    "page": b'<!doctype html><meta name="generator" content="mlm">',
    "gguf": b"GGUF\x03\0\0\0general.quantized_by\x08\0\0\0\x03\0\0\0\0\0\0\0mlm",
    "csv": b"layout,tp,cp,ep,expert_tp,pp,vp,dp,zero\n",
    "empty": b"",
}
FOREIGN = {
    "text": b"my thesis",
    "json": b'{"task": "sst2", "notes": "mine"}',
    "prompts": b'{"prompt": "a"}\n',
    "mixed": RESULTS["generated"] + b'{"prompt": "mine"}\n',
    "svg": b"<svg><dc:title>mine</dc:title></svg>",
    "page": b"<!doctype html><p>mlm",
    "gguf": b"GGUF\x03\0\0\0general.quantized_by\x08\0\0\0\x05\0\0\0\0\0\0\0other",
    "binary": bytes(range(256)),
    "nested": b"{" + b"[" * 100_000,
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_of_mlm_is_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "f").write_bytes(RESULTS[name])
    write_result(tmp_path / "f", OURS)
    assert (tmp_path / "f").read_bytes() == OURS


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_the_users_is_not_replaced(tmp_path: Path, name: str) -> None:
    file = tmp_path / "f"
    file.write_bytes(FOREIGN[name])
    with pytest.raises(UserError) as raised:
        write_result(file, OURS, key="trace")
    remedy = "name another file, or delete it"
    assert str(raised.value) == f"trace={file}: exists and was not written by mlm; {remedy}"
    assert file.read_bytes() == FOREIGN[name]
    assert os.listdir(tmp_path) == ["f"]


def test_atomic_writing_replaces_no_device_fifo_socket_or_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        before = sorted(os.listdir(tmp_path))
        for name in before:
            with pytest.raises(OSError, match=r"is a (FIFO|socket|folder), no regular file"):
                write_atomic(tmp_path / name, b"x")
    assert sorted(os.listdir(tmp_path)) == before
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert (tmp_path / "link").is_symlink()


def test_a_write_protected_result_stays(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(OURS)
    (tmp_path / "r.json").chmod(0o444)
    (line,) = result_problems(tmp_path / "r.json")
    assert "is write-protected" in line


@pytest.mark.parametrize("named", ["link", "hard"])
def test_an_input_is_never_replaced_even_if_mlm_wrote_it(tmp_path: Path, named: str) -> None:
    (tmp_path / "f").write_bytes(RESULTS["generated"])
    (tmp_path / "link").symlink_to("f")
    os.link(tmp_path / "f", tmp_path / "hard")
    (problem,) = result_problems(tmp_path / named, inputs=[None, "hub:a/b", tmp_path / "f"])
    assert problem == f"out={tmp_path / named}: is the input {tmp_path / 'f'}; name another file"


def test_dev_stdout_is_written_to_where_a_shell_redirected_it(tmp_path: Path) -> None:
    """`mlm … out=/dev/stdout > log`: the log keeps what was printed before and after."""
    saved, log = os.dup(1), tmp_path / "log"
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.close(descriptor)
        os.write(1, b"before\n")
        write_result("/dev/fd/1", OURS + b"\n")
        os.write(1, b"after\n")
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert log.read_bytes() == b"before\n" + OURS + b"\nafter\n"


def test_a_write_that_numpy_cut_short_names_the_disk(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        raise OSError("32768 requested and 22080 written")  # numpy.ndarray.tofile, without a number

    with pytest.raises(UserError, match=r"out=.*/x: the disk took a part alone \(32768 requested"):
        write_result(tmp_path / "x", write)
    assert os.listdir(tmp_path) == []


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
