"""Mapping of parameters to the tensors of other libraries: names, order of rows, and slices.

A `Location` converts a parameter in both directions. Each format (safetensors, DCP, files of ranks, GGUF)
reads and writes the tensors themselves.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mlm.checkpoint.native.format import JSON, TensorEntry
from mlm.checkpoint.native.slices import Read, Region
from mlm.models.config import ModelConfig
from mlm.util.errors import CorruptFileError
from mlm.util.terminal import Advance, one_line

Shape = tuple[int, ...]
MXFP4_BLOCK = 32
"""Numbers that share a scale; each byte holds two."""


class ExpertRows(NamedTuple):
    """Order of a tensor that holds a weight or bias of all experts, along dim 0."""

    parts: int = 1
    """Matrices in the rows of one expert: 2 for gates and inputs."""
    interleaves: bool = False
    """True if rows of the parts alternate, false if the parts are stacked."""
    transposed: bool = False
    """True for a weight that is stored [in, out]."""
    is_mxfp4: bool = False
    """True if stored as two tensors, blocks and scales (`dequantise_mxfp4`)."""

    def from_stored(self, value: Tensor) -> Tensor:
        """[E, rows, …] or [E, …, rows], as stored -> [E, (parts,) rows, …]."""
        value = value.transpose(1, 2) if self.transposed else value
        if self.parts == 1:
            return value
        sizes = (-1, self.parts) if self.interleaves else (self.parts, -1)
        parts = value.unflatten(1, sizes)
        return parts.transpose(1, 2) if self.interleaves else parts

    def to_stored(self, value: Tensor) -> Tensor:
        if self.parts > 1:
            value = (value.transpose(1, 2) if self.interleaves else value).flatten(1, 2)
        return value.transpose(1, 2) if self.transposed else value

    def shapes(self, shape: Shape) -> list[Shape]:
        """Return the shape of each stored tensor."""
        count, *sizes = shape
        rows = [sizes[0] * sizes[1], *sizes[2:]] if self.parts > 1 else sizes
        if self.is_mxfp4:
            scales = (count, rows[0], rows[1] // MXFP4_BLOCK)
            return [(*scales, MXFP4_BLOCK // 2), scales]
        return [(count, *(rows[::-1] if self.transposed else rows))]


@dataclass(frozen=True)
class Location:
    """Names and layout of the tensors that store a parameter, or of the section of one."""

    names: tuple[str, ...]
    """Names of the tensors, in `transformers` without the base model's prefix. Several (query, key, value)
    are equal in size and concatenated along dim 0."""
    transposed: bool = False
    """True if stored [in, out]; parameters are [out, in]."""
    num_heads: int | None = None
    """Heads of a fused qkv, stored as [q, k, v][head], in a parameter [head][q, k, v]; blocks of other fused
    weights; None for other weights."""
    parts: int = 3
    """Number of fused weights, if `num_heads` is set: q, k and v."""
    rows: tuple[int, ...] = ()
    """Stored row of each row of a block of this many; () for the same order. Blocks of a fused weight hold
    all its parts."""
    section: tuple[int, int, int] | None = None
    """First row, row after the last, and all rows of each block, in a tensor of several parameters; None for
    a tensor of one parameter."""
    blocks: int = 1
    """Blocks of a tensor of several parameters; each holds a section of every parameter."""
    stacked: tuple[int, ...] = ()
    """Leading dims of the parameter over which single tensors are stacked, such as experts."""
    experts: ExpertRows | None = None
    """Row order of one tensor with all experts; None for other parameters."""
    is_row: bool = False
    """True for a vector that is stored as a matrix of one row."""

    @property
    def is_plain(self) -> bool:
        """True if stored like the parameter."""
        return self == Location(self.names) and len(self.names) == 1

    @property
    def is_mxfp4(self) -> bool:
        return self.experts is not None and self.experts.is_mxfp4

    @property
    def indices(self) -> list[tuple[int, ...]]:
        """Index of each tensor in the stack."""
        return list(product(*map(range, self.stacked)))

    def shapes(self, shape: Shape) -> list[Shape]:
        """Return the shape of each stored tensor of a parameter of `shape`."""
        if self.experts is not None:
            return self.experts.shapes(shape)
        if self.is_row:
            return [(1, *shape)]
        stored_shape = shape[::-1] if self.transposed else shape[len(self.stacked) :]
        if self.section is not None:
            stored_shape = (self.blocks * self.section[2], *stored_shape[1:])
        elif not self.stacked:
            stored_shape = (stored_shape[0] // len(self.names), *stored_shape[1:])
        return [stored_shape] * len(self.names)

    def from_stored(self, values: Sequence[Tensor]) -> Tensor:
        """Convert stored tensors to the parameter, as a view where possible."""
        if self.experts is not None:
            return self.experts.from_stored(dequantise_mxfp4(*values) if self.experts.is_mxfp4 else values[0])
        if self.is_row:
            return values[0][0]
        if self.stacked:
            return torch.stack(list(values)).view(*self.stacked, *values[0].shape)
        value = values[0] if len(values) == 1 else torch.cat(list(values))
        del values  # a large tensor is then in memory at most twice
        if self.section is not None:
            value = self.section_of(value).flatten(0, 1)
        value = value.t() if self.transposed else value
        value = value if self.num_heads is None else _swap(value, self.parts, self.num_heads)
        if self.rows:
            value = value.unflatten(0, (-1, len(self.rows)))[:, list(self.rows)].flatten(0, 1)
        return value

    def to_stored(self, value: Tensor) -> tuple[Tensor, ...]:
        """Convert the parameter to stored tensors, or to its section of one: the inverse of `from_stored`."""
        if self.experts is not None:
            return (self.experts.to_stored(value),)
        if self.is_row:
            return (value.unsqueeze(0),)
        if self.stacked:
            return value.flatten(0, len(self.stacked) - 1).unbind()
        if self.rows:
            order = sorted(range(len(self.rows)), key=self.rows.__getitem__)
            value = value.unflatten(0, (-1, len(self.rows)))[:, order].flatten(0, 1)
        value = value if self.num_heads is None else _swap(value, self.num_heads, self.parts)
        value = value.t() if self.transposed else value
        return value.chunk(len(self.names))

    def section_of(self, stored: Tensor) -> Tensor:
        """Return the rows of the section in each block, [block, row, …]."""
        assert self.section is not None
        return stored.unflatten(0, (self.blocks, -1))[:, self.section[0] : self.section[1]]

    def read(self, shape: Shape, region: Region, load: Read) -> Tensor:
        """Return elements of a parameter of `shape`, float32; `load` returns elements of stored tensors.

        A plain tensor is read in part; others are in memory in full, at most twice. Experts are read one by
        one.
        """
        if self.is_plain:
            return load(self.names[0], region)
        shapes = self.shapes(shape)
        if self.experts is not None:
            target, inner = torch.empty(region.size), Region(region.offset[1:], region.size[1:])
            for number, part in enumerate(target, start=region.offset[0]):
                pieces = [Region((number, *(0 for _ in stored[1:])), (1, *stored[1:])) for stored in shapes]
                full = self.from_stored(list(map(load, self.names, pieces)))[0]
                part.copy_(full[inner.within(Region.full(full.shape))])
            return target
        if not self.stacked:
            full = self.from_stored([load(name, Region.full(shapes[0])) for name in self.names])
            return full[region.within(Region.full(shape))]
        target, depth = torch.empty(region.size), len(self.stacked)
        inner = Region(region.offset[depth:], region.size[depth:])
        for index, name in zip(self.indices, self.names, strict=True):
            position = tuple(n - first for n, first in zip(index, region.offset, strict=False))
            if all(0 <= n < size for n, size in zip(position, region.size, strict=False)):
                target[position].copy_(load(name, inner))
        return target


class ForeignTensor(NamedTuple):
    """A tensor to write, with another library's name and shape."""

    name: str
    shape: Shape
    sources: tuple[tuple[str, Shape, Location], ...]
    """(name, shape, location) of each parameter that it stores, or stores a part of."""
    part: int
    """Number among the tensors of the parameter."""

    def compute(self, load: Read) -> Tensor:
        """Return the tensor, float32, from parameters by `load`; of stacked tensors only this one is read."""
        parameter, shape, location = self.sources[0]
        if location.stacked:
            index = location.indices[self.part]
            region = Region((*index, *(0 for _ in self.shape)), (*(1 for _ in index), *self.shape))
            return load(parameter, region).view(self.shape)
        if location.section is None:
            return location.to_stored(load(parameter, Region.full(shape)))[self.part]
        target = torch.empty(self.shape)
        for parameter, shape, location in self.sources:
            rows = location.section_of(target)
            rows.copy_(location.to_stored(load(parameter, Region.full(shape)))[0].view_as(rows))
        return target


