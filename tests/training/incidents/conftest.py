"""A run with a bad sample, which several files read."""

from pathlib import Path

import pytest

from tests.training.incidents.runs import pretrain


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLM_TRUST", "tests")


@pytest.fixture(scope="session")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose incident is only logged."""
    out = tmp_path_factory.mktemp("logged") / "run"
    assert pretrain(out) == 0
    return out
