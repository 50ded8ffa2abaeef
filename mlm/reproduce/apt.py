"""Packages of Debian by name, downloaded with apt-get and not installed."""

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mlm.util.errors import UserError

__all__ = ["PROGRAMS", "download", "missing_programs"]

PROGRAMS = ("apt-get", "dpkg-deb")
SECONDS = 1800


def missing_programs() -> list[str]:
    """List the programs of Debian that are not on this machine."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def download(choices: Sequence[Sequence[str]], folder: Path) -> list[Path]:
    """Download a package of each choice, the first that this release has; return their files in that order.

    A file that is there is kept. Only whole downloads reach the folder. Raises UserError.
    """
    if missing := missing_programs():
        raise UserError(f"this machine has no {' and no '.join(missing)}: set corpus=plays")
    folder.mkdir(parents=True, exist_ok=True)
    here = [found_here(choice, folder) for choice in choices]
    firsts = [choice[0] for choice, name in zip(choices, here, strict=True) if name is None]
    all_known = not firsts or is_known(*firsts)  # one call where it suffices: each reads apt's whole index
    names = [
        name or (choice[0] if all_known else known_to_apt(choice))
        for choice, name in zip(choices, here, strict=True)
    ]
    wanted = [name for name in names if file_of(name, folder) is None]
    if wanted:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
            ran = apt(["download", *wanted], Path(partial))
            if ran.returncode:
                raise UserError(f"apt-get download: {last_line(ran)}: check the network, or set corpus=plays")
            for deb in sorted(Path(partial).glob("*.deb")):
                deb.replace(folder / deb.name)
    files = [file_of(name, folder) for name in names]
    return [file for file in files if file is not None]


def found_here(choice: Sequence[str], folder: Path) -> str | None:
    """Return the first package of a choice whose file is in the folder."""
    return next((name for name in choice if file_of(name, folder) is not None), None)


def known_to_apt(choice: Sequence[str]) -> str:
    """Return the first package of a choice that apt-get can download. Raises UserError if there is none."""
    for name in choice:
        if is_known(name):
            return name
    raise UserError(
        f"apt-get knows no package {' or '.join(choice)}: run `apt-get update` as root, or set corpus=plays"
    )


def is_known(*names: str) -> bool:
    """True if apt-get can download all these packages."""
    return apt(["download", "--print-uris", *names], Path()).returncode == 0


def apt(words: Sequence[str], cwd: Path) -> "subprocess.CompletedProcess[bytes]":
    """Run apt-get. Raises UserError if it does not end."""
    try:
        return subprocess.run(
            ["apt-get", "--quiet", *words], cwd=cwd, capture_output=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"apt-get {words[0]}: no end after {SECONDS} s: check the network, or set corpus=plays"
        ) from None


def last_line(ran: "subprocess.CompletedProcess[bytes]") -> str:
    """Return the last error that apt-get printed."""
    lines = [line for line in ran.stderr.decode("utf-8", "replace").splitlines() if line.startswith("E:")]
    return lines[-1].removeprefix("E:").strip() if lines else f"ended with {ran.returncode}"


def file_of(name: str, folder: Path) -> Path | None:
    """Return a package's file in a folder, the last by name; None if there is none."""
    return max(folder.glob(f"{name}_*.deb"), default=None)
