"""The process of chat_sandbox.py from outside: started with the first text, and again where one ended it."""

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from mlm.data.chat_sandbox import MEMORY, SECONDS
from mlm.util.errors import Failed, UserError

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Requests to stop, which terminals and schedulers send to all processes of a command."""


OUTSIDE = (signal.SIGKILL, signal.SIGQUIT)
"""Signals that no template causes."""


class RenderError(Exception):
    """The reason why a template makes no text of its values."""


class RendererError(UserError):
    """The process that renders templates cannot be started, or was killed: no conversation is wrong."""

    exit_code = 1
    kind = Failed


class Renderer:
    """A process that renders templates, one text at a time.

    Args:
        seconds: processor time that a text may take.
        memory: bytes of address space that the process may have.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self.seconds, self.memory = seconds, memory
        self._process: subprocess.Popen[str] | None = None
        self._source: str | None = None  # the template that the process has
        self._owner = 0

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """Return the text of a template with these JSON values. Raises RenderError, RendererError."""
        process = self._running()
        request = json.dumps([None if source == self._source else source, values])
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:  # Ctrl-C: the answer would be taken for the next request's
            self.close()
            raise
        if not line.endswith("\n"):
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            self._source = None  # it may be the template that cannot be compiled
            raise RenderError(answer["error"])
        self._source = source
        return str(answer["text"])

    def close(self) -> None:
        """End the process."""
        process, self._process, self._source = self._process, None, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _running(self) -> "subprocess.Popen[str]":
        """Return the process; a fork of this one starts its own, as this one does after an idle one's end."""
        is_own = self._process is not None and self._owner == os.getpid()
        if is_own and self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None or not is_own:
            try:
                self._process = start(self.seconds, self.memory)
            except OSError as error:
                raise RendererError(
                    f"the process that renders chat templates cannot be started: {error.strerror}; end other "
                    "programs, or raise `ulimit -u`"
                ) from error
            self._source, self._owner = None, os.getpid()
        return self._process

    def _ended(self) -> RenderError | RendererError:
        """Return the reason why the process ended, once it has."""
        assert self._process is not None
        code = self._process.wait()
        self.close()
        if code == -signal.SIGPROF:
            return RenderError(f"it computes for more than {self.seconds:g} s")
        if -code in OUTSIDE:
            return RendererError(
                f"the process that renders chat templates was killed by {signal.Signals(-code).name}, often "
                "for lack of memory (see dmesg); free some, and run the command again"
            )
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return RenderError(f"it ended its process, by {how}")


def start(seconds: float, memory: int) -> "subprocess.Popen[str]":
    """Start the process with this one's modules.

    Requests to stop are for the command, whose end is that of the texts: it inherits them blocked, as it
    could not ignore them before it runs.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "mlm.data.chat_sandbox"),
                *map(str, (seconds, memory, os.getpid())),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@cache
def renderer() -> Renderer:
    """Return this process's renderer."""
    found = Renderer()
    atexit.register(found.close)
    return found
