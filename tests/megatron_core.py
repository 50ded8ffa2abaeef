"""megatron-core as tests import it, late: that takes seconds."""

import os
import warnings
from typing import Any
from unittest.mock import patch

import pytest


def megatron_core(module: str) -> Any:
    """A module of it; skips the test where it is not installed.

    It imports setuptools, which insists on being the first to import distutils unless this variable is set.
    """
    with warnings.catch_warnings(), patch.dict(os.environ, SETUPTOOLS_USE_DISTUTILS="stdlib"):
        warnings.simplefilter("ignore")  # about accelerators that are not here
        return pytest.importorskip(
            f"megatron.core.{module}", reason="megatron-core is absent: pip install 'mlm[dev]'"
        )
