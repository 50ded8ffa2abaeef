"""Slices of parameters that a rank holds, at any split over tp and dp."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from mlm.checkpoint.native.slices import Region
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import DP_SLICES, DataParallelSlice, ParameterShard, load_full, parameter_shards
from tests.checkpoint.native.helpers import tiling_of

VOCAB, PADDED, HIDDEN = 13, 24, 12


def model_of(tp: Axis) -> nn.Module:
    return nn.ModuleDict(
        {
            "token": VocabParallelEmbedding(VOCAB, PADDED, HIDDEN, tp=tp),
            "up": ColumnParallelLinear(HIDDEN, 8, tp=tp),
            "down": RowParallelLinear(8, HIDDEN, tp=tp),
            "norm": nn.LayerNorm(HIDDEN),
        }
    )


def cut(model: nn.Module, dp: Axis) -> nn.Module:
    """Keep this dp rank's rows of every parameter, as sharded.py does with FSDP2."""
    for module in model.modules():
        slices = {}
        for name, p in module.named_parameters(recurse=False):
            rows = p.detach().chunk(dp.size)
            first = sum(len(r) for r in rows[: dp.rank])
            mine = rows[dp.rank] if dp.rank < len(rows) else p.detach()[:0]
            slices[name] = DataParallelSlice(nn.Parameter(mine.clone()), tuple(p.shape), first, dp)
        setattr(module, DP_SLICES, slices)
    return model


def all_ranks(tp: int, dp: int) -> Iterator[list[ParameterShard]]:
    """The shards of each rank; of one that is not cut over dp for dp=1."""
    for t in range(tp):
        for d in range(dp):
            axis = Axis("tp", t, tp)
            model = model_of(axis)
            yield list(parameter_shards(cut(model, Axis("dp", d, dp)) if dp > 1 else model, axis))


@pytest.mark.parametrize("dp", [1, 5, 16])
@pytest.mark.parametrize("tp", [1, 4])
def test_the_owners_rectangles_tile_every_parameter(tp: int, dp: int) -> None:
    """Padding left out; at dp=16 some ranks hold no row of some, at tp=4 some hold padding alone."""
    shapes = {s.name: s.global_shape for s in parameter_shards(model_of(Axis("tp")), Axis("tp"))}
    assert shapes["token.weight"] == (VOCAB, HIDDEN)
    pieces: dict[str, list[Region]] = {name: [] for name in shapes}
    for shards in all_ranks(tp, dp):
        for s in shards:
            assert s.global_shape == shapes[s.name]
            piece = Region(s.offset, tuple(s.without_padding(s.parameter).shape))
            assert piece.fits(shapes[s.name])
            if s.is_owner and piece.volume:
                pieces[s.name].append(piece)
    assert {name: tiling_of(shapes[name], found) for name, found in pieces.items()} == dict.fromkeys(shapes)


@pytest.mark.parametrize(("tp", "dp"), [(2, 3), (4, 2)])
def test_load_full_fills_each_rank_with_its_region(tp: int, dp: int) -> None:
    torch.manual_seed(0)
    one = list(parameter_shards(model_of(Axis("tp")), Axis("tp")))
    whole = {s.name: torch.randn(s.global_shape) for s in one}
    rebuilt = {name: torch.zeros_like(x) for name, x in whole.items()}
    for t in range(tp):
        for d in range(dp):
            axis = Axis("tp", t, tp)
            model = cut(model_of(axis), Axis("dp", d, dp))
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, torch.nan)
            load_full(model, whole, axis)
            for s in parameter_shards(model, axis):
                x = s.without_padding(s.parameter.detach())
                where = tuple(slice(o, o + n) for o, n in zip(s.offset, x.shape, strict=True))
                rebuilt[s.name][where] = x
                padding = s.parameter.numel() - x.numel()
                assert (s.parameter == 0).sum() >= padding
    for name, x in whole.items():
        assert torch.equal(rebuilt[name], x), name


class SharedHeads(nn.Module):
    """Rows of which two neighbouring ranks hold the same part, and columns beside padded rows."""

    tp_dims = {"weight": 0, "columns": 1}  # noqa: RUF012
    replicas = 2
    true_rows = 5

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))
        self.columns = nn.Parameter(torch.zeros(3, 4))
        self.bias = nn.Parameter(torch.zeros(3))


def test_neighbours_that_hold_the_same_part_count_it_once() -> None:
    """Two parts of three rows over tp=4, the sixth row being padding; what is not split has one owner."""
    shards = [list(parameter_shards(SharedHeads(), Axis("tp", rank, 4))) for rank in range(4)]
    weights, columns, biases = zip(*shards, strict=True)
    assert [s.offset for s in weights] == [(0, 0), (0, 0), (3, 0), (3, 0)]
    assert {s.global_shape for s in weights} == {(5, 4)}
    assert [len(s.without_padding(s.parameter)) for s in weights] == [3, 3, 2, 2]
    assert [s.is_owner for s in weights] == [True, False, True, False]
    assert [s.offset for s in columns] == [(0, 0), (0, 0), (0, 4), (0, 4)]
    assert {s.global_shape for s in columns} == {(3, 8)}  # true_rows is of rows
    assert [s.is_owner for s in biases] == [True, False, False, False]