def foreign_tensors(
    locations: Iterable[tuple[str, Location]],
    parameters: Mapping[str, TensorEntry],
    rename: Callable[[str], str] = lambda name: name,
) -> dict[str, ForeignTensor]:
    """Return the tensors that store parameters, by name after `rename`, in the order of locations."""
    stored = dict[str, ForeignTensor]()
    for parameter, location in locations:
        shape = parameters[parameter].shape
        for part, (name, size) in enumerate(zip(location.names, location.shapes(shape), strict=True)):
            stored_name = rename(name)
            tensor = stored.get(stored_name, ForeignTensor(stored_name, size, (), part))
            stored[stored_name] = tensor._replace(sources=(*tensor.sources, (parameter, shape, location)))
    return stored


class CheckpointFiles(Protocol):
    @property
    def num_bytes(self) -> int: ...

    def verify(self, progress: Advance) -> dict[str, str]:
        """Compare the content with its checksums; return the digest of each file by its name."""


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A model in another library's files, opened; tensors are read on demand."""

    format: str
    path: Path
    model: ModelConfig
    files: CheckpointFiles
    locations: Mapping[str, Location]
    shapes: Mapping[str, Shape]
    """Shapes of the parameters, with the padding of a token table that is stored padded."""
    load: Read
    """Returns elements of a stored tensor, float32 on the CPU."""
    origin: Mapping[str, JSON] = field(default_factory=dict)
    token_ids: Mapping[str, JSON] = field(default_factory=dict)
    """Ids of bos, eos and pad that the files declare, by their key in config.json."""
    filled: frozenset[str] = frozenset()
    """Parameters that the files lack, which take initial values."""
    zeros: frozenset[str] = frozenset()
    """Parameters that the files lack, which are zero."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, one line each."""

    def read(self, name: str, region: Region) -> Tensor:
        """Return elements of a parameter. Raises CorruptFileError if some are not finite."""
        if name in self.zeros:
            return torch.zeros(region.size)
        value = self.locations[name].read(self.shapes[name], region, self.load)
        if value.numel() and not torch.stack(value.aminmax()).isfinite().all():
            raise CorruptFileError(f"{self.path}: {name} is not finite everywhere: take another iteration")
        return value.contiguous()


