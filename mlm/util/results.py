"""Result files (out=): writing, and rules on replacing existing files.

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
from mlm.util.ownership import (
    KINDS,
    STDOUT,
    file_type_name,
    input_path,
    kind_of_folder,
    matches_any,
    real_path,
)

Content = bytes | Callable[[BinaryIO], None]
"""Bytes, or a function that writes them to an open file."""
HEAD = 1 << 12  # bytes at a file's beginning that hold its mark
VERSIONS = frozenset(("versions", "versions_here"))
"""Keys by which a result in JSON names the version of mlm that wrote it."""
CREATOR = "mlm"
HTML_MARK = f'<meta name="generator" content="{CREATOR}">'
CALIBRATION_MARK = b"# Measured by `mlm plan calibrate`"
MARKS = {
    b"<!doctype html>": HTML_MARK.encode(),
    b"GGUF": b"general.quantized_by\x08\0\0\0\x03\0\0\0\0\0\0\0" + CREATOR.encode(),
    CALIBRATION_MARK: b"",
    b"<?xml": b"<dc:title>mlm</dc:title>",  # pictures of mlm plan schedule
    b"\x89PNG": b"tEXtSoftware\0mlm",
    b"layout,tp,cp,ep,expert_tp,pp,vp,dp,": b"",  # CSV of `mlm plan layouts` and `mlm plan`
    b"rank,stage,parameters,moment,memory_bytes,": b"",
}
"""First bytes of other formats that mlm writes, and the mark of mlm's files."""
LINE = frozenset(("prompt", "sample", "continuation", "tokens", "stop", "seed"))
"""Keys of each line of a JSONL file that mlm writes: mlm generate out=."""

_results: ContextVar[TextIO | None] = ContextVar("results", default=None)


def write_result(
    path: str | Path,
    content: Content | Mapping[str, Any],
    *,
    key: str = "out",
    inputs: Iterable[str | Path | None] = (),
) -> None:
    """Write a result to a user's target; a regular file atomically.

    A mapping becomes JSON, with the version of mlm. Raises UserError for a file that mlm did not write, and
    for OSErrors.
    """
    if isinstance(content, Mapping):
        versions = {} if VERSIONS & content.keys() else {"versions": {"mlm": mlm.__version__}}
        content = dump_json({**content, **versions})
    if problems := result_problems(path, key=key, inputs=inputs, content=content):
        raise UserError(problems[0])
    try:
        if str(path) == STDOUT:
            stream = _results.get() or sys.stdout
            stream.flush()
            binary: BinaryIO | None = getattr(stream, "buffer", None)
            if binary is None:
                raise OSError(errno.EBADF, "standard output does not accept bytes")
            binary.write(content) if isinstance(content, bytes) else content(binary)
            binary.flush()
        elif (target := _stream(Path(path))) is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY
            descriptor = os.dup(target) if isinstance(target, int) else os.open(target, flags)
            with open(descriptor, "wb") as f:
                if isinstance(target, str) and stat.S_ISREG(os.fstat(f.fileno()).st_mode):
                    raise OSError(errno.EEXIST, "was replaced by a file", target)  # since it was checked
                f.write(content) if isinstance(content, bytes) else content(f)
        else:
            write_atomic(real_path(path), content)
    except OSError as error:
        raise UserError(f"{key}={path}: {write_reason(error)}: choose a file that can be written") from error


def save_result(out: str | None, content: Content | Mapping[str, Any], note: Callable[[str], object]) -> None:
    """Write a result unless `out` is None, making its folder, and note the target. Raises UserError."""
    if out is not None:
        with writing_to(out):
            Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_result(out, content)
        note(f"written to {target_name(out)}")


