"""Stopping on request: finish the step, save, leave. A second Ctrl-C stops at once.

A request may come before there is a step to finish: importing torch, the rendezvous and loading a checkpoint
take seconds to minutes. `note_stop_requests` keeps it until a `StopRequest` obeys it. `Relay` passes it on
from the command to the ranks that it started. This module needs the standard library only, so that signals
are noted before anything else is imported.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

LAUNCHED = "MLM_LAUNCHED"
"""Environment variable of a rank that a plain `mlm` command started (mlm/launch/start.py)."""

SIGNAL_NAMES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGHUP: "SIGHUP",
}
"""Signals that request a stop, and their names in `StopRequest.reason`. SIGHUP: the terminal is gone."""

REPEATED_SIGNALS = (signal.SIGUSR1, signal.SIGHUP)
"""Requests that may still come when there is nothing left to stop."""

SAVED_FOR_REQUEUE = signal.SIGUSR1
"""The signal before a time limit: the run saves, and its command succeeds so that a batch script requeues."""

UNKNOWN_SIGNAL = 64
"""Stands in a vote for a request that no signal made."""


class Stopped(KeyboardInterrupt):
    """A signal ended the command at once: there was nothing to save, or all is saved."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(SIGNAL_NAMES[number])
        self.number = number


@dataclass
class _NotedRequests:
    """Requests to this process that nothing has obeyed yet."""

    active: bool = False
    taken: bool = False
    numbers: list[signal.Signals] = field(default_factory=list)


def signal_exit_code(number: int) -> int:
    """Return the exit code of a command that a signal stopped: 128 + n, or 0 for a requeue."""
    return 0 if number == SAVED_FOR_REQUEUE else 128 + number


def interrupt_exit_code(error: KeyboardInterrupt) -> int:
    """Return the exit code of a command that an interrupt ended at once."""
    return signal_exit_code(error.number if isinstance(error, Stopped) else signal.SIGINT)


_noted_requests = _NotedRequests()  # what a process does with signals belongs to the process


@contextmanager
def handling(
    numbers: Iterable[signal.Signals], handler: Any, *, ignored_afterwards: Iterable[signal.Signals] = ()
) -> Iterator[None]:
    """Handle signals while inside, but for a hang-up that nohup ignores; then restore the handlers.

    Those `ignored_afterwards` are ignored then. Does nothing outside the main thread, where Python allows no
    handlers.
    """
    before = dict[signal.Signals, Any]()
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            restored = signal.SIG_DFL if previous is None else previous
            signal.signal(number, signal.SIG_IGN if number in ignored_afterwards else restored)


@contextmanager
def interrupt_held() -> Iterator[None]:
    """Let the first Ctrl-C wait while inside: libraries that clean up replace it by an error of theirs."""
    held = list[int]()

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(number)

    try:
        with handling([signal.SIGINT], hold):
            yield
    finally:
        if held:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def note_stop_requests(*, ends_process: bool = False) -> Iterator[None]:
    """Note the first signal that requests a stop, for a `StopRequest` or `Relay`.

    A second Ctrl-C interrupts at once. Other repetitions change nothing: schedulers send the signal before a
    time limit several times. After training there is nothing left to stop: only Ctrl-C has an effect.
    With `ends_process` the signals that batch scripts and terminals send stay without effect afterwards: a
    repeated one would kill the process on its way out, and its job would seem to have failed.
    """
    _noted_requests.active = threading.current_thread() is threading.main_thread()
    _noted_requests.taken = False
    _noted_requests.numbers.clear()
    with handling(SIGNAL_NAMES, _note, ignored_afterwards=REPEATED_SIGNALS if ends_process else ()):
        try:
            yield
        finally:
            _noted_requests.active = False


def unblock_stop_signals() -> None:
    """Receive the signals that request a stop, which `mlm.__main__` or a batch script has blocked."""
    if threading.current_thread() is threading.main_thread() and LAUNCHED not in os.environ:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNAL_NAMES)


@contextmanager
def stopping_at_once(text: str, *, requeues: bool = True) -> Iterator[None]:
    """Raise Stopped at the first signal while inside, also at one noted before: nothing is left to save.

    `text` says so to the user. Without `requeues`, SIGUSR1 stays noted.
    """

    def stop(number: int, frame: FrameType | None = None) -> None:
        stopped = Stopped(signal.Signals(number))
        if LAUNCHED not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":  # else the launcher does
            _say(f"mlm: {stopped}: {text}")
        raise stopped

    heard = [n for n in SIGNAL_NAMES if requeues or n is not SAVED_FOR_REQUEUE]
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(handling(heard, stop))
            if noted := [number for number in _noted_requests.numbers if number in heard]:
                stop(noted[0])
            mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        yield


