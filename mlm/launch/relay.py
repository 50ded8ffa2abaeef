"""Requests to stop, on their way from the command that started the ranks to the ranks."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from mlm.launch.stop import STANDS_FOR, WORDS, take_noted

AGENT_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class Relay:
    """Passes a request to stop on to the ranks; kills them on a second Ctrl-C, or if none would save.

    With `saves`, ranks that do not listen yet will: they start with the request blocked, so it waits.
    """

    def __init__(self, *, saves: bool = False) -> None:
        self.killed: signal.Signals | None = None
        self._saves = saves
        self._received = take_noted()
        self._handled = 0

    def install(self) -> None:
        """Take over the signals that ask for a stop. They are only noted here and acted on in `act`."""
        for number in WORDS:
            if signal.getsignal(number) is not signal.SIG_IGN or number is not signal.SIGHUP:  # nohup
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(signal.Signals(number))

    def act(self, pids: Mapping[int, int]) -> None:
        """Do what the signals noted since the last call ask for."""
        fresh = self._received[self._handled :]
        if not fresh or self.killed:
            return
        first_time = self._handled == 0
        self._handled += len(fresh)
        ours = {pid: status for pid in pids.values() if (status := _process_status(pid))}
        saves = self._saves or any(map(_listens, ours.values()))
        if self._received.count(signal.SIGINT) > 1 or (first_time and not saves):
            self.killed = fresh[-1]
            for pid in ours:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # each rank leads its own session
        elif first_time:
            carrier = {stands_for: number for number, stands_for in STANDS_FOR.items()}[fresh[0]]
            for pid in ours:
                with suppress(ProcessLookupError):
                    os.kill(pid, carrier)


def _process_status(pid: int) -> dict[str, str]:
    """/proc/PID/status of a child of this process; empty if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return status if status.get("PPid") == str(os.getpid()) else {}


def _listens(status: Mapping[str, str]) -> bool:
    """Whether a process is inside `StopRequest`: SIGUSR1 has a handler and is not blocked."""
    bit = 1 << (signal.SIGUSR1 - 1)
    return bool(int(status["SigCgt"], 16) & bit) and not int(status["SigBlk"], 16) & bit


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Keep the agent off our signals, and put back in the end what it and `Relay` have replaced."""
    numbers = (*WORDS, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    os.environ[AGENT_SIGNALS] = "SIGQUIT"  # the agent's own handlers end the job without a save
    try:
        yield
    finally:
        del os.environ[AGENT_SIGNALS]
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
