"""The one exception a user's mistake becomes: the command line prints its message and no traceback."""

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


def visible(text: str) -> str:
    """A text whose control characters are written out: what a file says cannot steer a terminal."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return shown.encode(errors="backslashreplace").decode()  # half a surrogate pair


def has_controls(text: str) -> bool:
    """True if a text holds control characters but new lines and tabs: names are printed on terminals."""
    return any(unicodedata.category(c) == "Cc" for c in text if c not in "\n\t")


class UserError(ValueError):
    """A fault the user can mend. The message is one line: the setting, its value and the remedy."""

    exit_code: ClassVar[int] = 2
    """What the command that meets it ends with."""

    def lines(self) -> list[str]:
        """Lines to print, which hold no control characters."""
        return [visible(line) for line in str(self).split("\n")]


class ConfigError(UserError):
    """All faults of one configuration, reported together.

    `faults` holds one line per fault, each naming key, value and remedy.
    """

    def __init__(self, faults: list[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(faults))

    def lines(self) -> list[str]:
        """One line for each problem, whatever its value holds."""
        return [visible(line) for line in self.faults]


class CorruptFileError(UserError):
    """A file on disk is not what it should be: truncated, altered, or of another kind."""

    exit_code = 1


class CheckFailedError(UserError):
    """What a command was asked to check does not hold."""

    exit_code = 1


@contextmanager
def writing_to(out: str) -> Iterator[None]:
    """Around what writes below the folder that `out` names. Raises UserError for what the disk refuses."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"out={out}: {error.strerror} ({error.filename}): choose a folder that can be written to"
        ) from error