def take_noted() -> list[signal.Signals]:
    """Return the requests noted so far, and stop noting."""
    _noted_requests.taken = True
    numbers, _noted_requests.numbers = _noted_requests.numbers, []
    return numbers


def is_noting() -> bool:
    """True in a command that obeys noted requests: one that trains."""
    return _noted_requests.active


def _note(number: int, frame: FrameType | None) -> None:
    if not _noted_requests.taken and not _noted_requests.numbers:
        _noted_requests.numbers.append(signal.Signals(number))
        word = SIGNAL_NAMES[signal.Signals(number)]
        _say(f"mlm: {word}: noted; if training starts, it stops and saves after its first step")
    elif number == signal.SIGINT:
        raise KeyboardInterrupt


def _say(text: str) -> None:
    """Write a line to stderr: print is not safe inside a signal handler."""
    with suppress(OSError):  # its reader may be gone
        os.write(2, f"{text}\n".encode())


class StopRequest:
    """Turns the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP into a request that the training loop polls.

        with StopRequest(announce=ctx.is_main) as stop:
            while step < steps and not stop.requested: ...

    Each rank receives the signal at its own time: the ranks must agree on the step at which to stop.
    A second SIGINT raises KeyboardInterrupt (exit code 130); a third one kills, even inside a collective.
    In a launched rank it changes nothing: it may be the first one, passed on, and the launcher counts.
    On leaving the context the previous handlers are restored. Outside the main thread, where Python allows no
    handlers, only `request` works.
    """

    def __init__(self, *, announce: bool = False) -> None:
        self._announce = announce
        self.show: Callable[[str], bool] = lambda text: False
        """Shows the announcement where a panel would overwrite stderr; False if it cannot."""
        self.last_step: Callable[[], str] = lambda: "the step"
        """Words for the step after which a stop requested now takes effect. Called in signal handlers."""
        self._interrupts = 0
        self._signal: signal.Signals | None = None
        self._reason: str | None = None
        self._restore = ExitStack()

    @property
    def requested(self) -> bool:
        """True if this rank was asked to stop."""
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """`Ctrl-C`, `SIGTERM`, … or the argument of `request`; None before a request."""
        return self._reason

    @property
    def exit_code(self) -> int:
        """Exit code of a command whose work this request ended: 128 + n by a signal, 0 for a requeue."""
        return 0 if self._signal is None else signal_exit_code(self._signal)

    @property
    def ballot(self) -> int:
        """This rank's part of a vote: 0 before a request, then the number of its signal."""
        return 0 if self._reason is None else int(self._signal or UNKNOWN_SIGNAL)

    def agree(self, ballot: int) -> None:
        """Adopt the request of another rank, unless this one has received its own."""
        if self._reason is None:
            self._signal = None if ballot == UNKNOWN_SIGNAL else signal.Signals(ballot)
            self._reason = SIGNAL_NAMES[self._signal] if self._signal else "another rank"

    def request(self, reason: str) -> None:
        """Request a stop. The first reason stays."""
        if self._reason is None:
            self._reason = reason
            text = f"{reason}: finishing {self.last_step()}, then saving; Ctrl-C again stops at once"
            if self._announce and not self.show(text):
                _say(f"mlm: {text}")

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._restore.enter_context(handling(SIGNAL_NAMES, self._handle))
            for number in take_noted():
                self._handle(number, None)
            # Launched ranks start with these blocked, so a request made meanwhile arrives now.
            mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNAL_NAMES)
            self._restore.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and LAUNCHED not in os.environ:
            self._interrupts += 1
            if self._interrupts > 1:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                raise KeyboardInterrupt
        self._signal = self._signal or signal.Signals(number)
        self.request(SIGNAL_NAMES[self._signal])


class Relay:
    """Passes a request to stop on to the ranks; kills them on a second Ctrl-C, or if they save nothing.

    With `saves` the request waits in ranks that do not listen yet: they start with it blocked.
    """

    def __init__(self, *, saves: bool = False) -> None:
        self.killed: signal.Signals | None = None
        self._saves = saves
        self._received = take_noted()
        self._handled = 0

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Note the signals that request a stop, for `act`, and SIGQUIT, which stops at once."""
        with handling([signal.SIGQUIT, *SIGNAL_NAMES], self._note):
            yield

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))

    def act(self, pids: Mapping[int, int]) -> None:
        """Obey the signals noted since the last call; `pids` are of children that are not collected yet."""
        fresh = self._received[self._handled :]
        if not fresh or self.killed:
            return
        is_first = self._handled == 0
        self._handled += len(fresh)
        is_urgent = signal.SIGQUIT in fresh or self._received.count(signal.SIGINT) > 1
        if is_urgent or not self._saves:
            self.killed = fresh[-1]
            for pid in pids.values():
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # each rank leads its own session
        elif is_first:
            for pid in pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, fresh[0])
