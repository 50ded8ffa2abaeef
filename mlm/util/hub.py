"""Reachability of the Hugging Face Hub: its libraries retry for half a minute without one."""

import os
import socket
import sys
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies

TIMEOUT_S = 3.0
OFFLINE = "HF_HUB_OFFLINE"
SETTINGS = {
    "huggingface_hub.constants": (OFFLINE,),
    "datasets.config": (OFFLINE, "HF_DATASETS_OFFLINE"),
}
"""Modules in which libraries that are already imported keep the setting."""


def expect_hub() -> None:
    """Have the Hub's libraries use only their cache, and fail at once, if the Hub is unreachable."""
    if os.environ.get(OFFLINE) is not None or is_reachable():
        return
    os.environ[OFFLINE] = "1"
    for module, names in SETTINGS.items():
        for name in names:
            if module in sys.modules:
                setattr(sys.modules[module], name, True)


@cache
def is_reachable() -> bool:
    """True if a connection to the Hub opens, or a proxy is configured."""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if url.scheme in getproxies() or "all" in getproxies():
        return True
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        with socket.create_connection((url.hostname or "", port), timeout=TIMEOUT_S):
            return True
    except OSError:
        return False
