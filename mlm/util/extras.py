"""Optional packages, imported when an input or setting needs them.

Without a network the Hub's libraries would retry for half a minute; they are set offline then.
"""

import os
import socket
import sys
from functools import cache
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from mlm.util.errors import UserError

OFFLINE = "HF_HUB_OFFLINE"
SETTINGS = {"huggingface_hub.constants": (OFFLINE,), "datasets.config": (OFFLINE, "HF_DATASETS_OFFLINE")}
"""Modules and attributes in which imported libraries keep the setting."""


def load_extra(module: str, setting: str, extra: str = "data") -> Any:
    """Import a module of an extra such as mlm[data]. Raises UserError if the extra is not installed.

    `setting`: the setting that needs it, as typed: `input=text.parquet`.
    """
    if module in ("datasets", "huggingface_hub"):
        go_offline_without_hub()
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f"{setting} needs the package {package}: pip install 'mlm[{extra}]'") from error


def go_offline_without_hub() -> None:
    """Restrict the Hub's libraries to their cache if the Hub is unreachable, so that they fail at once."""
    if os.environ.get(OFFLINE) is not None or is_reachable():
        return
    os.environ[OFFLINE] = "1"
    for module, names in SETTINGS.items():
        for name in names:
            if module in sys.modules:
                setattr(sys.modules[module], name, True)


@cache
def is_reachable() -> bool:
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if url.scheme in getproxies() or "all" in getproxies():
        return True
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        with socket.create_connection((url.hostname or "", port), timeout=3.0):
            return True
    except OSError:
        return False
