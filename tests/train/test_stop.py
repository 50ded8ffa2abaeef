"""Signals sent to this very process."""

import signal
import threading

import pytest

from mlm.train.stop import LAUNCHED, StopRequest


@pytest.fixture(autouse=True)
def _started_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHED, raising=False)


@pytest.mark.parametrize(
    "number, reason",
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1")],
)
def test_first_signal_is_a_request(number: signal.Signals, reason: str) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert (stop.requested, stop.reason) == (True, reason)


def test_second_interrupt_stops_at_once() -> None:
    with StopRequest():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_interrupt_after_another_signal_is_the_first_one() -> None:
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGINT)
        assert stop.reason == "SIGUSR1"


def test_handlers_are_restored() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    with StopRequest():
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


def test_request_made_while_blocked_arrives_on_entering() -> None:
    """Launched ranks start with the signals blocked: a request during their start is not lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # to this thread: others do not block it
        with StopRequest() as stop:
            assert stop.requested
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_launched_rank_leaves_sigterm_deadly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The elastic agent ends the remaining ranks with it; SIGUSR2 carries the request instead."""
    monkeypatch.setenv(LAUNCHED, "1")
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) is before
        signal.raise_signal(signal.SIGUSR2)
        assert stop.reason == "SIGTERM"


def test_announcement_is_one_line_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    stop = StopRequest(announce=True)
    stop.request("validation diverged")
    stop.request("again")
    expected = "mlm: validation diverged: finishing the step, then saving; Ctrl-C again stops at once\n"
    assert capfd.readouterr().err == expected


def test_outside_the_main_thread_only_explicit_requests_count() -> None:
    seen = []

    def loop() -> None:
        with StopRequest() as stop:
            stop.request("enough")
            seen.append(stop.reason)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert seen == ["enough"]
