"""The chunks of a checkpoint, kept in columns: whole, forged, and of many ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.checkpoint.native import declaration
from mlm.checkpoint.native.columns import (
    Chunk,
    Chunks,
    columns_of,
    decode_columns,
    encode_columns,
    tiling_problem,
)
from mlm.checkpoint.native.declaration import declare_shards, merge_declared
from mlm.checkpoint.native.format import CheckpointError, read_manifest
from mlm.checkpoint.native.reader import plan_reading
from mlm.checkpoint.native.slices import Region, TensorShard
from mlm.util.errors import CorruptFileError
from tests.checkpoint.native.helpers import edit_chunks, edit_manifest, pieces, save, save_pieces

LARGE = 2**63 - 1


def put(column: str, row: int, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda numbers: numbers[column].__setitem__(row, value)


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a negative tensor": (put("tensor", 0, -1), "tensor that is not listed"),
    "a file too many": (put("file", 4, 4), "file that is not listed"),
    "a negative offset": (put("offset", 1, (-1, 0)), "w: piece .* is not inside"),
    "two in one file": (put("file", 2, 0), "two in one file"),
    "not in order": (lambda n: [n[c].__setitem__([1, 2], n[c][[2, 1]]) for c in n], "not in order"),
    "a hole": (put("size", 4, (3, 3)), "w: its 4 pieces hold 21 of 24 elements: there is a hole"),
    "an overlap": (put("offset", 4, (1, 1)), "w: its 4 pieces .* overlap"),
    "a scalar with dims": (put("size", 0, (1, 2)), "a chunk has more dims than its tensor"),
    "a row less": (lambda n: [n.__setitem__(c, n[c][:-1]) for c in list(n)], "w: "),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_columns_are_rejected_in_one_line(tmp_path: Path, forgery: str) -> None:
    # A matrix in 2 x 2 pieces; the first rank has a scalar, the last a tensor of no elements.
    ranks = [{"w": piece} for piece in pieces(torch.arange(24.0).view(6, 4), [[2], [1]])]
    ranks[0]["scalar"] = TensorShard.full(torch.tensor(1.0))
    ranks[3]["empty"] = TensorShard.full(torch.zeros(0, 3))
    path = save_pieces(tmp_path, 1, ranks)
    edit, why = FORGERIES[forgery]
    edit_chunks(path, edit)
    with pytest.raises(CorruptFileError, match=f"damaged manifest, .*{why}") as caught:
        read_manifest(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [2**20, 2**62])
def test_a_file_too_small_for_its_chunks_is_rejected(tmp_path: Path, size: int) -> None:
    path = save(tmp_path, 1, {"w": torch.zeros(6, 4)})
    edit_chunks(path, put("size", 0, (size, size)))
    edit_manifest(path, lambda body: body["tensors"]["w"].update(shape=[size, size]))
    with pytest.raises(CorruptFileError, match="cannot hold"):
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
def test_the_check_of_all_tensors_agrees_with_counts(found: list[Any], grids: list[list[int]]) -> None:
    edges = [sorted(min(n, full) for n in grid) for grid, full in zip(grids, SHAPES[0], strict=True)]
    tiled = [part.region for part in pieces(torch.zeros(SHAPES[0]), edges) if part.region.volume]
    pieces_of = [tiled, [Region((0, 0), (2, 3))]]
    for number, offset, size in found:
        dims = len(SHAPES[number])
        pieces_of[number].append(Region(offset[:dims], size[:dims]))
    chunks = [[Chunk(str(i), r) for i, r in enumerate(mine)] for mine in pieces_of]
    files = [str(i) for i in range(100)]
    content = encode_columns(columns_of(SHAPES, chunks, sorted(files)))
    columns = decode_columns(content, SHAPES, len(files))
    for shape, regions, chunks in zip(SHAPES, pieces_of, columns.by_tensor(files), strict=True):
        count = torch.zeros(shape, dtype=torch.int64)
        are_inside = all(region.volume and region.fits(shape) for region in regions)
        for region in regions if are_inside else ():
            count[region.within(Region.full(shape))] += 1
        assert (tiling_problem(shape, chunks) is None) == (are_inside and bool((count == 1).all()))


def test_a_save_makes_no_object_of_a_chunk(tmp_path: Path) -> None:
    """Of ranks that hold equal rows of three tensors; their equal tables are parsed once."""
    ranks = 64
    full = torch.empty(ranks, 2, device="meta")
    declared = [
        declare_shards({name: TensorShard(full[r : r + 1], (ranks, 2), (r, 0)) for name in "abc"}, 1, 1)
        for r in range(ranks)
    ]
    with pytest.raises(CheckpointError, match="ranks save different steps: 2 and 1"):
        declare_shards({}, 2, 1)
    with (
        mock.patch.object(Chunk, "__init__", autospec=True) as make,
        mock.patch.object(declaration.json, "loads", side_effect=json.loads) as loads,
    ):
        merge_declared(tmp_path, declared)
    assert (make.call_count, loads.call_count) == (0, 1)


def test_a_load_makes_objects_only_of_the_chunks_it_reads(tmp_path: Path) -> None:
    full = torch.randn(64, 2)
    path = save_pieces(tmp_path, 1, [{"w": p} for p in pieces(full, [range(1, 64)])])
    with mock.patch.object(Chunk, "__init__", autospec=True, side_effect=Chunk.__init__) as make:
        manifest = read_manifest(path)
        readings = plan_reading(manifest, {"w": TensorShard(torch.zeros(3, 2), (64, 2), (10, 0))})
    assert (make.call_count, len(readings)) == (3, 3)
    assert isinstance(manifest.tensors["w"].chunks, Chunks)
