"""Comparison of the tensors of two checkpoints, written by any layouts, in a memory of a few blocks."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.format import (
    DTYPE_NAMES,
    RESTORE,
    Manifest,
    read_manifest,
)
from mlm.checkpoint.native.reader import Reader
from mlm.checkpoint.native.slices import Region
from mlm.util.errors import reading_from
from mlm.util.terminal import Advance, one_line, progress_bar

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype to compare an element's bits in, by its bytes."""

Shape = tuple[int, ...]
BLOCK = 1 << 22  # bytes of a tensor compared at a time: 4 MiB, up to four times that in float64


@dataclass(frozen=True)
class TensorDifference:
    """Differences of a tensor that has the same shape and dtype in both checkpoints."""

    name: str
    differing: int
    """Elements whose bits differ: a NaN equals its own bits, 0 and -0 differ."""
    elements: int
    largest: float
    """Largest absolute difference of two elements, in float64; infinite where a NaN or infinity differs."""
    scale: float
    """Largest absolute finite element of the two tensors."""

    @property
    def relative(self) -> float:
        """Largest difference in units of the largest element; 0 if no number differs."""
        if not self.largest:
            return 0.0
        return self.largest / self.scale if self.scale else math.inf


@dataclass(frozen=True)
class FormDifference:
    """A tensor of different shapes or dtypes in the two checkpoints: "F32 [6, 4]"."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class CheckpointComparison:
    """The tensors of two checkpoints, side by side. Each list is sorted by name."""

    first: Manifest
    second: Manifest
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    forms: tuple[FormDifference, ...]
    tensors: tuple[TensorDifference, ...]
    """Every other tensor, equal ones too."""

    @property
    def equal(self) -> bool:
        """True if both hold the same tensors bit for bit."""
        return not (self.only_first or self.only_second or self.forms or self.differing)

    @property
    def differing(self) -> tuple[TensorDifference, ...]:
        """Tensors with a different element, the most different first."""
        differing = [tensor for tensor in self.tensors if tensor.differing]
        return tuple(sorted(differing, key=lambda t: (-t.relative, -t.largest, -t.differing, t.name)))

    @property
    def sentence(self) -> str:
        """Summary of the differences in one line."""
        count, differing = len(self.tensors), self.differing
        parts = []
        if differing:
            largest = differing[0]
            parts.append(
                f"{len(differing)} of {count} tensors differ, {one_line(largest.name)} most: by "
                f"{largest.largest:.1e}, {largest.relative:.1e} of its largest element"
            )
        if self.forms:
            parts.append(f"{len(self.forms)} have another shape or dtype")
        if self.only_first or self.only_second:
            only = len(self.only_first), len(self.only_second)
            parts.append(f"{only[0]} are only in the first, {only[1]} in the second")
        return "; ".join(parts) or f"all {count} tensors are equal bit for bit"


def compare_checkpoints(first: Path, second: Path) -> CheckpointComparison:
    """Compare the tensors of two step-… directories element by element, and show a progress bar.

    Both are read by blocks of rows: memory holds at most a dozen times BLOCK bytes, or one row. Only the
    blocks that hold compared tensors are checked against their digests; `mlm ckpt verify` checks all. Raises
    CorruptFileError if a file is missing, short, damaged, or holds other tensors than listed; UserError if a
    checkpoint does not exist or cannot be read.
    """
    with reading_from(first, RESTORE):
        manifests = read_manifest(first), read_manifest(second)
        first_names, second_names = (manifest.tensors.keys() for manifest in manifests)
        forms = {
            name: [
                f"{DTYPE_NAMES[entry.dtype]} {list(entry.shape)}"
                for entry in (manifest.tensors[name] for manifest in manifests)
            ]
            for name in first_names & second_names
        }
        with Reader(first, manifests[0]) as a, Reader(second, manifests[1]) as b:
            comparable = sorted(name for name, form in forms.items() if form[0] == form[1])
            count = sum(manifests[0].tensors[name].num_bytes for name in comparable)
            with progress_bar("comparing", count, in_bytes=True) as advance:
                tensors = tuple(_compare(a, b, name, advance) for name in comparable)
    return CheckpointComparison(
        *manifests,
        only_first=tuple(sorted(first_names - second_names)),
        only_second=tuple(sorted(second_names - first_names)),
        forms=tuple(FormDifference(n, *forms[n]) for n in sorted(forms) if forms[n][0] != forms[n][1]),
        tensors=tensors,
    )


def _compare(first: Reader, second: Reader, name: str, progress: Advance) -> TensorDifference:
    entry = first.manifest.tensors[name]
    differing, largest, scale = 0, 0.0, 0.0
    for block in row_blocks(entry.shape, entry.dtype.itemsize):
        a, b = first.read(name, block), second.read(name, block)
        bits = BITS[a.element_size()]
        scale = max(scale, _magnitude(a))
        if not torch.equal(a.view(bits), b.view(bits)):
            is_different = a.view(bits) != b.view(bits)
            difference = (a[is_different].double() - b[is_different].double()).abs()
            differing += difference.numel()
            largest = max(largest, float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max()))
            scale = max(scale, _magnitude(b))
        progress(a.numel() * a.element_size())
    return TensorDifference(name, differing, prod(entry.shape), largest, scale)


def tensors_digest(directory: Path, manifest: Manifest) -> str:
    """Return the SHA-256 of the tensors of a step-… directory, `sha256:<hex>`, whatever layout wrote them.

    Input per tensor, in the order of names: name, dtype and shape, then the bytes. Raises as `Reader` does.
    """
    digest = hashlib.sha256()
    with Reader(directory, manifest) as reader:
        for name, entry in sorted(manifest.tensors.items()):
            digest.update(f"{name} {DTYPE_NAMES[entry.dtype]} {list(entry.shape)}\n".encode())
            for block in row_blocks(entry.shape, entry.dtype.itemsize):
                content = reader.read(name, block).view(BITS[entry.dtype.itemsize])
                digest.update(content.numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def row_blocks(shape: Shape, itemsize: int) -> Iterator[Region]:
    """Split a tensor along dim 0 into regions of at most BLOCK bytes, or one row."""
    if not prod(shape):
        return
    if not shape:
        yield Region((), ())
        return
    row_shape = shape[1:]
    rows = max(1, BLOCK // (prod(row_shape) * itemsize))
    for row in range(0, shape[0], rows):
        yield Region((row, *(0 for _ in row_shape)), (min(rows, shape[0] - row), *row_shape))


def are_equal(first: Callable[[Region], Tensor], second: Callable[[Region], Tensor], shape: Shape) -> bool:
    """Return True if two tensors of a shape, read by blocks of rows, have equal numbers."""
    return all(torch.equal(first(region), second(region)) for region in row_blocks(shape, 4))


def _magnitude(x: Tensor) -> float:
    """Return the largest absolute finite element; 0 if no element is finite."""
    if x.is_floating_point():
        low, high = x.aminmax()  # quick, and NaN where there is one
        largest = max(-float(low), float(high))
        if math.isfinite(largest):
            return largest
    wide = x.double()
    return float(torch.where(wide.isfinite(), wide, 0.0).abs().max())