def check_shapes(path: Path, stored: Mapping[str, Shape], expected: Mapping[str, Shape], fix: str) -> None:
    """Raise CorruptFileError for a tensor of another shape, a missing or an unexpected one."""
    for name in [*expected, *sorted(stored.keys() - expected.keys())]:
        actual = list(stored[name]) if name in stored else "missing"
        required = list(expected[name]) if name in expected else "none"
        if actual != required:
            raise CorruptFileError(f"{path}: {one_line(name)} is {actual}, {required} is needed: {fix}")


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise weights in MXFP4, the format of gpt-oss's experts.

    The numbers of a block share a scale, a power of two (OCP Microscaling Formats 1.0, section 5.3): an 8-bit
    exponent, biased by 127, where 255 is NaN. The numbers have 4 bits, E2M1, the first in the lower half of a
    byte.

    Shapes (R rows, G blocks of a row): bytes [..., R, G, 16] and exponents [..., R, G], both uint8, ->
    float32 [..., R, 32 G].
    """
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.cat([magnitudes, -magnitudes])
    pairs = torch.stack([codes.repeat(16), codes.repeat_interleave(16)], -1)  # [256, 2]: lower half, upper
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).float()
    powers[255] = torch.nan
    numbers = pairs[blocks.long()].flatten(-2)  # [..., R, G, 32]
    return numbers.mul_(powers[scales.long()].unsqueeze(-1)).flatten(-2)


def _swap(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Reorder rows [outer][inner][…] as [inner][outer][…]."""
    return rows.reshape(outer, inner, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def weight_and_bias(
    module: str, *stored_modules: str, transposed: bool = False, num_heads: int | None = None
) -> Iterator[tuple[str, Location]]:
    for part in ("weight", "bias"):
        names = tuple(f"{stored}.{part}" for stored in stored_modules)
        yield f"{module}.{part}", Location(names, transposed and part == "weight", num_heads)
