"""Signals sent to this very process."""

import os
import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.launch.stop import (
    LAUNCHED,
    SIGNAL_NAMES,
    Relay,
    Stopped,
    StopRequest,
    interrupt_exit_code,
    interrupt_held,
    note_stop_requests,
    stopping_at_once,
)


@pytest.fixture(autouse=True)
def _started_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHED, raising=False)
    monkeypatch.setattr("mlm.launch.stop.ECHO_S", 0.0)  # signals here follow each other at once


@pytest.mark.parametrize(
    "number, reason, code",
    [
        (signal.SIGINT, "Ctrl-C", 130),
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGUSR1, "SIGUSR1", 0),  # the run is requeued
        (signal.SIGHUP, "SIGHUP", 129),
    ],
)
def test_first_signal_is_a_request(number: signal.Signals, reason: str, code: int) -> None:
    with StopRequest() as stop:
        assert (stop.number, stop.exit_code) == (None, 0)
        signal.raise_signal(number)
        assert (stop.reason, stop.exit_code) == (reason, code)
    other = StopRequest()
    other.number = stop.number
    assert (other.reason, other.exit_code) == (reason, code)


def test_second_interrupt_stops_at_once() -> None:
    for waiting in (StopRequest(), note_stop_requests()):
        with waiting:
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_the_echo_of_an_interrupt_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout -s INT` signals the command, and then its group, before or while it trains."""
    monkeypatch.setattr("mlm.launch.stop.ECHO_S", 1e9)

    def interrupt_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with note_stop_requests():
        interrupt_twice()
        with StopRequest() as asked:
            assert asked.reason == "Ctrl-C"
    with note_stop_requests(), StopRequest() as asked:
        interrupt_twice()
        assert asked.reason == "Ctrl-C"
    with note_stop_requests():
        relay = Relay(saves=True)
        with relay.receiving():
            interrupt_twice()
        relay.act({})
        assert relay.killed is None


def test_request_made_while_blocked_arrives_on_entering() -> None:
    """Launched ranks start with the signals blocked: a request during their start is not lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # to this thread: others do not block it
        with StopRequest() as stop:
            assert stop.number
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("number, reason", [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_launched_rank_counts_a_signal_that_is_also_passed_on_once(
    number: signal.Signals, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHED, "1")
    with StopRequest() as stop:
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert stop.reason == reason


def test_a_phase_with_nothing_to_save_ends_at_the_first_signal(capfd: pytest.CaptureFixture[str]) -> None:
    """Also at one that was noted before."""
    with pytest.raises(Stopped) as stopped, note_stop_requests(), stopping_at_once("nothing is trained"):
        signal.raise_signal(signal.SIGTERM)
    assert interrupt_exit_code(stopped.value) == 143
    assert capfd.readouterr().err == "mlm: SIGTERM: nothing is trained\n"
    with note_stop_requests():
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(Stopped), stopping_at_once("nothing is trained"):
            pass


@interrupt_held()
def interrupted(times: int, done: list[int]) -> None:
    for number in range(times):
        signal.raise_signal(signal.SIGINT)
        done.append(number)


def test_ctrl_c_within_a_library_waits_for_its_end() -> None:
    """Hydra and OmegaConf raise another error in a `finally` of theirs."""
    went: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(2, went)
    assert went == [0, 1]


def test_the_signal_before_a_time_limit_does_not_end_a_rendezvous() -> None:
    with note_stop_requests():
        signal.raise_signal(signal.SIGUSR1)
        with stopping_at_once("stopped", requeues=False):
            signal.raise_signal(signal.SIGUSR1)


RANK_AFTER_TRAINING = """
import os, signal, threading
from mlm.launch.stop import SIGNAL_NAMES, StopRequest, keep_noting

signal.pthread_sigmask(signal.SIG_BLOCK, SIGNAL_NAMES)
keep_noting(SIGNAL_NAMES)
with StopRequest():
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # as torch's
os.kill(os.getpid(), signal.SIGTERM)
with StopRequest() as later:
    print(later.reason)
"""


def test_a_rank_notes_a_request_between_trainings_and_does_not_die() -> None:
    environ = {**os.environ, LAUNCHED: "1"}
    rank = subprocess.run([sys.executable, "-c", RANK_AFTER_TRAINING], env=environ, capture_output=True)
    assert (rank.returncode, rank.stdout) == (0, b"SIGTERM\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_before_the_training_loop_is_obeyed_by_it(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with note_stop_requests():
        signal.raise_signal(number)
        with StopRequest() as stop:
            assert stop.reason == SIGNAL_NAMES[number]
        with StopRequest() as later:
            assert later.number is None
    assert signal.getsignal(number) is before


def test_an_interrupt_after_the_training_loop_is_not_noted() -> None:
    with note_stop_requests():
        with StopRequest():
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("work", ["note_stop_requests(ends_process=True)", "exiting_on_signals()"])
def test_a_signal_repeated_while_python_ends_does_not_kill(work: str) -> None:
    """It drops its handlers before it deletes objects."""
    lines = (
        "import os, signal",
        "from mlm.launch.stop import exiting_on_signals, note_stop_requests",
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)",
        "class Last:",
        "    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGHUP):",
        "        kill(pid, number)",
        "last = Last()",
        f"with {work}:",
        "    signal.raise_signal(signal.SIGHUP)",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True)
    assert ended.returncode == (129 if "exiting" in work else 0), ended.stderr


def test_a_request_repeated_while_the_command_ends_does_not_kill_it() -> None:
    lines = (
        "import signal, sys",
        "from mlm.__main__ import main",
        "sys.argv = ['mlm', 'pretrain', '--help']",
        "code = main()",
        "signal.raise_signal(signal.SIGUSR1)",
        "sys.exit(code)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == 0


def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with note_stop_requests(), StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.number is None
        with Relay().receiving():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_backslash_kills_ranks_at_once_however_a_run_saves() -> None:
    rank = subprocess.Popen(["sleep", "60"], start_new_session=True)
    relay = Relay(saves=True)
    with relay.receiving():
        relay.act({0: rank.pid})
        assert rank.poll() is None
        signal.raise_signal(signal.SIGQUIT)
        relay.act({0: rank.pid})
    assert rank.wait(10) == -signal.SIGKILL
    assert relay.killed == signal.SIGQUIT


def test_an_interrupt_that_an_import_swallows_ends_the_command_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch takes whatever numpy raises for its absence; what was half imported fails later.

    That is a line, as it may be a defect that has nothing to do with it. An error after an interrupt that the
    command itself handles, as `chat` does, is still one.
    """
    before = signal.getsignal(signal.SIGINT)
    (tmp_path / "interrupted_import.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def half_imported(words: list[str]) -> int:
        with pytest.raises(KeyboardInterrupt):
            import_module("interrupted_import") if words == ["eval"] else signal.raise_signal(signal.SIGINT)
        raise AttributeError("module 'numpy' has no attribute 'matrix'")

    monkeypatch.setattr("mlm.cli.entry._main", half_imported)
    assert main(["eval"]) == 130
    said = capsys.readouterr().err
    assert said.startswith("mlm: Ctrl-C during an import, then AttributeError: module 'numpy' has no")
    assert (said.count("\n"), f"({__file__}:" in said) == (1, True)
    for words in (["generate"], ["chat"]):
        with pytest.raises(AttributeError):
            main(words)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("code, expected", [(0, 0), (1, 130), (2, 130)])
def test_a_mistake_after_an_interrupt_that_an_import_swallows_is_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: int
) -> None:
    """A checkpoint that a half-imported library does not load is no mistake of the user's."""
    (tmp_path / "interrupted_import.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def half_imported(words: list[str]) -> int:
        with pytest.raises(KeyboardInterrupt):
            import_module("interrupted_import")
        return code

    monkeypatch.setattr("mlm.cli.entry._main", half_imported)
    assert main(["import"]) == expected
