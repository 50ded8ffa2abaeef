"""Bad days: kills, full and read-only disks, ranks that fail. The previous checkpoint survives each."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mlm.checkpoint.native import reader
from mlm.checkpoint.native.save_load import (
    CheckpointError,
)
from mlm.util.errors import UserError
from tests.checkpoint.native.helpers import load, save, weights


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Before each file operation of a save, of a new step and of the same one again; and at random."""
    command = [sys.executable, "-m", "tests.checkpoint.native.kill_saves", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["problems"] == []
    assert min(result["rounds"].values()) > 10


@pytest.mark.parametrize("name", ["fsync", "rename", "replace", "mkdir"])
@pytest.mark.parametrize("step", [1, 2])
def test_disk_full_at_any_call_leaves_the_previous_and_no_partials(
    tmp_path: Path, name: str, step: int
) -> None:
    full, function = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), getattr(os, name)
    for number in range(1, 20):
        root, outcomes = tmp_path / str(number), [mock.DEFAULT] * (number - 1) + [full] + [mock.DEFAULT] * 99
        save(root, 1, weights(1.0))
        with mock.patch.object(os, name, mock.Mock(wraps=function, side_effect=outcomes)) as called:
            failed, message = message_of(lambda root=root: save(root, step, weights(2.0)))
        if failed:
            assert "No space left on device. Free space there, or set out=" in message
            assert message.endswith("the previous checkpoint step-00000001 is intact")
        if called.call_count < number:
            return  # every call has failed once
        tensors = weights(0.0)
        load(root / "step-00000001", tensors)
        assert float(tensors["w"].mean()) in ((1.0,) if step == 2 else (1.0, 2.0))
        assert not [*root.glob(".saving-*"), *root.glob(".latest-*")]
        save(root, 3, weights(3.0), keep_last=1)
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000003"]
    pytest.fail("more calls than expected")


def test_file_too_large_for_its_limit_is_an_error(tmp_path: Path) -> None:
    """The limit of a quota or of ulimit -f, met in the middle of a write."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large.*there is no earlier checkpoint"):
            save(tmp_path, 1, {"w": torch.ones(60_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not list(tmp_path.iterdir())


def test_unreadable_shard_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path, 1, weights())
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path / "rank-00000.safetensors"))
    with (
        mock.patch.object(reader, "CheckedFile", side_effect=denied),
        pytest.raises(
            CheckpointError, match=r"rank-00000.safetensors: cannot be read \(rank 0\): Permission"
        ),
    ):
        load(path, weights())


# Two ranks. `w` is cut into rows [0:4] and [4:6]; rank 0 owns the replicated `b`.


def message_of(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        work()
    except UserError as e:
        return type(e).__name__, str(e)
    return "", ""