def result_problems(
    path: str | Path | None,
    *,
    key: str = "out",
    inputs: Iterable[str | Path | None] = (),
    content: Content = b"",
) -> list[str]:
    """Return problems of writing a result to `path` (None: no result), for a command's preflight."""
    if path is None or str(path) == STDOUT:
        return []
    setting, file = f"{key}={path}", Path(path)
    try:
        if file.is_symlink() and not file.exists():
            return [f"{setting}: is a broken link; name another file, or delete it"]
        resolved = real_path(file)
        manifest = resolved.parent / "manifest.json"  # other programs use the name too
        if manifest.is_file() and b'"digest":"xxh3:' in read_regular(manifest, HEAD):
            return [f"{setting}: is in a checkpoint; name another file"]
        kind = kind_of_folder(resolved.parent)
        if kind in ("run", "corpus", "corpus-work") and matches_any(resolved.name, KINDS[kind].writes):
            return [f"{setting}: is a file of {KINDS[kind].noun}; name another file"]
        try:
            status = file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return []
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            return [f"{setting}: is a directory; name a file in it"]
        if _stream(file) is not None:
            return []
        if not stat.S_ISREG(mode):
            return [f"{setting}: is {file_type_name(file)}; name another file"]
        for name in inputs:
            source = input_path(name)
            if source is not None and source.exists() and os.path.samefile(file, source):
                return [f"{setting}: is the input {name}; name another file"]
        if isinstance(content, bytes) and status.st_size == len(content) and file.read_bytes() == content:
            return []
        if not is_result(file):
            return [f"{setting}: exists and was not written by mlm; name another file, or delete it"]
        if not mode & 0o222:
            return [f"{setting}: is write-protected; name another file, or make it writable"]
    except OSError as error:
        return [f"{setting}: {error.strerror}: choose a file that can be written"]
    return []


def is_result(path: Path) -> bool:
    """True for a regular file that is empty or a result of mlm. Raises OSError."""
    head = read_regular(path, HEAD)
    if not head or any(head.startswith(beginning) and mark in head for beginning, mark in MARKS.items()):
        return True
    if not head.lstrip().startswith(b"{"):
        return False
    with open(path, "rb") as f:
        lines = map(_parse_or_none, f)
        if all(isinstance(line, dict) and line.keys() >= LINE for line in lines):
            return True
    is_small = path.stat().st_size <= 1 << 26  # no result is larger
    value = _parse_or_none(path.read_bytes()) if is_small else None
    if not isinstance(value, dict):
        return False
    form = str(value.get("format"))
    # Parts of mlm's folders are not results, even as copies.
    if form.startswith(("mlm-checkpoint", "mlm-corpus", "mlm-folder")) and "task" not in value:
        return False
    versions = [value[key] for key in VERSIONS & value.keys()]
    return form.startswith("mlm-") or any(isinstance(v, dict) and "mlm" in v for v in versions)


def _parse_or_none(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def folder_problem(path: str | Path | None, *, makes_folders: bool = False) -> Problem | None:
    """Return the problem of `out` whose folder does not exist or is not writable.

    With `makes_folders` the command makes missing folders: check the nearest existing parent.
    """
    if path is None or is_stream(path):
        return None
    file, folder = Path(path), Path(path).parent
    if makes_folders:
        folder = next(parent for parent in (folder, *folder.absolute().parents) if os.path.lexists(parent))
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return None
    fix = "name a file in one that is" + f", such as out={file.name}" * os.access(".", os.W_OK)
    return Problem.at("out", str(path), f"{folder} is not a folder that can be written", fix)


def rename_earlier_result(
    out: Path, result: Mapping[str, Any], identity: Callable[[Mapping[str, Any]], str]
) -> Path | None:
    """Rename another evaluation's result at `out` to a name with its digest; return it, None without one.

    `identity` returns the digest of everything that the scores of a result depend on.
    """
    try:
        earlier = _parse_or_none(read_regular(out))
    except OSError:
        return None
    if not isinstance(earlier, dict) or not isinstance(earlier.get("config"), dict):
        return None
    if "checkpoint_digest" not in earlier or (other := identity(earlier)) == identity(result):
        return None
    aside = out.with_name(f"{out.stem}.{short_digest(other)}{out.suffix}")
    os.replace(out, aside)
    return aside


def short_digest(digest: str) -> str:
    return digest.partition(":")[2][:8]


def target_name(path: str | Path) -> str:
    return "standard output" if str(path) == STDOUT else str(path)


def is_stream(path: str | Path | None) -> bool:
    """True for standard output, a device or a FIFO, which are written to directly."""
    try:
        return path is not None and (str(path) == STDOUT or _stream(Path(path)) is not None)
    except OSError:
        return False


def _stream(path: Path) -> int | str | None:
    """Return the target to write to directly: a device or FIFO by path, standard streams by number."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    for number in (1, 2) if stat.S_ISREG(status.st_mode) else ():  # /dev/stdout that a shell redirected
        with suppress(OSError):  # closed
            if os.path.samestat(status, os.fstat(number)):
                return number
    return str(path) if stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode) else None


@contextmanager
def results_alone_on_stdout() -> Iterator[None]:
    """Redirect printed output to standard error while inside; standard output gets results alone (out=-)."""
    token = _results.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _results.reset(token)
