"""GPUs are looked for with torch, and without it where there can be none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlm.launch.config import DistConfig
from mlm.launch.devices import count_gpus, device_kind
from mlm.util.errors import UserError

FOUND = """
import sys
from mlm.launch import devices
devices.DRIVER = sys.argv[1]
print(devices._may_have_gpus(), "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("version", "driver", "expected"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None", "libc.so.6", False),
        ("cuda = None\nrocm = '6.4'", "libc.so.6", False),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'", "none.so", True),  # ROCm: torch is asked
        ("cuda = '13.0'\nhip = None", "none.so", False),  # a host without the driver
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None", "libc.so.6", True),
    ],
)
def test_torch_is_asked_where_its_build_and_the_host_may_have_gpus(
    tmp_path: Path, version: str, driver: str, expected: bool
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text(f"from typing import Optional\n\n{version}\n")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", FOUND, driver], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(expected), "False"]


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
