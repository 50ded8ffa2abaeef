"""Stopping on request: finish the step, save, leave. A second Ctrl-C stops at once.

A request may come before there is a step to finish: importing torch, finding the other ranks and loading a
checkpoint take seconds to minutes. `requests_noted` keeps it until a `StopRequest` obeys it. This module
needs the standard library only, so that noting begins before anything else is imported.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

LAUNCHED = "MLM_LAUNCHED"
"""Environment variable of a rank that a plain `mlm` command started (mlm/launch/agent.py)."""

WORDS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGHUP: "SIGHUP",
}
"""The signals that ask for a stop, and how `StopRequest.reason` says so. SIGHUP: the terminal has gone."""

STANDS_FOR = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR2: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGHUP,
}
"""What a launched rank hears, and what its parent had heard. SIGTERM itself stays deadly there: it is how
the elastic agent ends the ranks that are left when one has died, and they may be stuck in a collective."""


@dataclass
class _Early:
    """Requests of this process that nothing has obeyed yet."""

    active: bool = False
    taken: bool = False
    numbers: list[signal.Signals] = field(default_factory=list)


_early = _Early()  # what a process does with signals belongs to the process


@contextmanager
def requests_noted() -> Iterator[None]:
    """Note the first signal that asks for a stop for a `StopRequest` or `Relay` to take; a second one acts.

    Does nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _early.active, _early.taken = True, False
    _early.numbers.clear()
    before = {number: signal.signal(number, _note) for number in WORDS if not _is_ignored(number)}
    try:
        yield
    finally:
        _early.active = False
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def take_noted() -> list[signal.Signals]:
    """The requests noted so far; from here on signals are no longer noted."""
    _early.taken = True
    numbers, _early.numbers = _early.numbers, []
    return numbers


def is_noting() -> bool:
    """True in a command that obeys noted requests: one that trains."""
    return _early.active


def _note(number: int, frame: FrameType | None) -> None:
    if not _early.taken and not _early.numbers:
        _early.numbers.append(signal.Signals(number))
        _say(f"mlm: {WORDS[signal.Signals(number)]}: noted; training will stop and save after its first step")
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _is_ignored(number: signal.Signals) -> bool:
    """True for a hang-up that nohup asked not to hear."""
    return number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _say(text: str) -> None:
    """Write a line to stderr: print is not safe inside a signal handler."""
    with suppress(OSError):  # its reader may be gone
        os.write(2, f"{text}\n".encode())


class StopRequest:
    """Turns the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP into a request that the training loop polls.

        with StopRequest(announce=ctx.is_main) as stop:
            while step < steps and not stop.requested: ...

    Each rank hears the signal at its own time: the loop must agree over ranks at which step to stop.
    A second SIGINT raises KeyboardInterrupt (exit code 130); a third one kills, even inside a collective.
    On leaving the context the previous handlers are back. Outside the main thread, where Python allows no
    handlers, only `request` works.
    """

    def __init__(self, *, announce: bool = False) -> None:
        self._announce = announce
        self.show: Callable[[str], bool] = lambda text: False
        """Shows the announcement where a panel would overwrite stderr; False if it cannot."""
        self._interrupts = 0
        self._reason: str | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._mask: set[int] = set()

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """`Ctrl-C`, `SIGTERM`, `SIGUSR1` or what was passed to `request`; None before a request."""
        return self._reason

    def request(self, reason: str) -> None:
        """Ask for a stop from inside the program. The first reason stays."""
        if self._reason is None:
            self._reason = reason
            text = f"{reason}: finishing the step, then saving; Ctrl-C again stops at once"
            if self._announce and not self.show(text):
                _say(f"mlm: {text}")

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            heard = heard_signals()
            self._handlers = {
                number: signal.signal(number, self._handle) for number in heard if not _is_ignored(number)
            }
            for number in take_noted():
                self._handle(number, None)
            # Launched ranks start with these blocked, so a request made meanwhile arrives now.
            self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handlers:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        heard = signal.Signals(number)
        if heard is signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                raise KeyboardInterrupt
        self.request(WORDS[heard_signals()[heard]])


def heard_signals() -> dict[signal.Signals, signal.Signals]:
    """The signals this process takes as a request, each with the one it stands for."""
    return STANDS_FOR if LAUNCHED in os.environ else {number: number for number in WORDS}
