"""Dropout whose masks are a hash of (seed, sample, layer, site, row, column).

Without generator state, a mask is the same at every layout and micro-batch size, compiled or not, on every
device, and can be recomputed. The exception is attention in a fused kernel, which draws from its device's
generator: `DropoutStream.seed_kernel`.

The hash is the finaliser of MurmurHash3 (Appleby 2011, public domain), 32 bits for two neighbouring
elements. Sixteen bits an element give a probability in steps of 2^-16; results are scaled by its own inverse.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mlm.parallel.collectives import to_device
from mlm.parallel.compute_state import skip_compile
from mlm.parallel.random import derive_seed

FACTORS = -2048144789, -1028477387
"""0x85EBCA6B and 0xC2B2AE35 as int32."""
STEPS = 1 << 16
CHUNK = 1 << 17
"""Hashes computed at a time on a CPU: half a megabyte stays in the cache."""


def site_keys(sites: Iterable[tuple[int, str]]) -> Tensor:
    """Keys of dropout sites (global layer number, name in the layer): int32 [sites, 2]."""
    return _keys(derive_seed("place", layer, name) for layer, name in sites)


def sample_keys(seed: int, first: int, count: int) -> Tensor:
    """Keys of `count` samples of a run from number `first`: int32 [count, 2]."""
    return _keys(derive_seed(seed, "dropout", first + i) for i in range(count))


def _keys(seeds: Iterable[int]) -> Tensor:
    halves = [((seed & 0xFFFFFFFF), seed >> 32) for seed in seeds]
    return torch.tensor([[(h ^ 1 << 31) - (1 << 31) for h in pair] for pair in halves], dtype=torch.int32)


def _mix(bits: Tensor, keys: Tensor) -> Tensor:
    """Hash int32 counters, with keys [..., 2] that broadcast over their last dimension."""
    bits = bits ^ keys[..., 0, None]
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)  # >> repeats the sign
    bits *= FACTORS[0]
    bits ^= keys[..., 1, None]
    bits ^= (bits >> 13).bitwise_and_(0x7FFFF)
    bits *= FACTORS[1]
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def dropped_steps(p: float) -> int:
    return min(round(p * STEPS), STEPS - 1)


def draw_keep_mask(rows: Tensor, keys: Tensor, width: int, p: float, stride: int | None = None) -> Tensor:
    """Draw masks: True for kept elements, each with probability 1 - p.

    Args:
        rows: int32 [...], numbers of the rows of elements.
        keys: int32 [..., 2] of sample and site, broadcast with `rows`.
        width: elements of a row.
        p: probability of dropping, in steps of 2^-16.
        stride: width that rows are counted in; the default is `width`.

    Returns:
        bool [..., width].
    """
    stride = ((stride or width) + 1) // 2
    if torch.compiler.is_compiling():
        return _keep_elements(
            rows, keys, torch.arange(width, dtype=torch.int32, device=rows.device), p, stride
        )
    shape = (*torch.broadcast_shapes(rows.shape, keys.shape[:-1]), width)
    out = torch.empty(shape, dtype=torch.bool, device=rows.device)
    _keep_pairs(out, rows, keys, p, stride)
    return out


def _keep_pairs(out: Tensor, rows: Tensor, keys: Tensor, p: float, stride: int) -> None:
    """Fill `out`, hash by hash, on a CPU by chunks."""
    *shape, width = out.shape
    largest = max(range(len(shape)), key=shape.__getitem__, default=0)
    if out.device.type == "cpu" and out.numel() > 2 * CHUNK and shape and shape[largest] > 1:
        size = max(1, shape[largest] * 2 * CHUNK // out.numel())
        for first in range(0, shape[largest], size):
            part = [
                x if x.shape[largest] == 1 else x.narrow(largest, first, min(size, shape[largest] - first))
                for x in (out, rows, keys)
            ]
            _keep_pairs(part[0], part[1], part[2], p, stride)
        return
    pairs = torch.arange((width + 1) // 2, dtype=torch.int32, device=out.device)
    bits = _mix((rows * stride)[..., None] + pairs, keys).view(torch.int16)[..., :width]
    torch.ge(bits, dropped_steps(p) - STEPS // 2, out=out)


def _keep_elements(rows: Tensor, keys: Tensor, columns: Tensor, p: float, stride: int) -> Tensor:
    """Masks of the columns `columns`, int32, by one hash an element: one kernel if compiled."""
    if columns.is_cpu and not torch.compiler.is_compiling() and len(columns) % 2 == 0:
        even, odd = columns.view(-1, 2).unbind(1)
        if torch.equal(odd, even | 1) and not (even & 1).any():  # halves of the same hashes
            bits = _mix((rows * stride)[..., None] + (even >> 1), keys).view(torch.int16)
            return bits >= dropped_steps(p) - STEPS // 2
    bits = _mix((rows * stride)[..., None] + (columns >> 1), keys)
    return (bits >> 16 * (columns & 1)).to(torch.int16) >= dropped_steps(p) - STEPS // 2


@dataclass(frozen=True, eq=False)
class DropoutStream:
    """The dropout masks of one micro-batch."""

    keys: Tensor
    """int32 [B, 2]: of each sample, on the device."""
    seed: int = 0
    """For kernels that draw masks from a generator."""
    split_parts: tuple[int, ...] = (0,)
    """tp ranks whose masks such kernels draw inside the tensor-parallel regions: this rank, or several that
    one process stands for, each with a share of the heads."""
    sequence_rank: int = 0
    """With sequence parallelism, the tp rank whose rows of the sequence hidden states are."""
    positions: Tensor | None = None
    """With context parallelism, int32 [rows]: positions in the sequence of the rows of hidden states."""

    @classmethod
    def of_micro_batch(
        cls,
        seed: int,
        first_sample: int,
        samples: int,
        device: torch.device,
        *,
        split_parts: tuple[int, ...] = (0,),
        sequence_rank: int = 0,
        positions: Tensor | None = None,
    ) -> "DropoutStream":
        """Stream of `samples` samples of a run from number `first_sample`.

        `positions` int64 [rows] are the tokens of the hidden states, if not all of a sequence.
        """
        keys = to_device(sample_keys(seed, first_sample, samples), device)
        if positions is not None:
            positions = to_device(positions.int(), device)
        return cls(keys, derive_seed(seed, "dropout", first_sample), split_parts, sequence_rank, positions)

    def hidden(self, x: Tensor, p: float, site_key: Tensor) -> Tensor:
        """Dropout with probability `p` on hidden states [S, B, H], or this rank's rows of them."""
        rows = self.positions
        if rows is None:
            first = self.sequence_rank * x.shape[0]
            rows = torch.arange(first, first + x.shape[0], dtype=torch.int32, device=x.device)
        return self._drop_rows(x, p, site_key, rows)

    def replicated(self, x: Tensor, p: float, site_key: Tensor) -> Tensor:
        """Dropout of activations [S, B, H] replicated over tp, also with sequence parallelism."""
        return self._drop_rows(x, p, site_key, torch.arange(x.shape[0], dtype=torch.int32, device=x.device))

    def _drop_rows(self, x: Tensor, p: float, site_key: Tensor, rows: Tensor) -> Tensor:
        if p == 0:
            return x
        assert x.shape[:2] == (len(rows), len(self.keys)), f"{x.shape}: {len(rows)}, {len(self.keys)} masks"
        keep = draw_keep_mask(rows[:, None], (self.keys ^ site_key)[None], x.shape[-1], p)
        return apply_dropout(x, keep, p)

    def probabilities(
        self,
        x: Tensor,
        p: float,
        site_key: Tensor,
        *,
        length: int,
        first_head: int = 0,
        first_row: int = 0,
        sample: int | None = None,
    ) -> Tensor:
        """Dropout of attention probabilities.

        Args:
            x: [B * N/t, rows, columns]; the heads of a sample are adjacent.
            p: probability of dropping.
            site_key: key of the layer's attention.
            length: S, also if `x` has a part of the rows and columns.
            first_head: global number of the first head.
            first_row: position in the sample of the first row and column.
            sample: the sample of `x`; None for all of the micro-batch.
        """
        if p == 0:
            return x
        keys = self.keys if sample is None else self.keys[sample : sample + 1]
        heads = torch.arange(x.shape[0] // len(keys), dtype=torch.int32, device=x.device) + first_head
        inside = torch.arange(first_row, first_row + x.shape[1], dtype=torch.int32, device=x.device)
        rows = (heads[:, None] * length + inside).flatten()
        keep = draw_keep_mask(
            rows[None], (keys ^ site_key)[:, None], x.shape[2], p, length
        )  # [B, N/t * rows, columns]
        return apply_dropout(x, keep.view(x.shape), p)

    def probabilities_at(
        self,
        x: Tensor,
        p: float,
        site_key: Tensor,
        *,
        length: int,
        heads: range,
        rows: Tensor,
        columns: Tensor,
    ) -> Tensor:
        """Dropout of a part of each sample's attention probabilities: [B, heads, rows, columns].

        `heads` are global numbers, `rows` and `columns` positions of queries and keys in the sequence of S =
        `length`; `p` and `site_key` as of `probabilities`.
        """
        first = torch.arange(heads.start, heads.stop, dtype=torch.int32, device=rows.device) * length
        keys = (self.keys ^ site_key)[:, None, None]  # [B, 1, 1, 2]
        keep = _keep_elements(first[:, None] + rows.int(), keys, columns.int(), p, (length + 1) // 2)
        return apply_dropout(x, keep, p)

    def features(
        self, x: Tensor, p: float, site_key: Tensor, *, rows: Tensor, columns: range, width: int
    ) -> Tensor:
        """Dropout of a part of the features, independent of their split over ranks: [rows, B, columns].

        `rows` are int64 positions in the sequence, `columns` are numbers of the `width` features of all
        ranks.
        """
        numbers = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=x.device)
        keys = (self.keys ^ site_key)[None]  # [1, B, 2]
        return apply_dropout(x, _keep_elements(rows.int()[:, None], keys, numbers, p, (width + 1) // 2), p)

    @skip_compile
    def seed_kernel(self, layer: int, tp_rank: int) -> None:
        """Seed the device's default generator for the attention of global layer number `layer`.

        Fused kernels draw from that generator only. Does not synchronise.
        """
        if self.keys.is_meta:  # shapes alone: nothing is drawn
            return
        seed = derive_seed(self.seed, layer, "attention", tp_rank)
        index = self.keys.device.index
        torch.cuda.default_generators[torch.cuda.current_device() if index is None else index].manual_seed(
            seed
        )


def apply_dropout(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Scale `x` where `keep`, else 0. Differentiable; saves a byte an element."""
    scale = STEPS / (STEPS - dropped_steps(p))  # so that the mean stays
    return torch.where(keep, x * scale, 0.0)
