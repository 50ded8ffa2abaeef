"""The Hub out of reach: one line at once."""

import huggingface_hub
import pytest

from mlm.convert.huggingface.folder import download
from mlm.util import extras
from mlm.util.errors import UserError


def test_hub_out_of_reach_is_one_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(extras.OFFLINE, "")
    monkeypatch.delenv(extras.OFFLINE)
    monkeypatch.setattr(extras, "getproxies", dict)
    extras.is_reachable.cache_clear()
    for module, names in extras.SETTINGS.items():
        for name in names:
            monkeypatch.setattr(f"{module}.{name}", False)
    with pytest.raises(UserError, match=r"out of reach from here.*give a folder with config.json"):
        download("nobody/nothing", None, ("config.json",), "ckpt")
    extras.is_reachable.cache_clear()
    assert huggingface_hub.constants.HF_HUB_OFFLINE
