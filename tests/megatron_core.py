"""megatron-core as tests import it, late: that takes seconds."""

import warnings
from typing import Any

import pytest


def megatron_core(module: str) -> Any:
    """A module of it; skips the test where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about accelerators that are not here
        return pytest.importorskip(
            f"megatron.core.{module}", reason="megatron-core is absent: pip install 'mlm[dev]'"
        )
