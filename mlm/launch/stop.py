"""Stopping on request: finish the step, save, exit. A second Ctrl-C stops at once.

A request may come before the first step: importing torch, the rendezvous and loading a checkpoint take
seconds to minutes. `note_stop_requests` keeps it for a `StopRequest`. `Relay` passes it on from the command
to its ranks. Standard library only, so that signals are noted before any other import.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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

SAVED_FOR_REQUEUE = signal.SIGUSR1
"""The signal before a time limit: the run saves, and its command succeeds so that a batch script requeues."""

ECHO_S = 0.5
"""Seconds within which a second Ctrl-C counts as the first: `timeout -s INT` and wrappers signal a process
and then its group, on a busy host tenths of a second apart."""


class Stopped(KeyboardInterrupt):
    """A signal ended the command at once, with nothing left to save."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(SIGNAL_NAMES[number])
        self.number = number


@dataclass
class _SignalState:
    is_noting: bool = False
    is_taken: bool = False
    noted: signal.Signals | None = None
    """Pending request."""
    interrupted_at: float = -ECHO_S
    """Monotonic time of the newest Ctrl-C that counts."""


def signal_exit_code(number: int) -> int:
    """Return the exit code of a command that a signal stopped: 128 + n, or 0 for a requeue."""
    return 0 if number == SAVED_FOR_REQUEUE else 128 + number


def interrupt_exit_code(error: KeyboardInterrupt) -> int:
    return signal_exit_code(error.number if isinstance(error, Stopped) else signal.SIGINT)


_state = _SignalState()  # signal handlers are global to a process


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Any) -> Iterator[None]:
    """Handle signals while inside, except a hang-up that nohup ignores; then restore the handlers.

    A Ctrl-C that echoes one before is dropped. Does nothing outside the main thread, where Python allows no
    handlers.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if now - _state.interrupted_at < ECHO_S:
                return
            _state.interrupted_at = now
        handler(number, frame)

    handlers = dict[signal.Signals, Any]()
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, previous in handlers.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


@contextmanager
def interrupt_held() -> Iterator[None]:
    """Delay Ctrl-C while inside: libraries turn it into another error."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def note_stop_requests(*, ends_process: bool = False) -> Iterator[None]:
    """Note the first signal that requests a stop, for a `StopRequest` or `Relay`.

    A second Ctrl-C interrupts at once. Other repetitions change nothing: schedulers send the signal before a
    time limit several times. After training only Ctrl-C has an effect. With `ends_process` this holds until
    the process ends: a repeated signal would kill it, and its job would seem to have failed.
    """
    _state.is_noting = threading.current_thread() is threading.main_thread()
    _state.is_taken, _state.noted, _state.interrupted_at = False, None, -ECHO_S
    try:
        with handling(SIGNAL_NAMES, _note):
            yield
    finally:
        _state.is_noting, _state.is_taken = False, True
        if ends_process:
            keep_noting([signal.SIGINT])
            ignore(number for number in SIGNAL_NAMES if number is not signal.SIGINT)


