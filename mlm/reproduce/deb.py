"""Files of a Debian package, read from the archive and never unpacked to a disk."""

import gzip
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from mlm.util.errors import UserError

__all__ = ["Package", "read_files", "read_package"]

MAX_FILE = 1 << 25
"""Largest file that is read, in bytes and after decompression."""
MAX_ARCHIVE = 1 << 30
"""Most bytes of an archive after decompression."""
MAX_MEMBERS = 200_000


class Package(NamedTuple):
    """A package's name and version, as its control file states them."""

    name: str
    version: str


def read_package(deb: Path) -> Package:
    """Return the name and version of a .deb. Raises UserError if it is none."""
    fields = dict[str, str]()
    for field in ("Package", "Version"):
        ran = run_dpkg("--field", deb, field)
        fields[field] = ran.stdout.decode("utf-8", "replace").strip()
    return Package(fields["Package"], fields["Version"])


def run_dpkg(option: str, deb: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run dpkg-deb on an archive and wait for it."""
    try:
        ran = subprocess.run(
            ["dpkg-deb", option, str(deb.resolve()), *arguments], capture_output=True, check=False, timeout=60
        )
    except FileNotFoundError:
        raise no_dpkg() from None
    if ran.returncode:
        raise damaged(deb, ran.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
    return ran


def no_dpkg() -> UserError:
    """Error of a machine without dpkg-deb."""
    return UserError("debs: dpkg-deb is not installed here; install dpkg, or set corpus=plays")


def damaged(deb: Path, why: list[str] | str) -> UserError:
    """Error of an archive that cannot be read."""
    reason = why if isinstance(why, str) else "".join(why) or "dpkg-deb cannot read it"
    return UserError(f"debs={deb}: {reason}; delete it and download it again")


def read_files(deb: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the regular files with a wanted name, in the archive's order.

    Names are relative to the file system's root. Links are not followed. Raises UserError for an archive
    that is damaged, leaves its root, or is larger than the bounds of this file.
    """
    with open_archive(deb) as archive:
        for number, member in enumerate(archive):
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or "\0" in member.name:
                raise damaged(deb, f"a file's name leaves the archive ({member.name[:80]!r})")
            if number >= MAX_MEMBERS:
                raise damaged(deb, f"more than {MAX_MEMBERS} files")
            name = str(path)
            if not member.isreg() or not wanted(name):
                continue
            if member.size > MAX_FILE:
                raise damaged(deb, f"{name} has {member.size} bytes, more than {MAX_FILE}")
            content = archive.extractfile(member)
            assert content is not None  # a regular file
            yield name, unpacked(deb, name, content.read())


@contextmanager
def open_archive(deb: Path) -> Iterator[tarfile.TarFile]:
    """Open the files of a .deb as a stream of tar."""
    try:
        process = subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(deb.resolve())],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise no_dpkg() from None
    assert process.stdout is not None
    try:
        with tarfile.open(fileobj=Bounded(process.stdout, deb), mode="r|") as archive:  # type: ignore[call-overload]
            yield archive
        while process.stdout.read(1 << 16):  # padding: dpkg-deb fails where nobody reads it
            pass
        if process.wait():
            raise damaged(deb, "dpkg-deb cannot read it")
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise damaged(deb, f"not a whole archive ({error})") from error
    finally:
        process.stdout.close()
        process.kill()
        process.wait()


class Bounded:
    """A stream that ends with an error at `MAX_ARCHIVE` bytes."""

    def __init__(self, stream: IO[bytes], deb: Path) -> None:
        self.stream, self.deb, self.left = stream, deb, MAX_ARCHIVE

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes."""
        data = self.stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise damaged(self.deb, f"it unpacks to more than {MAX_ARCHIVE} bytes")
        return data


def unpacked(deb: Path, name: str, content: bytes) -> bytes:
    """Return a file's content, decompressed if its name ends in .gz."""
    if not name.endswith(".gz"):
        return content
    try:
        with gzip.GzipFile(fileobj=BytesIO(content)) as packed:
            data = packed.read(MAX_FILE + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(deb, f"{name} is not gzip ({error})") from error
    if len(data) > MAX_FILE:
        raise damaged(deb, f"{name} unpacks to more than {MAX_FILE} bytes")
    return data
