"""Differences of two checkpoints equal PyTorch's comparison of whole tensors, however they are sharded."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mlm.checkpoint.native import compare
from mlm.checkpoint.native.compare import (
    CheckpointComparison,
    FormDifference,
    TensorDifference,
    compare_checkpoints,
)
from mlm.checkpoint.native.format import DTYPES
from tests.checkpoint.native.helpers import (
    pieces,
    save,
    save_pieces,
    save_unchecked,
    weights,
)

SHARD = "rank-00000.safetensors"


def compared(folder: Path, first: dict[str, Tensor], second: dict[str, Tensor]) -> CheckpointComparison:
    one, other = (save_unchecked(folder / name, 1, x) for name, x in (("first", first), ("second", second)))
    return compare_checkpoints(one, other)


def difference(folder: Path, first: Tensor, second: Tensor) -> TensorDifference:
    (only,) = compared(folder, {"x": first}, {"x": second}).tensors
    return only


cuts = st.lists(st.lists(st.integers(0, 7), max_size=2).map(sorted), min_size=2, max_size=2)


@settings(deadline=None, max_examples=20)
@given(first=cuts, second=cuts, block=st.integers(1, 200), seed=st.integers(0, 999))
def test_figures_are_those_of_the_whole_tensors(
    first: list[list[int]], second: list[list[int]], block: int, seed: int
) -> None:
    """Cut in up to 3 × 3 pieces by each, read in blocks of any size; a third of the elements differ."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(7, 7, generator=generator)
    b = torch.where(torch.rand(7, 7, generator=generator) < 0.3, torch.randn(7, 7, generator=generator), a)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "BLOCK", block)
        one = save_pieces(Path(folder, "a"), 1, [{"x": piece} for piece in pieces(a, first)])
        two = save_pieces(Path(folder, "b"), 1, [{"x": piece} for piece in pieces(b, second)])
        (found,) = compare_checkpoints(one, two).tensors
    assert found.differing == int((a != b).sum())
    assert found.largest == float((a.double() - b.double()).abs().max())
    if found.differing:
        assert found.scale == float(torch.stack([a, b]).abs().max())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    x, y = torch.zeros(3, 2, 2, dtype=dtype), torch.zeros(3, 2, 2, dtype=dtype)
    y.view(-1)[-1] = 1
    assert difference(tmp_path, x, y) == TensorDifference("x", 1, x.numel(), largest=1.0, scale=1.0)
    assert compared(tmp_path / "same", {"x": y}, {"x": y}).equal


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([math.nan, math.inf, 1.0], [math.nan, math.inf, 1.0], (0, 0.0, 1.0, 0.0)),
        ([2.0, 3.0], [math.nan, 3.0], (1, math.inf, 3.0, math.inf)),
        ([2.0, 3.0], [-math.inf, 3.0], (1, math.inf, 3.0, math.inf)),
        ([0.0, 0.0], [-0.0, -0.0], (2, 0.0, 0.0, 0.0)),  # in bits alone
    ],
)
def test_bits_are_compared_where_numbers_say_nothing(
    tmp_path: Path, x: list[float], y: list[float], expected: tuple[float, ...]
) -> None:
    found = difference(tmp_path, torch.tensor(x), torch.tensor(y))
    assert (found.differing, found.largest, found.scale, found.relative) == expected


def test_tensors_of_one_side_and_other_forms_are_listed(tmp_path: Path) -> None:
    same = torch.ones(2)
    first = {"same": same, "gone": same, "shape": torch.ones(2, 3), "dtype": same}
    second = {"same": same, "new": same, "shape": torch.ones(3, 2), "dtype": same.bfloat16()}
    found = compared(tmp_path, first, second)
    assert (found.only_first, found.only_second) == (("gone",), ("new",))
    assert found.forms == (
        FormDifference("dtype", "F32 [2]", "BF16 [2]"),
        FormDifference("shape", "F32 [2, 3]", "F32 [3, 2]"),
    )
    assert [tensor.name for tensor in found.tensors] == ["same"]
    for one, other in (({}, first), (first, {})):
        assert not compared(tmp_path / str(len(one)), {"same": same} | one, {"same": same} | other).equal


def test_most_different_comes_first(tmp_path: Path) -> None:
    x = torch.tensor([100.0, 1.0])
    others = {"absolutely": x + 4.0, "relatively": torch.tensor([0.1, 0.3]), "not": x}
    first = {"absolutely": x, "relatively": torch.tensor([0.1, 0.1]), "not": x}
    found = compared(tmp_path, first, others)
    assert [tensor.name for tensor in found.differing] == ["relatively", "absolutely"]


def test_progress_adds_up_to_the_bytes_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "BLOCK", 30)
    one = save(tmp_path / "one", 1, weights() | {"here": torch.ones(9)})
    two = save(tmp_path / "two", 1, weights() | {"there": torch.ones(9)})
    announced, steps = list[int](), list[int]()

    @contextmanager
    def noting(_: str, total: int, **__: bool) -> Iterator[Callable[[int], None]]:
        announced.append(total)
        yield steps.append

    monkeypatch.setattr(compare, "progress_bar", noting)
    compare_checkpoints(one, two)
    assert announced == [sum(steps)] == [(24 + 3) * 4]
    assert max(steps) <= 30
