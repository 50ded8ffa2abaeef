"""GPUs are looked for with torch, and without it where there can be none."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlm.launch import devices
from mlm.launch.config import DistConfig
from mlm.launch.devices import count_gpus, device_kind
from mlm.util.errors import UserError

FOUND = """
import json, sys
from pathlib import Path
from mlm.launch import devices
built_for, devices.DRIVER = json.load(sys.stdin)
devices.runpy.run_path = lambda path: built_for
print(devices._may_have_gpus(), "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("built_for", "driver", "expected"),
    [
        ({"cuda": None, "hip": None}, "libc.so.6", False),
        ({"cuda": None}, "libc.so.6", False),
        ({"cuda": None, "hip": "6.4"}, "none.so", True),  # ROCm: torch is asked
        ({"cuda": "13.0", "hip": None}, "none.so", False),  # a host without the driver
        ({"cuda": "13.0", "hip": None}, "libc.so.6", True),
    ],
)
def test_torch_is_asked_where_its_build_and_the_host_may_have_gpus(
    built_for: dict[str, str | None], driver: str, expected: bool
) -> None:
    said = json.dumps([built_for, driver])
    done = subprocess.run(
        [sys.executable, "-c", FOUND], input=said, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(expected), "False"]


def test_the_build_is_read_from_torchs_own_file() -> None:
    import torch

    read = devices.runpy.run_path(str(Path(torch.__file__).with_name("version.py")))
    assert (read["cuda"], read["hip"]) == (torch.version.cuda, torch.version.hip)


@pytest.mark.parametrize("gpus", [0, 4])
def test_auto_is_cuda_where_torch_sees_a_gpu(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    assert device_kind(DistConfig(device="cpu")) == "cpu"
    assert device_kind(DistConfig()) == ("cuda" if gpus else "cpu")
    assert count_gpus() == gpus
    if not gpus:
        with pytest.raises(UserError, match=r"dist\.device=cuda"):
            device_kind(DistConfig(device="cuda"))
