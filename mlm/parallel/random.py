"""Random numbers as functions of (seed, place), so that no generator state has to be kept.

Initial weights are drawn per parameter, dropout masks per (step's sample, layer, site). Restarting,
recomputing an activation or changing dp then gives the same numbers without saving or restoring anything.
"""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from mlm.parallel.mesh import Axis

_MASK = (1 << 64) - 1


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from integers and names; the same on every machine. Mixing: splitmix64's finaliser."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        value = zlib.crc32(part.encode()) | 1 << 40 if isinstance(part, str) else part
        state = (state ^ (value & _MASK)) & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        state = (state ^ state >> 31) & _MASK
    return state >> 1


@dataclass(frozen=True)
class DropoutStream:
    """The dropout masks of one micro-batch: a function of (seed, first sample, layer, site).

    Outside the tensor-parallel regions all tp ranks draw the same mask; inside, each draws its own.
    """

    seed: int
    device: torch.device

    @classmethod
    def of_micro_batch(cls, seed: int, first_sample: int, device: torch.device) -> "DropoutStream":
        """The stream of the micro-batch that begins with global sample `first_sample`."""
        return cls(derive_seed(seed, "dropout", first_sample), device)

    @torch.compiler.disable
    def enter(self, layer: int, site: str, tp: Axis | None = None) -> None:
        """Seed the device's default generator for `site` of global layer number `layer`.

        Give `tp` inside a region whose activations are split over it. Used because dropout inside fused
        attention kernels takes its numbers from the default generator only. Does not synchronise.
        """
        seed = derive_seed(self.seed, layer, site, -1 if tp is None else tp.rank)
        if self.device.type == "cuda":
            index = self.device.index if self.device.index is not None else torch.cuda.current_device()
            torch.cuda.default_generators[index].manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)


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
