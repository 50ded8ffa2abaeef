"""Documents inside a sample: where one ends, and what restarts after it.

A document ends with its end-of-document token. Megatron-LM's three switches, each on its own:
--reset-position-ids, --reset-attention-mask and --eod-mask-loss (`_get_ltor_masks_and_position_ids` in
megatron/core/datasets/gpt_dataset.py says what they do; this is our own code for it).

Shapes: S sequence, B micro-batch, H hidden, N heads, t = tensor-parallel size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.models.packed import Packing, build_packing, packs
from mlm.parallel.labels import IGNORE_INDEX
from mlm.parallel.transfer import to_device
from mlm.parallel.uncompiled import skip_compile


@dataclass(frozen=True, eq=False)
class Spans:
    """Lengths of the documents of a micro-batch, for attention that stays inside each of them."""

    lengths: tuple[tuple[int, ...], ...]
    """Tokens of each document, for each of the B samples; empty where `bias` serves."""
    bias: Tensor | None = None
    """[B, 1, S, S] or [B, 1, 1, S]: 0 where a token attends, -inf elsewhere, in the dtype of activations. One
    kernel for the whole micro-batch is faster on a GPU."""
    packing: Packing | None = None
    """Places of the documents for a kernel that takes several lengths, in place of a bias."""

    @skip_compile  # lengths differ from batch to batch: each would be recompiled
    def each(self, attention: Callable[[Tensor, int, int], Tensor], qkv: Tensor) -> Tensor:
        """`attention` within each document: [S, B, 3H/t] -> [S, B, H/t].

        attention(its qkv [s, 1, 3H/t], sample, its first token's place in it) gives [s, 1, H/t]. Costs the
        squares of the documents' lengths rather than that of S: on a CPU faster than a mask.
        """
        rows = []
        for sample, (whole, lengths) in enumerate(zip(qkv.split(1, dim=1), self.lengths, strict=True)):
            firsts = accumulate(lengths, initial=0)
            parts = zip(whole.split(lengths), firsts, strict=False)
            rows.append(torch.cat([attention(part, sample, first) for part, first in parts]))
        return torch.cat(rows, dim=1)


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of a micro-batch, as a model reads them."""

    positions: Tensor | None
    """[B, S] int64: each token's place in its document; None counts through the sample."""
    spans: Spans | None
    """None lets a token attend to all before it in the sample."""


@dataclass(frozen=True)
class Boundaries:
    """Switches: what restarts after an end-of-document token."""

    eod_id: int
    reset_positions: bool = False
    reset_attention: bool = False
    mask_eod_loss: bool = False

    @classmethod
    def of(cls, data: DataConfig) -> "Boundaries | None":
        """The boundaries a run sets, None if documents have no effect. Raises ValueError without a token."""
        switches = (data.reset_positions, data.reset_attention, data.mask_eod_loss)
        if not any(switches):
            return None
        if data.eod_id is None or not 0 <= data.eod_id < 1 << 31:
            raise ValueError(f"data.eod_id={data.eod_id} is no token that could end a document")
        return cls(data.eod_id, *switches)

    def scored(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Labels [B, S], without those an end-of-document token would have to foresee."""
        return labels.masked_fill(tokens == self.eod_id, IGNORE_INDEX) if self.mask_eod_loss else labels

    def documents(
        self, tokens: Tensor, dtype: torch.dtype, on_host: Tensor | None = None
    ) -> Documents | None:
        """The documents of tokens [B, S], on their device; `dtype` is that of activations.

        Waits for the device only where that is the CPU. `on_host` are the same tokens there: lengths that a
        kernel is to be given are counted in them.
        """
        if not (self.reset_positions or self.reset_attention):
            return None
        ends, spans = tokens == self.eod_id, None
        if self.reset_attention and on_host is not None and packs(tokens.device):
            lengths = document_spans(on_host == self.eod_id, dtype).lengths
            spans = Spans((), packing=build_packing(lengths, tokens.device))
        elif self.reset_attention:
            spans = document_spans(ends, dtype)
        return Documents(document_positions(ends) if self.reset_positions else None, spans)


def document_positions(ends: Tensor) -> Tensor:
    """Tokens between each token and the beginning of its document or sample: bool [B, S] -> int64 [B, S]."""
    places = torch.arange(ends.shape[1], device=ends.device)
    begins = torch.where(_document_begins(ends), places, 0).cummax(dim=1).values  # of each token's document
    return places - begins


def document_spans(ends: Tensor, dtype: torch.dtype) -> Spans:
    """The documents that `ends`, bool [B, S], marks the last token of."""
    if ends.device.type == "cpu":
        return Spans(tuple(map(_lengths, _document_begins(ends))))
    return Spans((), document_bias(ends, dtype))


def padding_spans(lengths: Tensor, width: int, dtype: torch.dtype, device: torch.device) -> Spans | None:
    """Return spans that hide the padding after sequences; None if there is none.

    Args:
        lengths: [B] int64 on the host.
        width: S, padding included.
        dtype: of activations.
        device: of activations.
    """
    if int(lengths.min()) == width:
        return None
    if packs(device):
        return Spans((), packing=build_packing([[length] for length in lengths.tolist()], device))
    is_padding = torch.arange(width) >= lengths[:, None]  # [B, S]
    bias = torch.zeros(is_padding.shape, dtype=dtype).masked_fill_(is_padding, -math.inf)
    return Spans((), to_device(bias[:, None, None], device))


def document_bias(ends: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for each token and those not after it in its document, else -inf: bool [B, S] -> [B, 1, S, S]."""
    number = _document_begins(ends).cumsum(dim=1)  # of each token's document in its sample
    attends = (number[:, :, None] == number[:, None, :]).tril()
    bias = torch.zeros(attends.shape, dtype=dtype, device=ends.device)
    return bias.masked_fill_(~attends, -math.inf).unsqueeze(1)


def _document_begins(ends: Tensor) -> Tensor:
    """True at tokens right after the end of a document: bool [B, S]."""
    begins = ends.roll(1, dims=1)
    begins[:, 0] = False
    return begins


def _lengths(begins: Tensor) -> tuple[int, ...]:
    """Lengths of a sample's documents, from where the second and later ones begin: bool [S]."""
    edges = [0, *begins.nonzero().flatten().tolist(), len(begins)]
    return tuple(end - begin for begin, end in pairwise(edges))
