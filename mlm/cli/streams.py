"""Standard output and error as a command finds them: of any encoding, closed, full, or without a reader."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from mlm.streams import LastingStream

UTF_8 = ("utf-8", "utf8")


class CommandOutput(LastingStream):
    """Standard output whose loss ends no command. A reader that has left (`| head`) is no problem."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, "what follows is not shown")
        self.has_failed = False

    def _lose(self, error: OSError) -> None:
        self.has_failed = error.errno != errno.EPIPE
        super()._lose(error)

    def _announce(self, error: OSError) -> None:
        if self.has_failed:
            super()._announce(error)


@contextmanager
def writable_streams() -> Iterator[CommandOutput]:
    """Standard streams that take every text while inside; yields standard output."""
    before = sys.stdout, sys.stderr
    # Python has None for a stream that was closed before it started (`>&-`); a low descriptor is reused.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    _take_every_text(sys.stdout)
    _take_every_text(sys.stderr)
    output = CommandOutput(sys.stdout)
    sys.stdout = output
    try:
        yield output
    finally:
        output.flush()
        sys.stdout, sys.stderr = before


def _take_every_text(stream: TextIO) -> None:
    r"""Write characters that the encoding lacks as `\u2026` instead of raising an error."""
    reconfigure = getattr(stream, "reconfigure", None)
    encoding, errors = getattr(stream, "encoding", None) or "", getattr(stream, "errors", None)
    if reconfigure is None or not (errors == "strict" or errors == "surrogateescape"):
        return
    if errors == "strict" or encoding.lower() not in UTF_8:
        reconfigure(errors="backslashreplace")
