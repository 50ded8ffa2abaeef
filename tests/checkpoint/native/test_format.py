"""Manifests and shard files that are damaged, forged or hostile are rejected, and nothing is run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native import format as format_module
from mlm.checkpoint.native.save_load import CheckpointError
from mlm.util.errors import CorruptFileError
from tests.checkpoint.native.helpers import edit_manifest, load, save, weights

SHARD = "rank-00000.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path, 7, weights())


def test_state_that_is_no_json_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not JSON compliant"):
        save(tmp_path, 1, weights(), state={"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_manifest_over_the_size_limit_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointError, match="100 is the limit"):
        save(tmp_path, 1, weights())


@pytest.mark.parametrize(
    "edit",
    [
        lambda header: header["w"].update(data_offsets=[0, 2**40]),
        lambda header: header["w"].update(shape=[6, 3]),
        lambda header: header["w"].update(dtype="X"),
        lambda header: header.pop("b"),
    ],
)
def test_malformed_shard_header_is_rejected(saved: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = (saved / SHARD).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + content[8 + length :]
    (saved / SHARD).write_bytes(content)
    edit_manifest(saved, lambda body: body["files"][SHARD].update(bytes=len(content)))
    with pytest.raises(CorruptFileError, match="damaged safetensors header"):
        load(saved, weights())
