"""Checkpoints of many chunks, kept in columns: whole, damaged, forged, and of many ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mlm.checkpoint.native import columns as columns_module
from mlm.checkpoint.native import format as format_module
from mlm.checkpoint.native.columns import Chunk, Chunks, columns_problem, decode_columns, encode_columns
from mlm.checkpoint.native.compare import compare_checkpoints
from mlm.checkpoint.native.declaration import declare_shards, merge_declared
from mlm.checkpoint.native.fit import plan_reading
from mlm.checkpoint.native.folders import latest_checkpoint, problem_of
from mlm.checkpoint.native.format import CHUNKS, MANIFEST, read_manifest, read_summary
from mlm.checkpoint.native.retention import prune
from mlm.checkpoint.native.save_load import load_checkpoint
from mlm.checkpoint.native.slices import Region, Shard, tiling_problem
from mlm.checkpoint.native.verify import verify_checkpoint
from mlm.util.atomic import digest_bytes
from mlm.util.errors import CorruptFileError, UserError
from tests.checkpoint.native.helpers import ALONE, edit_manifest, load, pieces, save, save_pieces, weights
from tests.checkpoint.native.test_stream import write


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checkpoint in columns."""
    monkeypatch.setattr(format_module, "MOST_LISTED", -1)


def state_of_four(value: float = 1.0) -> list[dict[str, Shard]]:
    """A matrix in 2 x 2 pieces; the first rank has a scalar, the last a tensor of no elements."""
    ranks = [{"w": piece} for piece in pieces(torch.arange(24.0).view(6, 4) + value, [[2], [1]])]
    ranks[0]["scalar"] = Shard.whole(torch.tensor(value))
    ranks[3]["empty"] = Shard.whole(torch.zeros(0, 3))
    return ranks


def blank() -> dict[str, Tensor]:
    return {"w": torch.zeros(6, 4), "scalar": torch.tensor(0.0), "empty": torch.zeros(0, 3)}


