"""Stopping on request: finish the step, save, leave. A second Ctrl-C stops at once."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

LAUNCHED = "MLM_LAUNCHED"
"""Environment variable of a rank that a plain `mlm` command started (mlm/train/agent.py)."""

WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}
"""The signals that ask for a stop, and how `StopRequest.reason` says so."""

STANDS_FOR = {signal.SIGINT: signal.SIGINT, signal.SIGUSR2: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1}
"""What a launched rank hears, and what its parent had heard. SIGTERM itself stays deadly there: it is how
the elastic agent ends the ranks that are left when one has died, and they may be stuck in a collective."""


class StopRequest:
    """Turns the first SIGINT, SIGTERM or SIGUSR1 into a request that the training loop polls.

        with StopRequest(announce=ctx.is_main) as stop:
            while step < steps and not stop.requested: ...

    Each rank hears the signal at its own time: the loop must agree over ranks at which step to stop.
    A second SIGINT raises KeyboardInterrupt (exit code 130); a third one kills, even inside a collective.
    On leaving the context the previous handlers are back. Outside the main thread, where Python allows no
    handlers, only `request` works.
    """

    def __init__(self, *, announce: bool = False) -> None:
        self._announce = announce
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
            if self._announce:  # os.write: print is not safe inside a signal handler
                text = f"mlm: {reason}: finishing the step, then saving; Ctrl-C again stops at once\n"
                os.write(2, text.encode())

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            heard = heard_signals()
            self._handlers = {number: signal.signal(number, self._handle) for number in heard}
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
