"""A saved state is loaded bit for bit, at any layout, or not at all."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mlm.checkpoint.native import reader, shard_file
from mlm.checkpoint.native.format import DTYPES, MANIFEST
from mlm.checkpoint.native.save_load import CheckpointError, TensorShard, load_checkpoint
from mlm.util.errors import CorruptFileError, UserError
from tests.checkpoint.native.helpers import load, pieces, save, save_pieces, weights


def blank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits at all, NaNs included."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    size = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)
    return torch.where(bits.isfinite(), bits, 1) if dtype.is_floating_point else bits


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 1, 3)])
def test_tensor_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = {"x": random_bits(dtype, *shape), "odd": random_bits(torch.uint8, 3)}
    loaded = blank(tensors)
    load(save(tmp_path, 1, tensors), loaded)
    for name, tensor in tensors.items():
        bits = (x.contiguous().view(-1).view(torch.uint8) for x in (loaded[name], tensor))
        assert torch.equal(*bits)


def test_views_of_one_storage_are_saved_and_filled(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tensors = {"t": base.t(), "tied": base, "column": base[:, 1], "every_other": base[::2, ::2]}
    target = torch.zeros(4, 3).t()  # filled through its strides too
    loaded = blank(tensors) | {"tied": target}
    load(save(tmp_path, 1, tensors), loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_tensor_larger_than_a_read_block_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BLOCK", 40)  # two rows of four float32 and a bit
    monkeypatch.setattr(shard_file, "CHUNK", 7)
    tensors = {"w": torch.randn(9, 4), "wide": torch.randn(2, 50), "scalar": torch.tensor(3.0)}
    loaded = blank(tensors)
    load(save(tmp_path, 1, tensors), loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


cuts = st.lists(st.lists(st.integers(0, 5), max_size=2).map(sorted), min_size=2, max_size=2)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=cuts, after=cuts, seed=st.integers(0, 999))
def test_any_cut_loads_into_any_cut(before: list[list[int]], after: list[list[int]], seed: int) -> None:
    """Rows and columns cut in up to 3 × 3 pieces, empty ones included, one per rank."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(5, 5, generator=generator)
    with TemporaryDirectory() as folder:
        path = save_pieces(Path(folder), 1, [{"x": piece} for piece in pieces(full, before)])
        loaded = torch.full_like(full, torch.nan)
        for piece in pieces(loaded, after):
            load_checkpoint(path, {"x": piece})
    assert torch.equal(loaded, full)


def test_pieces_that_leave_a_hole_are_not_saved(tmp_path: Path) -> None:
    first, _, last = pieces(weights()["w"], [[2, 4]])
    with pytest.raises(CheckpointError, match="w: its 2 pieces hold 16 of 24 elements: there is a hole"):
        save_pieces(tmp_path, 1, [{"w": first}, {"w": last}])


@pytest.mark.parametrize("other", [torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4)])
def test_ranks_that_disagree_on_a_tensor_are_not_saved(tmp_path: Path, other: Tensor) -> None:
    mine = TensorShard(torch.zeros(4, 4), (6, 4), (0, 0))
    theirs = TensorShard(other, (6 + (other.dtype == torch.float32), 4), (4, 0))
    with pytest.raises(CheckpointError, match=r"w is .* on rank 1"):
        save_pieces(tmp_path, 1, [{"w": mine}, {"w": theirs}])


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", MANIFEST])
def test_flipped_bit_anywhere_in_a_file_is_rejected(tmp_path: Path, name: str) -> None:
    path = save_pieces(tmp_path, 1, [{"w": piece} for piece in pieces(weights()["w"], [[2]])])
    content = (path / name).read_bytes()
    for place in range(0, len(content), 5):
        (path / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        target = {"w": torch.zeros(6, 4)}
        with pytest.raises(CorruptFileError) as caught:
            load(path, target)
        assert name in str(caught.value)
        assert set(target["w"].unique().tolist()) <= {0.0, 1.0}, "a damaged byte reached a tensor"


def test_checkpoint_of_another_model_names_shapes_and_settings(tmp_path: Path) -> None:
    there = {"config": {"model": {"hidden_size": 4, "num_layers": 1}}}
    path = save(tmp_path, 1, weights(), state=there)
    here = {"w": torch.zeros(6, 8), "b": torch.zeros(3)}
    with pytest.raises(UserError) as caught:
        load(path, here, config={"model": {"hidden_size": 8, "num_layers": 1}})
    assert "checkpoint of another model: w has shape [6, 8] here, [6, 4] there" in str(caught.value)
    assert "; model.hidden_size is 8 here, 4 there." in str(caught.value)
    assert "\n" not in str(caught.value)


ONE = {"w": torch.full((2,), 1e6)}
HALF = {"w": torch.zeros(2).half()}


@pytest.mark.parametrize(
    ("saved", "wanted", "cast", "why"),
    [
        (weights(), weights() | {"new": torch.zeros(1)}, False, "new is not in it"),
        (weights(), {"w": torch.zeros(6, 4)}, False, "b is in it, not here"),
        ({f"x{i}": torch.zeros(1) for i in range(9)}, {}, False, "x2 is in it, not here; and 6 more"),
        (ONE, HALF, False, "another precision: w is torch.float16 here, torch.float32 there"),
        (ONE, {"w": torch.ones(2, dtype=torch.int64)}, True, "another precision"),
        (ONE, HALF, True, "too large for torch.float16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_rejected(
    tmp_path: Path, saved: dict[str, Tensor], wanted: dict[str, Tensor], cast: bool, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        load(save(tmp_path, 1, saved), blank(wanted), cast=cast)
