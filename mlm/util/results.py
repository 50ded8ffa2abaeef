"""Files that a user names for results (out=, samples=): the writing, and the rules on replacement.

`-` is standard output; a character device or a FIFO is written to and never replaced; a link is followed to
its file. A regular file is replaced only if mlm wrote it, and never if the command reads it.
"""

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import mlm
from mlm.util.atomic import read_regular, write_atomic
from mlm.util.bounded import as_json
from mlm.util.errors import Problem, UserError
from mlm.util.folder_types import KINDS, kind_of_folder, matches
from mlm.util.ownership import STDOUT, described, place_of

Content = bytes | Callable[[BinaryIO], None]
"""Bytes, or a function that writes them to an open file."""
HEAD = 1 << 12  # bytes of a picture that name its software
LARGEST_PARSED = (
    1 << 26
)  # bytes of JSON that are parsed to recognise it; of larger files both ends are searched
GENERATED = frozenset(("prompt", "sample", "continuation", "tokens", "stop", "seed"))
"""Keys of a line that `mlm generate out=` writes."""
SCORED = frozenset(("task", "protocol"))
"""Keys of each line that `mlm eval … samples=` writes."""
KEPT = ("run", "corpus", "corpus-work")
"""Types of folders whose files are replaced only by commands that write such folders."""
MANIFEST = "manifest.json"  # of a checkpoint
NO_RESULTS = ("mlm-checkpoint", "mlm-corpus", "mlm-folder")
"""Formats of JSON files of mlm that are not results, wherever they are copied."""
VERSIONS = frozenset(("versions", "versions_here"))
"""Keys by which a result names the version of mlm that wrote it."""
WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
CREATOR = "mlm"
"""Software named in our pictures."""
HTML_MARK = f'<meta name="generator" content="{CREATOR}">'
"""In the head of our pages."""
TABLES = (b"layout,tp,pp,vp,dp,sequence_parallel,", b"rank,stage,parameters,moment,memory_bytes,")
"""Beginnings of the CSV files of `mlm plan`."""
CALIBRATION_MARK = b"# Measured by `mlm plan calibrate`"
"""Beginning of a YAML of hardware that `mlm plan calibrate` writes."""

_results: ContextVar[TextIO | None] = ContextVar("results", default=None)


def write_result(
    path: str | Path,
    content: Content | Mapping[str, Any],
    *,
    key: str = "out",
    inputs: Iterable[str | Path | None] = (),
) -> None:
    """Write a result to the target that a user named, to a regular file atomically.

    A mapping is written as JSON, with the version of mlm. Raises UserError for a file that mlm did not write,
    and for errors of the disk.
    """
    if isinstance(content, Mapping):
        own = {} if VERSIONS & content.keys() else {"versions": {"mlm": mlm.__version__}}
        content = as_json({**content, **own})
    if problems := result_problems(path, key=key, inputs=inputs, content=content):
        raise UserError(problems[0])
    try:
        if str(path) == STDOUT:
            _print(content)
        elif (stream := _stream(Path(path))) is not None:
            _write_directly(stream, content)
        else:
            write_atomic(Path(path).resolve(), content)
    except OSError as error:
        raise UserError(f"{key}={path}: {error.strerror}: choose a file that can be written") from error


def result_problems(
    path: str | Path | None,
    *,
    key: str = "out",
    inputs: Iterable[str | Path | None] = (),
    content: Content = b"",
) -> list[str]:
    """Return problems of writing a result to `path`, for a command's preflight. None: no result is wanted."""
    if path is None or str(path) == STDOUT:
        return []
    what, file = f"{key}={path}", Path(path)
    try:
        if file.is_symlink() and not file.exists():
            return [f"{what}: is a broken link; name another file, or delete it"]
        if not _is_there(file):
            return [f"{what}: {reason}; name another file"] if (reason := _part_of_folder(file)) else []
        if reason := _part_of_folder(file):
            return [f"{what}: {reason}; name another file"]
        mode = file.stat().st_mode
        if stat.S_ISDIR(mode):
            return [f"{what}: is a directory; name a file in it, such as {key}={file / 'result.json'}"]
        if _stream(file) is not None:
            return []
        if not stat.S_ISREG(mode):
            return [f"{what}: is {described(file)}; name another file"]
        if (given := next((i for i in inputs if _is_same(file, i)), None)) is not None:
            return [f"{what}: is the input {given}; name another file"]
        if not is_result(file) and not _holds(file, content):
            return [f"{what}: exists and was not written by mlm; name another file, or delete it"]
        if not mode & WRITABLE and not _holds(file, content):
            return [f"{what}: is write-protected; name another file, or make it writable"]
    except OSError as error:
        return [f"{what}: {error.strerror}: choose a file that can be written"]
    return []


def folder_problem(
    path: str | Path | None, key: str = "out", *, makes_folders: bool = False
) -> Problem | None:
    """Return the problem of a result whose folder does not exist or cannot be written to.

    With `makes_folders` the command makes missing folders, so that the nearest that exists counts.
    """
    if path is None or is_stream(path):
        return None
    file, folder = Path(path), Path(path).parent
    if makes_folders:
        folder = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return None
    problem = f"{folder} is no folder that can be written"
    return Problem.at(key, str(path), problem, f"name a file in one that is, such as {key}={file.name}")


