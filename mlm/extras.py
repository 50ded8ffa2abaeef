"""Packages that only some inputs and settings need: loaded when one of those is met."""

from importlib import import_module
from typing import Any

from mlm.errors import UserError
from mlm.hub import expect_hub

OF_THE_HUB = ("datasets", "huggingface_hub")


def load_extra(module: str, setting: str, extra: str = "data") -> Any:
    """A module of an extra, mlm[data]. Raises UserError naming the extra when it is not installed.

    `setting` is what asks for it, as the user wrote it: `input=text.parquet`.
    """
    if module in OF_THE_HUB:
        expect_hub()
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f"{setting} needs the package {package}: pip install 'mlm[{extra}]'") from error
