"""Rights of this user on files and folders: what may be read, and whose it is."""

import os
import pwd
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def owner_of(path: Path) -> str:
    """Name of the user who owns a file or folder, or their number. Raises OSError."""
    return user_name(path.stat().st_uid)


def user_name(number: int) -> str:
    """Name of a user, or where none is known their number."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def other_owners(paths: Iterable[Path]) -> list[str]:
    """Names of the other users who own some of these files and folders, sorted."""
    mine, found = os.geteuid(), set[str]()
    for path in paths:
        with suppress(OSError):  # absent
            if path.stat().st_uid != mine:
                found.add(owner_of(path))
    return sorted(found)


def unreadable(path: str) -> str | None:
    """The obstacle to reading a path for this user, in words; None if they may, or nothing is there."""
    place = Path(path)
    for folder in (*reversed(place.absolute().parents), place):
        try:
            mode = folder.stat().st_mode & 0o777
            wanted = os.R_OK if folder is place else os.X_OK
            if not os.access(folder, wanted | (os.X_OK if folder.is_dir() else 0)):
                return f"permission denied: {folder} belongs to {owner_of(folder)} (mode {mode:03o})"
        except OSError:
            return None
    return None
