"""Optional packages, imported when an input or setting needs them."""

from importlib import import_module
from typing import Any

from mlm.util.errors import UserError
from mlm.util.hub import expect_hub

OF_THE_HUB = ("datasets", "huggingface_hub")


def load_extra(module: str, setting: str, extra: str = "data") -> Any:
    """Import a module of an extra, mlm[data]. Raises UserError with the extra if it is not installed.

    `setting` is the setting that needs it, as the user typed it: `input=text.parquet`.
    """
    if module in OF_THE_HUB:
        expect_hub()
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f"{setting} needs the package {package}: pip install 'mlm[{extra}]'") from error
