"""Small packages of Debian, made with dpkg-deb, and archives that no honest tool makes."""

import io
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

NEEDS_DPKG = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not on this machine")


def make_deb(folder: Path, name: str, files: Mapping[str, str | bytes], version: str = "1.0") -> Path:
    """Make a package of some files."""
    root = folder / f"{name}-root"
    for path, content in {"DEBIAN/control": control(name, version), **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content.encode() if isinstance(content, str) else content)
    deb = folder / f"{name}_{version}_all.deb"
    words = ["dpkg-deb", "--build", "-Znone", "--root-owner-group", str(root), str(deb)]
    subprocess.run(words, check=True, capture_output=True)
    shutil.rmtree(root)
    return deb


def control(name: str, version: str) -> str:
    """Return the control file of a package."""
    fields = {"Package": name, "Version": version, "Architecture": "all", "Maintainer": "a <a@b.c>"}
    return "".join(f"{key}: {value}\n" for key, value in {**fields, "Description": "made"}.items())


def make_hostile_deb(folder: Path, name: str, members: Sequence[tuple[tarfile.TarInfo, bytes]]) -> Path:
    """Make a package of members of tar that are taken as they are."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content) if member.isreg() else None)
    meta = io.BytesIO()
    with tarfile.open(fileobj=meta, mode="w") as archive:
        text = control(name, "1.0").encode()
        archive.addfile(regular("./control", text), io.BytesIO(text))
    deb = folder / f"{name}_1.0_all.deb"
    entries = [("debian-binary", b"2.0\n"), ("control.tar", meta.getvalue()), ("data.tar", data.getvalue())]
    deb.write_bytes(b"!<arch>\n" + b"".join(ar_entry(*entry) for entry in entries))
    return deb


def ar_entry(name: str, content: bytes) -> bytes:
    """Return a member of an ar archive."""
    head = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
    return head + content + b"\n" * (len(content) % 2)


def regular(name: str, content: bytes) -> tarfile.TarInfo:
    """Return the header of a regular file."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member
