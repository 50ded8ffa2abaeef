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
"""Numbers that share a scale, two in a byte."""


class ExpertRows(NamedTuple):
    """Order of a tensor that holds a weight or bias of all experts, along dim 0."""

    parts: int = 1
    """Matrices in the rows of one expert: 2 of gates and inputs."""
    interleaves: bool = False
    """True if rows of the parts alternate, false if they follow each other."""
    transposed: bool = False
    """True for a weight that is stored [in, out]."""
    is_mxfp4: bool = False
    """True if it is two tensors, blocks and scales (`dequantise_mxfp4`)."""

    def to_ours(self, value: Tensor) -> Tensor:
        """[E, rows, …] or [E, …, rows], as stored -> [E, (parts,) rows, …]."""
        value = value.transpose(1, 2) if self.transposed else value
        if self.parts == 1:
            return value
        sizes = (-1, self.parts) if self.interleaves else (self.parts, -1)
        parts = value.unflatten(1, sizes)
        return parts.transpose(1, 2) if self.interleaves else parts

    def to_theirs(self, value: Tensor) -> Tensor:
        if self.parts > 1:
            value = (value.transpose(1, 2) if self.interleaves else value).flatten(1, 2)
        return value.transpose(1, 2) if self.transposed else value

    def shapes(self, ours: Shape) -> list[Shape]:
        """Return the shape of each stored tensor."""
        count, *sizes = ours
        rows = [sizes[0] * sizes[1], *sizes[2:]] if self.parts > 1 else sizes
        if self.is_mxfp4:
            scales = (count, rows[0], rows[1] // MXFP4_BLOCK)
            return [(*scales, MXFP4_BLOCK // 2), scales]
        return [(count, *(rows[::-1] if self.transposed else rows))]


@dataclass(frozen=True)
class Location:
    """Names and layout of the tensors, or the part of one, that a parameter is stored as."""

    names: tuple[str, ...]
    """Names of its tensors, of `transformers` without the base model's prefix. Several (query, key, value)
    are equal in size and concatenated along dim 0."""
    transposed: bool = False
    """True if it is stored [in, out]; ours is [out, in]."""
    num_heads: int | None = None
    """Heads of a fused qkv, stored [q | k | v] with heads in each, ours [head][q, k, v]; None for others. Of
    other fused weights their blocks."""
    parts: int = 3
    """Weights that are fused, if `num_heads` is given: q, k and v."""
    rows: tuple[int, ...] = ()
    """Rows of each block of so many as they are stored, in our order; empty for the same order. Blocks of a
    fused weight hold its parts."""
    section: tuple[int, int, int] | None = None
    """First row, row after the last, and all rows of each block of a tensor that holds several parameters;
    None for a tensor of its own."""
    blocks: int = 1
    """Blocks of a tensor that holds several parameters; each has a section of every parameter."""
    stacked: tuple[int, ...] = ()
    """Dims of our parameter over which its tensors are stacked, such as experts; none if they are not."""
    experts: ExpertRows | None = None
    """Order of the one tensor of all experts; None for other parameters."""
    is_row: bool = False
    """True for a vector that is stored as a matrix of one row."""

    @property
    def is_plain(self) -> bool:
        """True if it is stored as it is here."""
        return self == Location(self.names) and len(self.names) == 1

    @property
    def is_mxfp4(self) -> bool:
        return self.experts is not None and self.experts.is_mxfp4

    @property
    def indices(self) -> list[tuple[int, ...]]:
        """Index of each tensor in the stack."""
        return list(product(*map(range, self.stacked)))

    def shapes(self, ours: Shape) -> list[Shape]:
        """Return the shape of each stored tensor of a parameter whose shape here is `ours`."""
        if self.experts is not None:
            return self.experts.shapes(ours)
        if self.is_row:
            return [(1, *ours)]
        stored = ours[::-1] if self.transposed else ours[len(self.stacked) :]
        if self.section is not None:
            stored = (self.blocks * self.section[2], *stored[1:])
        elif not self.stacked:
            stored = (stored[0] // len(self.names), *stored[1:])
        return [stored] * len(self.names)

    def to_ours(self, values: Sequence[Tensor]) -> Tensor:
        """Convert stored tensors to our parameter, as a view where possible."""
        if self.experts is not None:
            return self.experts.to_ours(dequantise_mxfp4(*values) if self.experts.is_mxfp4 else values[0])
        if self.is_row:
            return values[0][0]
        if self.stacked:
            return torch.stack(list(values)).view(*self.stacked, *values[0].shape)
        value = values[0] if len(values) == 1 else torch.cat(list(values))
        del values  # the caller may hold none: a large tensor is then in memory twice at most
        if self.section is not None:
            value = self.section_of(value).flatten(0, 1)
        value = value.t() if self.transposed else value
        value = value if self.num_heads is None else _swap(value, self.parts, self.num_heads)
        if self.rows:
            value = value.unflatten(0, (-1, len(self.rows)))[:, list(self.rows)].flatten(0, 1)
        return value

    def to_theirs(self, value: Tensor) -> tuple[Tensor, ...]:
        """Convert our parameter to stored tensors, or to its section of one: the inverse of `to_ours`."""
        if self.experts is not None:
            return (self.experts.to_theirs(value),)
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
        """Return elements of our parameter of that shape, float32; `load` returns those of stored tensors.

        A tensor stored like ours is read in part; of others the full tensor is held, twice at most. Experts
        are read one after the other.
        """
        if self.is_plain:
            return load(self.names[0], region)
        shapes = self.shapes(shape)
        if self.experts is not None:
            target, inner = torch.empty(region.size), Region(region.offset[1:], region.size[1:])
            for number, part in enumerate(target, start=region.offset[0]):
                ones = [Region((number, *(0 for _ in stored[1:])), (1, *stored[1:])) for stored in shapes]
                full = self.to_ours([load(name, one) for name, one in zip(self.names, ones, strict=True)])[0]
                part.copy_(full[inner.within(Region.full(full.shape))])
            return target
        if not self.stacked:
            full = self.to_ours([load(name, Region.full(shapes[0])) for name in self.names])
            return full[region.within(Region.full(shape))]
        target, depth = torch.empty(region.size), len(self.stacked)
        inner = Region(region.offset[depth:], region.size[depth:])
        for index, name in zip(self.indices, self.names, strict=True):
            at = tuple(n - first for n, first in zip(index, region.offset, strict=False))
            if all(0 <= n < size for n, size in zip(at, region.size, strict=False)):
                target[at].copy_(load(name, inner))
        return target


class ForeignTensor(NamedTuple):
    """A tensor to write, of another library's name and shape."""

    name: str
    shape: Shape
    sources: tuple[tuple[str, Shape, Location], ...]
    """(our name, our shape, location) of each parameter that it holds, or holds a part of."""
    part: int
    """Number among the tensors of that parameter."""

    def compute(self, read: Read) -> Tensor:
        """Return the tensor, float32, of parameters by `read`; of stacked tensors only this one is read."""
        ours, shape, location = self.sources[0]
        if location.stacked:
            index = location.indices[self.part]
            region = Region((*index, *(0 for _ in self.shape)), (*(1 for _ in index), *self.shape))
            return read(ours, region).view(self.shape)
        if location.section is None:
            return location.to_theirs(read(ours, Region.full(shape)))[self.part]
        target = torch.empty(self.shape)
        for ours, shape, location in self.sources:
            rows = location.section_of(target)
            rows.copy_(location.to_theirs(read(ours, Region.full(shape)))[0].view_as(rows))
        return target


def foreign_tensors(
    locations: Iterable[tuple[str, Location]],
    parameters: Mapping[str, TensorEntry],
    rename: Callable[[str], str] = lambda name: name,
) -> dict[str, ForeignTensor]:
    """Return the tensors that hold parameters, by their names after `rename`, in the order of locations."""
    stored = dict[str, ForeignTensor]()
    for ours, location in locations:
        shape = parameters[ours].shape
        for part, (name, size) in enumerate(zip(location.names, location.shapes(shape), strict=True)):
            theirs = rename(name)
            before = stored.get(theirs, ForeignTensor(theirs, size, (), part))
            stored[theirs] = before._replace(sources=(*before.sources, (ours, shape, location)))
    return stored


class Files(Protocol):
    """The files of a checkpoint."""

    @property
    def num_bytes(self) -> int: ...

    def verify(self, progress: Advance) -> dict[str, str]:
        """Compare what they hold with its checksums; return the digest of each file by its name."""


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    """A model in another library's files, opened: its tensors stay there until they are read."""

    format: str
    path: Path
    model: ModelConfig
    files: Files
    locations: Mapping[str, Location]
    shapes: Mapping[str, Shape]
    """Shapes of our parameters, with the padding of a token table that is stored padded."""
    load: Read
    """Returns elements of a stored tensor, float32 on the CPU."""
    origin: Mapping[str, JSON] = field(default_factory=dict)
    token_ids: Mapping[str, JSON] = field(default_factory=dict)
    """Ids of bos, eos and pad that the files declare, by their key in config.json."""
    filled: frozenset[str] = frozenset()
    """Parameters that the files lack: they take initial values."""
    zeros: frozenset[str] = frozenset()
    """Parameters that the files lack, and that are zero."""
    notes: tuple[str, ...] = ()
    """Remarks for the user, one line each."""

    def read(self, name: str, region: Region) -> Tensor:
        """Return those elements of a parameter. Raises CorruptFileError if some are not finite."""
        if name in self.zeros:
            return torch.zeros(region.size)
        value = self.locations[name].read(self.shapes[name], region, self.load)
        if value.numel() and not torch.stack(value.aminmax()).isfinite().all():
            raise CorruptFileError(f"{self.path}: {name} is not finite everywhere: take another iteration")
        return value.contiguous()


def check_shapes(path: Path, stored: Mapping[str, Shape], wanted: Mapping[str, Shape], fix: str) -> None:
    """Raise CorruptFileError for a tensor of another shape, or that is missing or not wanted."""
    for name in [*wanted, *sorted(stored.keys() - wanted.keys())]:
        held = list(stored[name]) if name in stored else "missing"
        needed = list(wanted[name]) if name in wanted else "none"
        if held != needed:
            raise CorruptFileError(f"{path}: {one_line(name)} is {held}, {needed} is needed: {fix}")


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of weights in MXFP4, as gpt-oss stores its experts'.

    Blocks of a row share a scale, a power of two (OCP Microscaling Formats 1.0, section 5.3): an 8-bit
    exponent, biased by 127, of which 255 is NaN's. The numbers are of 4 bits, E2M1, the first in the lower
    half of a byte.

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
    ours: str, *theirs: str, transposed: bool = False, num_heads: int | None = None
) -> Iterator[tuple[str, Location]]:
    for part in ("weight", "bias"):
        names = tuple(f"{module}.{part}" for module in theirs)
        yield f"{ours}.{part}", Location(names, transposed and part == "weight", num_heads)
