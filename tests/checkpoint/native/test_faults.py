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

from mlm.checkpoint.native import reader, save_load
from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.save_load import (
    CheckpointError,
    TensorShard,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import CorruptFileError, UserError
from tests.checkpoint.native.helpers import load, save, weights
from tests.ranks import run_on_ranks


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


def shards_of(rank: int, value: float) -> dict[str, TensorShard]:
    mine = {"w": TensorShard(torch.full((4 - 2 * rank, 4), value), (6, 4), (4 * rank, 0))}
    return mine if rank else mine | {"b": TensorShard.whole(torch.full((3,), value))}


def save_on(ctx: ParallelContext, root: Path, step: int, value: float = 1.0) -> Path:
    settings: dict[str, Any] = {"state": {"rank": ctx.rank}, "keep_last": 2, "keep_every": 0}
    return save_checkpoint(root, step, shards_of(ctx.rank, value), ranks=Ranks.of(ctx), **settings)


def load_on(ctx: ParallelContext, path: Path, shards: dict[str, TensorShard]) -> Any:
    return load_checkpoint(path, shards, ranks=Ranks.of(ctx))


def message_of(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        work()
    except UserError as e:
        return type(e).__name__, str(e)
    return "", ""


def rank_1_fails(ctx: ParallelContext, root: Path) -> tuple[str, str]:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank-00001.safetensors")
    save_on(ctx, root, 1)
    with mock.patch.object(save_load, "write_shard_file", side_effect=full) if ctx.rank else mock.MagicMock():
        return message_of(lambda: save_on(ctx, root, 2))


def test_rank_that_cannot_write_fails_all_ranks_alike(tmp_path: Path) -> None:
    first, second = run_on_ranks(rank_1_fails, tmp_path, tp=2)
    assert first == second
    assert first[0] == "CheckpointError"
    assert "rank-00001.safetensors: could not be saved (rank 1): No space left on device" in first[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"


def load_damaged(ctx: ParallelContext, path: Path) -> tuple[str, str, float]:
    wanted = shards_of(ctx.rank, 0.0)
    kind, message = message_of(lambda: load_on(ctx, path, wanted))
    return kind, message, float(wanted["w"].tensor.abs().sum())


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors"])
def test_damaged_file_fails_all_ranks_and_reaches_no_tensor(tmp_path: Path, name: str) -> None:
    run_on_ranks(save_on, tmp_path, 1, tp=2)
    path = tmp_path / "step-00000001"
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for kind, message, touched in run_on_ranks(load_damaged, path, tp=2):
        assert kind == CorruptFileError.__name__
        assert f"{name}: damaged" in message
        assert touched in (0.0, 8.0, 16.0)  # untouched, or a piece that is whole
