"""Random numbers as functions of (seed, place), so that no generator state has to be kept.

Initial weights are drawn per parameter, dropout masks per (step's sample, layer, site). Restarting,
recomputing an activation or changing dp then gives the same numbers without saving or restoring anything.
"""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from mlm.parallel.uncompiled import uncompiled
from mlm.splitmix import GOLDEN, MASK, mix_int


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from integers and names; the same on every machine."""
    state = GOLDEN
    for part in parts:
        value = zlib.crc32(part.encode()) | 1 << 40 if isinstance(part, str) else part
        state = mix_int(state ^ (value & MASK))
    return state >> 1


SHARED = (-1,)
"""In place of tensor-parallel ranks: one mask, the same on all of them."""


@dataclass(frozen=True)
class DropoutStream:
    """The dropout masks of one micro-batch: a function of (seed, first sample, layer, site, tp rank).

    Outside the tensor-parallel regions all tp ranks draw the same mask, or with sequence parallelism each
    its own for its rows; inside, each draws its own.
    """

    seed: int
    device: torch.device
    split_parts: tuple[int, ...] = (0,)
    """Whose masks are drawn inside the split regions: this tp rank's. Several: one process draws what that
    many ranks would, each for its share of the heads."""
    hidden_parts: tuple[int, ...] = SHARED
    """The same for the hidden states outside: each part is a share of the rows of the sequence."""

    @classmethod
    def of_micro_batch(
        cls,
        seed: int,
        first_sample: int,
        device: torch.device,
        *,
        split_parts: tuple[int, ...] = (0,),
        hidden_parts: tuple[int, ...] = SHARED,
    ) -> "DropoutStream":
        """The stream of the micro-batch that begins with global sample `first_sample`."""
        return cls(derive_seed(seed, "dropout", first_sample), device, split_parts, hidden_parts)

    def hidden(self, x: Tensor, p: float, layer: int, site: str) -> Tensor:
        """Dropout with probability `p` on hidden states [S, B, H], of global layer number `layer`."""
        if p == 0:
            return x
        parts = []
        for rank, part in zip(self.hidden_parts, x.chunk(len(self.hidden_parts)), strict=True):
            self.enter(layer, site, rank)
            parts.append(dropout(part, p))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def everywhere(self, x: Tensor, p: float, layer: int, site: str) -> Tensor:
        """Dropout of activations replicated over tp, however hidden states are split."""
        if p == 0:
            return x
        self.enter(layer, site, SHARED[0])
        return dropout(x, p)

    @uncompiled
    def enter(self, layer: int, site: str, tp_rank: int) -> None:
        """Seed the device's default generator for `site` of global layer number `layer`.

        `tp_rank` is of SHARED outside the split regions. Used because dropout inside fused attention kernels
        takes its numbers from the default generator only. Does not synchronise.
        """
        seed = derive_seed(self.seed, layer, site, tp_rank)
        if self.device.type == "cuda":
            index = self.device.index if self.device.index is not None else torch.cuda.current_device()
            torch.cuda.default_generators[index].manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout that keeps one byte per element for backward, on any device."""
    y: Tensor = torch.native_dropout(x, p, True)[0]
    return y


def draw_normal(shape: tuple[int, ...], std: float, seed: int, rows: range | None = None) -> Tensor:
    """float32 N(0, std²) tensor of `shape` on the CPU; with `rows`, only those rows of it.

    Drawn in blocks of rows with a seed each, so a rank that holds some rows draws little more than those.
    """
    rows = range(shape[0]) if rows is None else rows
    row_size = 1
    for size in shape[1:]:
        row_size *= size
    block = max(1, (1 << 18) // max(1, row_size))  # a function of the global shape alone
    out = torch.empty((len(rows), *shape[1:]))
    if len(rows) == 0:
        return out
    generator = torch.Generator()
    for index in range(rows.start // block, -(-rows.stop // block)):
        first, last = index * block, min((index + 1) * block, shape[0])
        generator.manual_seed(derive_seed(seed, index))
        drawn = torch.empty((last - first, *shape[1:])).normal_(0.0, std, generator=generator)
        low, high = max(first, rows.start), min(last, rows.stop)
        out[low - rows.start : high - rows.start] = drawn[low - first : high - first]
    return out
