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
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import mlm
from mlm.util.errors import Problem, UserError, write_reason, writing_to
from mlm.util.files import dump_json, read_regular, write_atomic
from mlm.util.ownership import KINDS, STDOUT, file_type_name, kind_of_folder, matches_any, place_of, real_path

Content = bytes | Callable[[BinaryIO], None]
"""Bytes, or a function that writes them to an open file."""
HEAD = 1 << 12  # bytes of a page that name its software
LARGEST_PARSED = 1 << 26  # bytes of JSON that are parsed to recognise it
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
CREATOR = "mlm"
"""Software named in our pages and GGUF files."""
HTML_MARK = f'<meta name="generator" content="{CREATOR}">'
GGUF_MARK = b"general.quantized_by\x08\0\0\0\x03\0\0\0\0\0\0\0" + CREATOR.encode()
MARKS = {b"<!doctype html>": HTML_MARK.encode(), b"GGUF": GGUF_MARK}
"""Beginnings of files of other formats, and what is in the heads of ours."""
CALIBRATION_MARK = b"# Measured by `mlm plan calibrate`"
"""Beginning of a YAML of hardware that `mlm plan calibrate` writes."""
BEGINNINGS = (
    b"layout,tp,cp,ep,expert_tp,pp,vp,dp,",
    b"rank,stage,parameters,moment,memory_bytes,",
    CALIBRATION_MARK,
)
"""Beginnings of the CSV and YAML files of `mlm plan`."""

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
        content = dump_json({**content, **own})
    if problems := result_problems(path, key=key, inputs=inputs, content=content):
        raise UserError(problems[0])
    try:
        if str(path) == STDOUT:
            _print(content)
        elif (stream := _stream(Path(path))) is not None:
            _write_directly(stream, content)
        else:
            write_atomic(real_path(path), content)
    except OSError as error:
        raise UserError(f"{key}={path}: {write_reason(error)}: choose a file that can be written") from error


def save_result(out: str | None, content: Content | Mapping[str, Any], say: Callable[[str], object]) -> None:
    """Write a result where `out` is given, into a folder that may be new, and say so. Raises UserError."""
    if out is not None:
        with writing_to(out):
            Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_result(out, content)
        say(f"written to {target_name(out)}")


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
        if reason := _part_of_folder(file):
            return [f"{what}: {reason}; name another file"]
        try:
            mode = file.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return []
        if stat.S_ISDIR(mode):
            return [f"{what}: is a directory; name a file in it, such as {key}={file / 'result.json'}"]
        if _stream(file) is not None:
            return []
        if not stat.S_ISREG(mode):
            return [f"{what}: is {file_type_name(file)}; name another file"]
        if (given := next((i for i in inputs if _is_same(file, i)), None)) is not None:
            return [f"{what}: is the input {given}; name another file"]
        if not is_result(file) and not _holds(file, content):
            return [f"{what}: exists and was not written by mlm; name another file, or delete it"]
        if not mode & 0o222 and not _holds(file, content):
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


def rename_earlier_result(
    out: Path, result: Mapping[str, Any], identity: Callable[[Mapping[str, Any]], str]
) -> Path | None:
    """Give the result of another evaluation at `out` a name with its digest; return it, None without one.

    `identity` returns the digest of all that the scores of a result depend on.
    """
    try:
        earlier = _parsed(read_regular(out))
    except OSError:
        return None
    is_sound = isinstance(earlier, dict) and isinstance(earlier.get("config"), dict)
    if not is_sound or "checkpoint_digest" not in earlier or (other := identity(earlier)) == identity(result):
        return None
    aside = out.with_name(f"{out.stem}.{short_digest(other)}{out.suffix}")
    os.replace(out, aside)
    return aside


def short_digest(digest: str) -> str:
    """Return enough of a digest for a file name."""
    return digest.partition(":")[2][:8]


def _part_of_folder(file: Path) -> str | None:
    """Return the reason why a file belongs to a folder of mlm and is not a result; None for others."""
    place = real_path(file)
    manifest = place.parent / MANIFEST  # a common name: other programs have manifests too
    if manifest.is_file() and b'"digest":"xxh3:' in read_regular(manifest, HEAD):
        return "is in a checkpoint"
    kind = kind_of_folder(place.parent)
    if kind in KEPT and matches_any(place.name, KINDS[kind].writes):
        return f"is a file of {KINDS[kind].noun}"
    return None


def target_name(path: str | Path) -> str:
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
    if size == 0 or head.startswith(BEGINNINGS):
        return True
    for beginning, mark in MARKS.items():
        if head.startswith(beginning):
            return mark in head
    if not head.lstrip().startswith(b"{"):
        return False
    with open(path, "rb") as f:
        if all(
            isinstance(value, dict) and (value.keys() >= GENERATED or value.keys() >= SCORED)
            for value in map(_parsed, f)
        ):
            return True
    value = _parsed(path.read_bytes()) if size <= LARGEST_PARSED else None
    if not isinstance(value, dict):
        return False
    form = str(value.get("format"))
    if form.startswith(NO_RESULTS) and "task" not in value:
        return False
    return form.startswith("mlm-") or any(
        isinstance(value.get(key), dict) and "mlm" in value[key] for key in VERSIONS
    )


def _parsed(content: bytes) -> Any:
    """Return the value of a JSON text; None for anything else."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _holds(path: Path, content: Content) -> bool:
    return isinstance(content, bytes) and len(content) > 0 and path.read_bytes() == content


def _is_same(file: Path, given: str | Path | None) -> bool:
    place = place_of(given)
    return place is not None and place.exists() and os.path.samefile(file, place)


def _stream(path: Path) -> int | str | None:
    """Return the target to write to directly: a device or FIFO by path, our streams by number."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    for number in (1, 2) if stat.S_ISREG(status.st_mode) else ():  # /dev/stdout that a shell redirected
        with suppress(OSError):  # closed
            if os.path.samestat(status, os.fstat(number)):
                return number
    return str(path) if stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode) else None


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
