"""Files: atomic writes, durable directories, reading within bounds, strict JSON, and digests."""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from mlm.util.errors import CorruptFileError, UserError, decode_problem, reading_from

CHUNK = 1 << 22  # bytes read at a time when digesting: 4 MiB
LONGEST_NAME = 255  # bytes
WHOLE = 1 << 26
"""Bytes up to which `sampled_digest` reads the full file: 64 MiB."""
SAMPLES, SAMPLE = 64, 1 << 18
"""Number and size of the blocks read of a larger file: 256 KiB each, 16 MiB in all."""
READABLE = "Name a file that can be read"


def write_atomic(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Write `content` to `path` so that a kill at any instant leaves the old file or the new one.

    `content` is the bytes, or a function that writes them to an open file. An old file's permissions are
    kept; only a regular file, or a link to one, is replaced. Raises OSError.
    """
    mode = None
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = path.stat().st_mode
    if mode is not None and not stat.S_ISREG(mode):
        raise not_regular_error(path, mode)
    partial = partial_path(path)
    try:
        with open(partial, "xb") as f:
            if callable(content):
                content(f)
            else:
                f.write(content)
            f.flush()
            if mode is not None:
                with suppress(OSError):  # a file system without permissions
                    os.fchmod(f.fileno(), stat.S_IMODE(mode))
            os.fsync(f.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def partial_path(path: Path) -> Path:
    """Return a hidden name for an unfinished file, .NAME.DIGITS.partial.

    Random digits: hosts that share the folder may have equal process ids.
    """
    suffix = f".{int.from_bytes(os.urandom(6))}.partial"
    name = os.fsencode(path.name)[: LONGEST_NAME - len(suffix) - 1]  # file systems limit names
    return path.with_name(f".{os.fsdecode(name)}{suffix}")


def file_type(mode: int) -> str:
    types = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return f"a {types.get(stat.S_IFMT(mode), 'device')}"


def not_regular_error(path: str | Path, mode: int) -> OSError:
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EEXIST
    return OSError(number, f"is {file_type(mode)}, no regular file", str(path))


def read_regular(path: Path, limit: int = -1) -> bytes:
    """Read at most `limit` bytes of a regular file, or all.

    Raises OSError, also for a device or FIFO: nothing blocks.
    """
    with open_input(path) as f:
        return f.read(limit)


def open_regular(path: str | Path, flags: int) -> int:
    """Open a regular file (links are followed unless `flags` has O_NOFOLLOW); return its descriptor.

    Raises OSError, also for a device, FIFO or socket: nothing blocks and nothing is written.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise not_regular_error(path, os.stat(path).st_mode) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise not_regular_error(path, mode)


def open_input(path: str | Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file that a user names. Raises OSError, also for a device, FIFO or folder."""
    return open(open_regular(path, os.O_RDONLY), "rb", buffering)


def read_input_text(path: str | Path) -> str:
    """Read a text that a user names, newlines as they are. Raises UserError."""
    with reading_from(Path(path), READABLE):
        return decode_text(read_regular(Path(path)), str(path))


def decode_text(content: bytes, name: str) -> str:
    """Decode UTF-8 of a file or stream. Raises UserError, with the line."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name}:{line}: is {decode_problem(error)}; save it as UTF-8") from error


def sync(f: BinaryIO) -> None:
    """Push a file's content to the disk, then close it."""
    with f:
        f.flush()
        os.fsync(f.fileno())


def copy_bytes(source: Path, target: BinaryIO, count: int, *, begin: int = 0) -> None:
    """Append `count` bytes of a file, from byte `begin` on, to one open for writing.

    The kernel copies or shares blocks if it can. Raises CorruptFileError if the source is shorter, OSError.
    """
    target.flush()
    with open(source, "rb", buffering=0) as f:
        f.seek(begin)
        remaining = count
        if hasattr(os, "copy_file_range"):  # not on macOS; four times as fast as the loop below
            with suppress(OSError):  # not supported between these files
                while remaining and (size := os.copy_file_range(f.fileno(), target.fileno(), remaining)):
                    remaining -= size
        target.seek(0, os.SEEK_END)  # the kernel has moved the position, unknown to the buffer
        while remaining and (block := f.read(min(remaining, CHUNK))):
            target.write(block)
            remaining -= len(block)
    if remaining:
        raise CorruptFileError(
            f"{source} is truncated: expected {begin + count} bytes, found {begin + count - remaining}"
        )


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power loss, where the file system can sync a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some FUSE and network file systems cannot
            raise
    finally:
        os.close(fd)


def digest_file(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """Return the content digest of a file, `xxh3:<hex>`; `progress` receives bytes read. Raises OSError."""
    h = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while block := f.read(CHUNK):
            h.update(block)
            progress(len(block))
    return digest_name(h)


def sampled_digest(path: Path) -> str:
    """Digest a file in bounded time (`digest_samples`). Raises OSError."""
    with open(path, "rb", buffering=0) as f:
        size = os.fstat(f.fileno()).st_size
        return digest_samples(size, lambda begin, count: os.pread(f.fileno(), count, begin))


def digest_samples(size: int, read: Callable[[int, int], bytes]) -> str:
    """Digest a file up to WHOLE bytes, of a larger one its size and SAMPLES blocks; `read(begin, count)`.

    The blocks are equally spaced and include both ends. They detect a rewritten file, not a single changed
    byte between them.
    """
    if size <= WHOLE:
        h = xxhash.xxh3_128()
        for begin in range(0, size, CHUNK):
            h.update(read(begin, min(CHUNK, size - begin)))
        return digest_name(h)
    h = xxhash.xxh3_128(size.to_bytes(8, "little"))
    for number in range(SAMPLES):
        h.update(read((size - SAMPLE) * number // (SAMPLES - 1), SAMPLE))
    return digest_name(h)


def digest_bytes(content: bytes) -> str:
    return digest_name(xxhash.xxh3_128(content))


DIGEST = re.compile(r"xxh3:[0-9a-f]{32}")
"""Form of a digest."""


def digest_name(h: "xxhash.xxh3_128") -> str:
    return f"xxh3:{h.hexdigest()}"


# ---- untrusted files


def whole_number(value: Any, most: int = (1 << 63) - 1) -> int:
    """Return a number read from a file. Raises ValueError unless it is an integer from 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]} is not a whole number in range")
    return value


def read_bounded(path: Path, most: int, remedy: str) -> bytes:
    """Read a regular file of at most `most` bytes.

    Raises OSError, and CorruptFileError, which ends in `remedy`, for a larger file, a pipe or a device.
    """
    with open_bounded(path, most, remedy) as f:
        # `read` allocates the requested size, however small the file is.
        return f.read(min(most, max(os.fstat(f.fileno()).st_size, 1 << 20)) + 1)


def open_bounded(path: Path, most: int, remedy: str) -> BinaryIO:
    """Open a file to read under the conditions of `read_bounded`."""
    f = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 (the caller's)
    status = os.fstat(f.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= most:
        return f
    f.close()
    is_large = stat.S_ISREG(status.st_mode)
    problem = f"{status.st_size} bytes, {most} is the limit" if is_large else "not a regular file"
    raise CorruptFileError(f"{path}: {problem}; {remedy}")


def parse_json(content: bytes | str, *, foreign: bool = False) -> Any:
    """Parse JSON as in RFC 8259: finite numbers, integers below 2^64, each key once in an object.

    In a file of another program (`foreign`) NaN and Infinity, which Python writes, are numbers too, and
    integers have up to 300 digits: transformers writes 1e30 for a length without a limit. Raises ValueError
    for anything else, including brackets that nest too deeply.
    """
    most_digits = 300 if foreign else 20

    def parse_int(digits: str) -> int:
        # Converting a million digits would take hours.
        if len(digits) > most_digits or (abs(number := int(digits)) >> 64 and not foreign):
            raise ValueError(f"the number {digits[:20]}… is too large")
        return number

    def parse_float(digits: str) -> float:
        number = float(digits)
        if not foreign and not math.isfinite(number):
            raise ValueError(f"the number {digits[:20]} is too large")
        return number

    def parse_constant(name: str) -> float:
        if not foreign:
            raise ValueError(f"{name} is not JSON")
        return float(name)

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):  # readers differ on duplicates
            raise ValueError("a key occurs twice in one object")
        return values

    try:
        return json.loads(
            content,
            parse_int=parse_int,
            parse_float=parse_float,
            parse_constant=parse_constant,
            object_pairs_hook=build_object,
        )
    except RecursionError:
        raise ValueError("its brackets nest too deeply") from None


def dump_json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
