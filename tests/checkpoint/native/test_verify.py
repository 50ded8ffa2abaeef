"""Every damage to a checkpoint is found, named, loaded by nobody, and does not hide the next."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from mlm.checkpoint.native.format import MANIFEST
from mlm.checkpoint.native.verify import FileProblem, verify_checkpoint
from mlm.util.errors import UserError
from tests.checkpoint.native.helpers import (
    edit_chunks,
    edit_manifest,
    load,
    pieces,
    save,
    save_pieces,
    weights,
)
from tests.checkpoints_on_disk import flip
from tests.util.special_files import put

SHARDS = [f"rank-{rank:05d}.safetensors" for rank in range(3)]


def three_files(root: Path, step: int = 1) -> Path:
    return save_pieces(root, step, [{"w": piece} for piece in pieces(weights(step)["w"], [[2, 4]])])


def replace_by(kind: str, name: str, path: Path) -> None:
    (path / name).rename(elsewhere := path.parent / "elsewhere")
    if kind == "link":
        (path / name).symlink_to(elsewhere)
    else:
        put(kind, path / name)


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "flipped": (lambda path: flip(path / SHARDS[1], -1), SHARDS[1], "^damaged, digest xxh3:"),
    "truncated": (
        lambda path: (path / SHARDS[1]).write_bytes(b"short"),
        SHARDS[1],
        r"^5 bytes, the manifest says \d+$",
    ),
    "deleted": (
        lambda path: (path / SHARDS[1]).unlink(),
        SHARDS[1],
        "^missing, the checkpoint is not whole$",
    ),
    **{
        f"{kind} for {name}": (partial(replace_by, kind, name), name, "^is a link or special file$")
        for kind in ("link", "FIFO", "folder")
        for name in (SHARDS[1], MANIFEST)
    },
    "of an older step": (
        lambda path: (path.parent / "step-00000001" / SHARDS[1]).rename(path / SHARDS[1]),
        SHARDS[1],
        "^is a shard of another save$",
    ),
    "left over": (
        lambda path: (path / "rank-00003.safetensors").write_bytes((path / SHARDS[1]).read_bytes()),
        "rank-00003.safetensors",
        "^not listed in the manifest",
    ),
    "manifest flipped": (lambda path: flip(path / MANIFEST, 100), MANIFEST, ""),
    "manifest altered": (
        lambda path: edit_manifest(path, lambda body: body.update(step=9), sign=False),
        MANIFEST,
        "digest does not match its content",
    ),
    "manifest deleted": (lambda path: (path / MANIFEST).unlink(), MANIFEST, "^missing"),
    "hole": (
        lambda path: edit_chunks(path, lambda columns: columns["size"].__setitem__(-1, (1, 1))),
        MANIFEST,
        "there is a hole",
    ),
    "later version": (
        lambda path: edit_manifest(path, lambda body: body.update(version=99)),
        MANIFEST,
        "format version 99, known up to 1. Upgrade mlm",
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    do, file, why = DAMAGES[damage]
    three_files(tmp_path, 1)
    path = three_files(tmp_path, 2)
    do(path)
    found = verify_checkpoint(path)
    (problem,) = found.problems
    assert problem.file == file
    assert re.search(why, problem.why)
    assert found.loads == (damage == "left over")
    with nullcontext() if found.loads else pytest.raises(UserError, match=file):
        load(path, {"w": torch.zeros(6, 4, dtype=torch.int64)})


def test_all_problems_are_found_not_the_first_alone(tmp_path: Path) -> None:
    path = three_files(tmp_path)
    (path / SHARDS[0]).unlink()
    flip(path / SHARDS[2], -1)
    (path / "stale.safetensors").touch()
    found = verify_checkpoint(path)
    assert [problem.file for problem in found.problems] == [SHARDS[0], SHARDS[2], "stale.safetensors"]


def test_tensor_that_is_not_as_listed_is_found_though_the_digest_is_right(tmp_path: Path) -> None:
    path = save(tmp_path, 1, weights())
    edit_manifest(path, lambda body: body["tensors"]["w"].update(dtype="I32"))
    assert verify_checkpoint(path).problems == (FileProblem(SHARDS[0], "does not hold w as listed"),)