def read_evaluation(out: Path) -> dict[str, Any] | None:
    """Return the result of an earlier evaluation; None where there is none."""
    if not out.is_file():  # a pipe would block
        return None
    try:
        found = json.loads(out.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(found, dict) and isinstance(found.get("config"), dict)
    return found if sound and "checkpoint_digest" in found else None


def set_aside(
    out: Path, result: Mapping[str, Any], identity: Callable[[Mapping[str, Any]], str]
) -> Path | None:
    """Give the result of another evaluation at `out` a name with its digest; return it, None without one.

    `identity` returns the digest of all that the scores of a result depend on.
    """
    found = read_evaluation(out)
    if found is None or (other := identity(found)) == identity(result):
        return None
    aside = out.with_name(f"{out.stem}.{short_digest(other)}{out.suffix}")
    os.replace(out, aside)
    return aside


def short_digest(digest: str) -> str:
    """Return enough of a digest for a file name."""
    return digest.partition(":")[2][:8]


def _is_there(file: Path) -> bool:
    """True if something exists at a path. Raises OSError for an impossible path, such as too long a name."""
    try:
        file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _part_of_folder(file: Path) -> str | None:
    """Return the reason why a file belongs to a folder of mlm and is not a result; None for others."""
    place = file.resolve()
    manifest = place.parent / MANIFEST  # a common name: other programs have manifests too
    if manifest.is_file() and b'"digest":"xxh3:' in read_regular(manifest, HEAD):
        return "is in a checkpoint"
    kind = kind_of_folder(place.parent)
    if kind in KEPT and matches(place.name, KINDS[kind].writes):
        return f"is a file of {KINDS[kind].noun}"
    return None


def named(path: str | Path) -> str:
    """Name the target of a result, for messages."""
    return "standard output" if str(path) == STDOUT else str(path)


def is_stream(path: str | Path | None) -> bool:
    """True for standard output, a device or a FIFO, which are written to directly."""
    try:
        return path is not None and (str(path) == STDOUT or _stream(Path(path)) is not None)
    except OSError:
        return False


def is_result(path: Path) -> bool:
    """True for a regular file that is empty or a result of mlm. Raises OSError."""
    size, head = path.stat().st_size, read_regular(path, HEAD)
    if size == 0:
        return True
    if head.startswith(b"\x89PNG"):
        return b"Software\0" + CREATOR.encode() in head
    if b"<svg" in head:
        return f"<dc:title>{CREATOR}".encode() in head
    if head.startswith((b"<!doctype html>", *TABLES)):
        return HTML_MARK.encode() in head or head.startswith(TABLES)
    if head.startswith(CALIBRATION_MARK):
        return True
    if not head.lstrip().startswith(b"{"):
        return False
    return _is_result_object(path, size) or _are_result_lines(path)


def _is_result_object(path: Path, size: int) -> bool:
    if size > LARGEST_PARSED:
        with open(path, "rb") as f:
            f.seek(max(size - HEAD, 0))
            ends = read_regular(path, HEAD) + f.read()
        return b'"versions' in ends and b'"mlm"' in ends
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict):
        return False
    form = found.get("format")
    if isinstance(form, str) and form.startswith(NO_RESULTS) and "task" not in found:
        return False
    named = isinstance(form, str) and form.startswith("mlm-")
    begun = found.keys() == {"task", "equal"}  # a verify-resume that was killed
    versions = [found.get(key) for key in VERSIONS]
    return named or begun or any(isinstance(v, dict) and "mlm" in v for v in versions)


def _are_result_lines(path: Path) -> bool:
    with open(path, "rb") as f:
        return all(_is_result_line(line) for line in f)


def _is_result_line(line: bytes) -> bool:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and (found.keys() >= GENERATED or found.keys() >= SCORED)


def _holds(path: Path, content: Content) -> bool:
    return isinstance(content, bytes) and len(content) > 0 and path.read_bytes() == content


def _is_same(file: Path, given: str | Path | None) -> bool:
    place = place_of(given)
    return place is not None and place.exists() and os.path.samefile(file, place)


def _stream(path: Path) -> int | str | None:
    """Return the target to write to directly: a device or FIFO by path, our streams by number."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISREG(found.st_mode):  # /dev/stdout where a shell redirected it to a file
        for number in (1, 2):
            try:
                if os.path.samestat(found, os.fstat(number)):
                    return number
            except OSError:  # closed
                continue
        return None
    return str(path) if stat.S_ISCHR(found.st_mode) or stat.S_ISFIFO(found.st_mode) else None


def _write_directly(stream: int | str, content: Content) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(stream, int):
        descriptor = os.dup(stream)
    else:
        descriptor = os.open(stream, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):  # replaced since it was checked
            os.close(descriptor)
            raise OSError(errno.EEXIST, "was replaced by a file", stream)
    with open(descriptor, "wb") as f:
        f.write(content) if isinstance(content, bytes) else content(f)


def _print(content: Content) -> None:
    """Write bytes to standard output."""
    stream = _results.get() or sys.stdout
    stream.flush()
    binary: BinaryIO | None = getattr(stream, "buffer", None)
    if binary is None:
        raise OSError(errno.EBADF, "standard output does not accept bytes")
    binary.write(content) if isinstance(content, bytes) else content(binary)
    binary.flush()


@contextmanager
def results_alone_on_stdout() -> Iterator[None]:
    """Send tables and notes to standard error while inside; standard output gets results alone (out=-)."""
    if _results.get() is not None:
        yield
        return
    token = _results.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results.reset(token)