def edit_columns(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the columns as an adversary would: with a size and digests that match."""
    body = json.loads((path / MANIFEST).read_bytes())
    count, dims = body["chunks"]["bytes"] // 40, 2
    content = (path / CHUNKS).read_bytes()
    numbers = {
        "tensor": np.frombuffer(content, "<i4", count).copy(),
        "file": np.frombuffer(content, "<i4", count, 4 * count).copy(),
        "offset": np.frombuffer(content, "<i8", count * dims, 8 * count).copy().reshape(count, dims),
        "size": np.frombuffer(content, "<i8", count * dims, 24 * count).copy().reshape(count, dims),
    }
    edit(numbers)
    content = b"".join(column.tobytes() for column in numbers.values())
    (path / CHUNKS).write_bytes(content)
    said = {"bytes": len(content), "digest": digest_bytes(content)}
    edit_manifest(path, lambda body: body.update(chunks=said))


def test_few_chunks_are_listed_in_the_manifest_as_ever(tmp_path: Path) -> None:
    path = save_pieces(tmp_path, 1, state_of_four())
    body = json.loads((path / MANIFEST).read_bytes())
    assert (body["version"], (path / CHUNKS).exists()) == (1, False)
    assert body["tensors"]["w"]["chunks"] == [
        [f"rank-0000{rank}.safetensors", [row, column], [rows, count]]
        for rank, (row, column, rows, count) in enumerate(
            [(0, 0, 2, 1), (0, 1, 2, 3), (2, 0, 4, 1), (2, 1, 4, 3)]
        )
    ]


def test_both_forms_say_the_same_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = read_manifest(save_pieces(tmp_path / "a", 1, state_of_four()))
    monkeypatch.setattr(format_module, "MOST_LISTED", 4)
    in_columns = read_manifest(save_pieces(tmp_path / "b", 1, state_of_four()))
    assert (listed.version, in_columns.version) == (1, 2)
    assert in_columns.tensors == listed.tensors
    assert list(in_columns.tensors) == ["empty", "scalar", "w"]


@pytest.mark.usefixtures("lowered")
def test_a_checkpoint_in_columns_loads_at_another_layout(tmp_path: Path) -> None:
    path, full = save_pieces(tmp_path, 1, state_of_four()), torch.zeros(6, 4)
    for piece in pieces(full, [[1, 5]]):
        load_checkpoint(path, {"w": piece}, **ALONE, allow_extra=lambda name: True)
    assert torch.equal(full, torch.arange(24.0).view(6, 4) + 1)
    tensors = blank()
    load(path, tensors)
    assert float(tensors["scalar"]) == 1


@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize("shapes", [[], [()], [(0, 2)], [(3,), (2, 1, 2)]])
def test_any_dims_come_back(tmp_path: Path, shapes: list[tuple[int, ...]]) -> None:
    tensors = {str(i): torch.randn(shape) for i, shape in enumerate(shapes)}
    loaded = {name: torch.zeros_like(x) for name, x in tensors.items()}
    assert load(save(tmp_path, 1, tensors), loaded).version == 2
    assert all(torch.equal(loaded[name], x) for name, x in tensors.items())


@pytest.mark.usefixtures("lowered")
def test_a_checkpoint_in_columns_is_verified_compared_and_pruned(tmp_path: Path) -> None:
    paths = [save_pieces(tmp_path, step, state_of_four(step)) for step in (1, 2, 3)]
    found = verify_checkpoint(paths[0])
    assert (found.whole, found.warnings) == (True, ())
    compared = compare_checkpoints(paths[0], paths[1])
    assert {t.name: t.differing for t in compared.tensors} == {"empty": 0, "scalar": 1, "w": 24}
    prune(tmp_path, 3, keep_last=1, keep_every=0)
    assert [path.exists() for path in paths] == [False, False, True]


def flip_each(path: Path) -> list[bytes]:
    content = path.read_bytes()
    places = range(0, len(content), 9)
    return [content[:i] + bytes([content[i] ^ 4]) + content[i + 1 :] for i in places]


DAMAGES: dict[str, Callable[[Path], list[bytes | None]]] = {
    "flipped": lambda path: list(flip_each(path)),
    "cut": lambda path: [path.read_bytes()[:n] for n in (0, 40, -1)],
    "longer": lambda path: [path.read_bytes() + b"\0"],
    "deleted": lambda path: [None],
    "of another save": lambda path: [(path.parents[2] / "other/step-00000009" / CHUNKS).read_bytes()],
}


@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_columns_are_found_and_the_checkpoint_before_is_taken(tmp_path: Path, damage: str) -> None:
    root = tmp_path / "run"
    save_pieces(tmp_path / "other", 9, [{"w": p} for p in pieces(torch.zeros(6, 4), [[1], [1]])])
    old, new = (
        save_pieces(root, step, [{"w": p} for p in pieces(weights()["w"], [[2], [1]])]) for step in (1, 2)
    )
    path = new / CHUNKS
    for content in DAMAGES[damage](path):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(CorruptFileError, match=f"{path}: "):
            load(new, {"w": torch.zeros(6, 4)})
        (problem,) = verify_checkpoint(new).problems
        assert problem.file == CHUNKS
        assert str(path) in str(problem_of(new))
        assert latest_checkpoint(root) == old


def test_columns_beside_a_manifest_that_lists_its_chunks_are_odd(tmp_path: Path) -> None:
    path = save(tmp_path, 1, weights())
    (path / CHUNKS).write_bytes(b"x")
    assert verify_checkpoint(path).warnings == (f"{path.name}/{CHUNKS} is no part of the checkpoint",)


LARGE = 2**63 - 1


def put(column: str, row: int, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda numbers: numbers[column].__setitem__(row, value)


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a negative tensor": (put("tensor", 0, -1), "tensor that is not listed"),
    "a tensor too many": (put("tensor", 4, 3), "tensor that is not listed"),
    "a negative file": (put("file", 0, -1), "file that is not listed"),
    "a file too many": (put("file", 4, 4), "file that is not listed"),
    "two in one file": (put("file", 2, 0), "two in one file"),
    "not in order": (lambda n: [n[c].__setitem__([1, 2], n[c][[2, 1]]) for c in n], "not in order"),
    "a negative offset": (put("offset", 1, (-1, 0)), "w: piece .* is not inside"),
    "no size": (put("size", 1, (0, 1)), "w: piece .* is not inside"),
    "a negative size": (put("size", 1, (-(2**63), 1)), "w: piece .* is not inside"),
    "an end beyond numbers": (put("offset", 1, (LARGE, LARGE)), "w: piece .* is not inside"),
    "a size beyond numbers": (put("size", 1, (LARGE, LARGE)), "w: piece .* is not inside"),
    "a hole": (put("size", 4, (3, 3)), "w: 21 of its 24 elements"),
    "an overlap": (put("offset", 4, (1, 1)), "w: pieces .* overlap"),
    "a scalar with dims": (put("size", 0, (1, 2)), "scalar: "),
    "a row less": (lambda n: [n.__setitem__(c, n[c][:-1]) for c in list(n)], "w: "),
}


@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_columns_are_rejected_in_one_line(tmp_path: Path, forgery: str) -> None:
    path = save_pieces(tmp_path, 1, state_of_four())
    edit, why = FORGERIES[forgery]
    edit_columns(path, edit)
    with pytest.raises(CorruptFileError, match=f"{CHUNKS}: damaged chunks, .*{why}") as caught:
        read_manifest(path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize(
    "edit",
    [
        lambda body: body.pop("chunks"),
        lambda body: body.update(chunks=[]),
        lambda body: body["chunks"].update(bytes=2**62),
        lambda body: body["chunks"].update(bytes=(1 << 30) + 40),
        lambda body: body["chunks"].update(bytes=41),
        lambda body: body["chunks"].update(bytes=-40),
        lambda body: body["chunks"].update(digest="md5:0"),
        lambda body: body["tensors"]["w"].update(shape=[1] * 40),
    ],
)
def test_malformed_description_of_the_columns_is_rejected_unread(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any]
) -> None:
    path = save_pieces(tmp_path, 1, state_of_four())
    edit_manifest(path, edit)
    (path / CHUNKS).unlink()
    for read in (read_manifest, read_summary):
        with pytest.raises(CorruptFileError, match=f"{MANIFEST}: damaged manifest"):
            read(path)


@pytest.mark.usefixtures("lowered")
@pytest.mark.parametrize("size", [2**20, 2**62])
def test_a_file_too_small_for_its_chunks_is_rejected(tmp_path: Path, size: int) -> None:
    path = save(tmp_path, 1, {"w": torch.zeros(6, 4)})
    edit_columns(path, put("size", 0, (size, size)))
    edit_manifest(path, lambda body: body["tensors"]["w"].update(shape=[size, size]))
    with pytest.raises(CorruptFileError, match=f"{CHUNKS}: .* cannot hold"):
        read_manifest(path)


numbers = st.integers(0, 3)
piece = st.tuples(
    st.integers(0, 1), st.tuples(numbers, numbers, numbers), st.tuples(numbers, numbers, numbers)
)
SHAPES = [(3, 2, 2), (2, 3)]


@settings(deadline=None, max_examples=300)
@given(
    found=st.lists(piece, max_size=4), grids=st.lists(st.lists(numbers, max_size=2), min_size=3, max_size=3)
)
def test_the_check_of_all_tensors_agrees_with_that_of_each(found: list[Any], grids: list[list[int]]) -> None:
    tiled = [
        p.region
        for p in pieces(
            torch.zeros(SHAPES[0]),
            [sorted(min(n, full) for n in g) for g, full in zip(grids, SHAPES[0], strict=True)],
        )
        if p.region.volume
    ]
    pieces_of: list[list[Region]] = [list(tiled), [Region((0, 0), (2, 3))]]
    for number, offset, size in found:
        dims = len(SHAPES[number])
        pieces_of[number].append(Region(offset[:dims], size[:dims]))
    chunks = [[Chunk(str(i), r) for i, r in enumerate(mine)] for mine in pieces_of]
    files = [str(i) for i in range(100)]
    content = encode_columns(SHAPES, chunks, sorted(files))
    columns = decode_columns(content, SHAPES, len(content) // 56, len(files))
    whole = [tiling_problem(shape, mine) is None for shape, mine in zip(SHAPES, pieces_of, strict=True)]
    assert (columns_problem(columns, ["a", "b"]) is None) == all(whole)


def test_a_tensor_cut_along_many_dims_is_rejected() -> None:
    chunks = [[Chunk(str(i), p.region) for i, p in enumerate(pieces(torch.empty(2, 2, 2, 2, 2), [[1]] * 5))]]
    content = encode_columns([(2,) * 5], chunks, sorted(chunk.file for chunk in chunks[0]))
    columns = decode_columns(content, [(2,) * 5], 32, 32)
    assert "5 dims, 4 is the limit" in str(columns_problem(columns, ["w"]))


def declared(ranks: int) -> list[bytes]:
    """The declarations of ranks that hold equal rows of three tensors."""
    full = torch.empty(ranks, 2, device="meta")
    return [
        declare_shards({name: Shard(full[r : r + 1], (ranks, 2), (r, 0)) for name in "abc"}, 1, 1)
        for r in range(ranks)
    ]


def test_the_work_of_a_save_is_linear_in_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: numbers that pass through the hash, tables parsed, chunk objects made."""
    mix, loads, make = columns_module.mix, json.loads, Chunk.__init__
    counts: list[dict[str, int]] = []

    def counted(what: str, size: Callable[..., int], function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            counts[-1][what] += size(*args)
            return function(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(columns_module, "mix", counted("hashed", len, mix))
    monkeypatch.setattr(Chunk, "__init__", counted("chunks", lambda *_: 1, make))
    fake = SimpleNamespace(loads=counted("parsed", lambda *_: 1, loads), dumps=json.dumps)
    monkeypatch.setattr("mlm.checkpoint.native.declaration.json", fake)
    for ranks in (64, 128, 256):
        counts.append({"hashed": 0, "chunks": 0, "parsed": 0})
        merge_declared(tmp_path, declared(ranks))
    assert [c["parsed"] for c in counts] == [1, 1, 1]
    assert [c["chunks"] for c in counts] == [0, 0, 0]
    hashed = [c["hashed"] for c in counts]
    assert hashed[2] - hashed[1] == 2 * (hashed[1] - hashed[0])


def test_a_load_makes_objects_only_of_the_chunks_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_module, "MOST_LISTED", -1)
    full = torch.randn(64, 2)
    path = save_pieces(tmp_path, 1, [{"w": p} for p in pieces(full, [range(1, 64)])])
    made, make = [], Chunk.__init__

    def count(*args: Any) -> None:
        made.append(1)
        make(*args)

    monkeypatch.setattr(Chunk, "__init__", count)
    manifest = read_manifest(path)
    readings = plan_reading(manifest, {"w": Shard(torch.zeros(3, 2), (64, 2), (10, 0))})
    assert (len(made), len(readings)) == (3, 3)
    assert isinstance(manifest.tensors["w"].chunks, Chunks)


def test_more_chunks_than_columns_may_hold_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_module, "MOST_LISTED", 2)
    monkeypatch.setattr(format_module, "MAX_CHUNKS_BYTES", 100)
    with pytest.raises(ValueError, match="4 chunks need 160 bytes, 100 is the limit"):
        save_pieces(tmp_path, 1, [{"w": p} for p in pieces(weights()["w"], [[2], [1]])])


@pytest.mark.usefixtures("lowered")
def test_a_streamed_checkpoint_in_columns_is_written_once_and_damage_to_it_is_found(tmp_path: Path) -> None:
    path = write(tmp_path)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    assert (verify_checkpoint(path).whole, CHUNKS in before) == (True, True)
    write(tmp_path)
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()} == before
    (path / CHUNKS).unlink()
    with pytest.raises(UserError, match="another checkpoint is there"):
        write(tmp_path)