@contextmanager
def note_interrupted_imports(interrupted: threading.Event) -> Iterator[None]:
    """Set the event at a Ctrl-C during an import, whose module may catch KeyboardInterrupt.

    An ignored Ctrl-C (`&`) stays ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
                interrupted.set()
            frame = frame.f_back
        raise KeyboardInterrupt

    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with handling([signal.SIGINT] if is_usual else [], interrupt):
        yield


def ignore(numbers: Iterable[signal.Signals]) -> None:
    """Ignore these signals until this process ends, where Python has dropped its handlers."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def keep_noting(numbers: Iterable[signal.Signals]) -> None:
    """Note these signals until this process ends, except ignored ones."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)


def unblock_stop_signals() -> None:
    """Unblock the stop signals that `mlm.__main__` or a batch script has blocked."""
    if threading.current_thread() is threading.main_thread() and LAUNCHED not in os.environ:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNAL_NAMES)


@contextmanager
def stopping_at_once(text: str, *, requeues: bool = True) -> Iterator[None]:
    """Raise Stopped at the first signal while inside, or at one noted before: there is nothing to save.

    `text` is printed. Without `requeues`, SIGUSR1 stays noted.
    """

    def stop(number: int, frame: FrameType | None = None) -> None:
        stopped = Stopped(signal.Signals(number))
        if (
            LAUNCHED not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0"
        ):  # else the launcher prints it
            _say(f"mlm: {stopped}: {text}")
        raise stopped

    numbers = [n for n in SIGNAL_NAMES if requeues or n is not SAVED_FOR_REQUEUE]
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(handling(numbers, stop))
            if _state.noted in numbers:
                stop(_state.noted)
            mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        yield


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Raise SystemExit at the first SIGTERM or SIGHUP while inside, so that unfinished files are deleted.

    Later signals change nothing until the process ends. Ignored ones (nohup) stay ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        ignore(handled)
        _say(f"mlm: {SIGNAL_NAMES[signal.Signals(number)]}: stopped")
        raise SystemExit(signal_exit_code(number))

    is_main, numbers = threading.current_thread() is threading.main_thread(), (signal.SIGTERM, signal.SIGHUP)
    handled = [n for n in numbers if is_main and signal.getsignal(n) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in handled:
            if signal.getsignal(number) is stop:
                signal.signal(number, signal.SIG_DFL)


def take_request() -> signal.Signals | None:
    """Return the noted request, and stop noting."""
    _state.is_taken = True
    noted, _state.noted = _state.noted, None
    return noted


def is_noting() -> bool:
    """True in a training command, which obeys noted requests."""
    return _state.is_noting


def _note(number: int, frame: FrameType | None) -> None:
    if LAUNCHED in os.environ:  # the command prints the line
        _state.noted = _state.noted or signal.Signals(number)
    elif not _state.is_taken and _state.noted is None:
        _state.noted = signal.Signals(number)
        word = SIGNAL_NAMES[_state.noted]
        _say(f"mlm: {word}: noted; if training starts, it stops and saves after its first step")
    elif number == signal.SIGINT:
        raise KeyboardInterrupt


def _say(text: str) -> None:
    """Write a line to stderr: print is not safe inside a signal handler."""
    with suppress(OSError):  # closed pipe
        os.write(2, f"{text}\n".encode())


class StopRequest:
    """Turns the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP into a request that the training loop polls.

        with StopRequest(announce=ctx.is_main) as stop:
            while step < steps and stop.number is None: ...

    Ranks receive the signal at different times: they must agree on the step at which to stop. A second SIGINT
    raises KeyboardInterrupt (exit code 130); a third one kills, even inside a collective. In a launched rank
    it changes nothing: it may be the first one, passed on, and the launcher counts. Outside the main thread,
    where Python allows no handlers, only `request` works.
    """

    def __init__(self, *, announce: bool = False) -> None:
        self._announce = announce
        self.last_step: Callable[[], str] = lambda: "the step"
        """Name of the step after which a stop requested now takes effect. Called in signal handlers."""
        self.number: signal.Signals | None = None
        """The signal that requested a stop, on this or another rank."""
        self._interrupts = 0
        self._restore = ExitStack()

    @property
    def reason(self) -> str | None:
        """`Ctrl-C`, `SIGTERM`, …; None before a request."""
        return None if self.number is None else SIGNAL_NAMES[self.number]

    @property
    def exit_code(self) -> int:
        return 0 if self.number is None else signal_exit_code(self.number)

    def request(self, number: signal.Signals) -> None:
        """Request a stop, as a signal does. The first one stays."""
        if self.number is None:
            self.number = number
            text = f"{self.reason}: finishing {self.last_step()}, then saving; Ctrl-C again stops at once"
            if self._announce:
                _say(f"mlm: {text}")

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._restore.enter_context(handling(SIGNAL_NAMES, self._handle))
            if noted := take_request():
                self._handle(noted, None)
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
        self.request(signal.Signals(number))


class Relay:
    """Passes a stop request on to the ranks; kills them on a second Ctrl-C, or if they save nothing.

    With `saves` the request stays pending in ranks without handlers yet: they start with it blocked.
    """

    def __init__(self, *, saves: bool = False) -> None:
        self.killed: signal.Signals | None = None
        """The signal for which ranks were killed."""
        self._saves, self._is_passed = saves, False
        noted = take_request()
        self._received = [] if noted is None else [noted]

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Note the signals that request a stop, for `act`, and SIGQUIT, which stops at once."""
        numbers, received = [signal.SIGQUIT, *SIGNAL_NAMES], self._received
        with handling(numbers, lambda number, frame: received.append(signal.Signals(number))):
            yield

    def act(self, pids: Mapping[int, int]) -> None:
        """Pass on the signals noted since the last call; `pids`: uncollected children by rank."""
        received = self._received
        is_urgent = signal.SIGQUIT in received or received.count(signal.SIGINT) > 1
        if self.killed or not received or (self._is_passed and not is_urgent):
            return
        if is_urgent or not self._saves:
            self.killed = received[-1]
        self._is_passed = True
        for pid in pids.values():
            with suppress(ProcessLookupError):
                if self.killed:
                    os.killpg(pid, signal.SIGKILL)  # each rank leads a session
                else:
                    os.kill(pid, received[0])
