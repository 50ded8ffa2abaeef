"""Order of the test files, and runs that draw nothing and compute on one thread."""

import gc
import signal
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mlm.launch import process
from mlm.launch.stop import SIGNAL_NAMES

with warnings.catch_warnings():  # pytest has imported distutils
    warnings.simplefilter("ignore")
    import setuptools  # noqa: F401  # Inductor imports it, which fails once a test has imported pip


# A shell's background jobs ignore Ctrl-C, and nohup's a hang-up: tests send both, to commands too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that start processes first: a long one must not be the last."""

    def rank(item: pytest.Item) -> int:
        names = vars(getattr(item, "module", None) or pytest)
        if names.keys() & {"run_on_ranks", "on_ranks", "subprocess", "launch_jobs"}:
            return 0
        return 1 if "main" in names else 2

    items.sort(key=rank)  # stable: a file's tests stay together


def pytest_collection_finish() -> None:
    """Collect seldom, and not the half a million objects of imported libraries and tests: 0.3 s each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def one_thread(wanted: int | None, environ: Mapping[str, str], *, cores: int, local_ranks: int) -> int:
    """Threads of a run in this process: other workers of pytest use the other cores."""
    return wanted or 1


@pytest.fixture
def store(server: Any) -> Any:
    """The object store of a file's `server` (tests/stores.py), without its failures."""
    server.reset()
    return server


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """A command ignores signals as its process ends: here the process goes on."""
    handlers = {number: signal.getsignal(number) for number in SIGNAL_NAMES}
    yield
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _cheap_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "num_threads", one_thread)
        yield
