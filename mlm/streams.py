"""A stream that outlives its reader."""

import os
from contextlib import suppress
from typing import Any, TextIO


class LastingStream:
    """A text stream whose loss does not end the program: `| head` has left, `tee` is dead, the disk is full.

    What cannot be written is dropped from then on, and a line on stderr says so.
    """

    stream: TextIO

    def __init__(self, stream: TextIO, consequence: str) -> None:
        # The newest of several names what is lost.
        inner: TextIO = stream.stream if isinstance(stream, LastingStream) else stream
        self.stream, self.consequence, self.is_lost = inner, consequence, False

    def write(self, text: str) -> int:
        """Write, or drop, and return the number of characters."""
        if not self.is_lost:
            try:
                return self.stream.write(text)
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flush what is not dropped."""
        if not self.is_lost:
            try:
                self.stream.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.is_lost = True
        with suppress(OSError, ValueError):  # what is still buffered would fail at exit
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.stream.fileno())
            os.close(devnull)
        self._announce(error)

    def _announce(self, error: OSError) -> None:
        with suppress(OSError):
            os.write(2, f"mlm: standard output: {error.strerror}; {self.consequence}\n".encode())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
