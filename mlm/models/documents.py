"""Documents inside a sample: where one ends, and what restarts after it.

A document ends with its end-of-document token. Megatron-LM's three switches, each on its own:
--reset-position-ids, --reset-attention-mask and --eod-mask-loss (`_get_ltor_masks_and_position_ids` in
megatron/core/datasets/gpt_dataset.py says what they do; this is our own code for it).

A bias on the scores that hides padding, or other documents, rules out flash kernels. A `Packing` gathers the
tokens without padding, sequence by sequence, and gives the kernel the start of each: it computes the squares
of the lengths rather than of S. Gathering and scattering move 18 bytes for each element of H and token
forward, and 22 backward, in half precision.

Shapes: S sequence, B micro-batch, H hidden, N heads, D head_dim, t = tensor-parallel size, T tokens without
padding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.parallel.collectives import to_device
from mlm.parallel.compute_state import skip_compile
from mlm.parallel.config import IGNORE_INDEX

_switch: list[bool] = []


@dataclass(frozen=True, eq=False)
class Packing:
    """Rows of the sequences of a micro-batch, packed."""

    rows: Tensor
    """int64 [T]: rows of the flattened [S * B, ...], sequence by sequence; each once."""
    begins: Tensor
    """int32 [sequences + 1]: the first packed token of each sequence, and T."""
    longest: int
    """Tokens of the longest."""


def pack_sequences(on: bool) -> None:
    """Switch packing on or off in this process (mlm/training/kernels.py)."""
    _switch[:] = [True] if on else []


def packs(device: torch.device) -> bool:
    """True if spans are packed on a device."""
    return bool(_switch) and device.type == "cuda"


def build_packing(lengths: Sequence[Sequence[int]], device: torch.device) -> Packing:
    """Packing of the consecutive sequences of each of B samples, by their lengths; the rest is padding."""
    samples = len(lengths)
    rows = [torch.arange(sum(tokens)) * samples + b for b, tokens in enumerate(lengths)]  # row s * B + b
    flat = [length for tokens in lengths for length in tokens]
    begins = torch.tensor([0, *accumulate(flat)], dtype=torch.int32)
    return Packing(to_device(torch.cat(rows), device), to_device(begins, device), max(flat))


class _SelectRows(torch.autograd.Function):
    """Distinct rows of a matrix: unlike index_select's, its backward pass copies instead of adding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.size, dy.shape[1]).index_copy_(0, rows, dy), None


@skip_compile  # the number of tokens differs from batch to batch: each would be compiled anew
def packed_attention(qkv: Tensor, head_dim: int, packing: Packing, causal: bool) -> Tensor:
    """Attention within each packed sequence: [S, B, 3H/t] -> [S, B, H/t], 0 for padding."""
    from torch.nn.attention.varlen import varlen_attn  # loads the kernels' registration

    s, b, _ = qkv.shape
    tokens: Tensor = _SelectRows.apply(qkv.view(s * b, -1), packing.rows)  # type: ignore[no-untyped-call]
    q, k, v = tokens.view(len(packing.rows), -1, 3, head_dim).unbind(2)  # each [T, N/t, D]
    begins, longest = packing.begins, packing.longest
    window = (-1, 0) if causal else (-1, -1)
    y = varlen_attn(q, k, v, begins, begins, longest, longest, window_size=window)
    assert isinstance(y, Tensor)  # no auxiliary results were asked for
    y = y.flatten(1)
    return y.new_zeros(s * b, y.shape[1]).index_copy_(0, packing.rows, y).view(s, b, -1)


@dataclass(frozen=True, eq=False)
class Spans:
    """Lengths of the documents of a micro-batch, for attention within each of them."""

    lengths: tuple[tuple[int, ...], ...]
    """Tokens of each document, for each of the B samples; empty with `bias` or `packing`."""
    bias: Tensor | None = None
    """[B, 1, S, S] or [B, 1, 1, S]: 0 where a token attends, -inf elsewhere, in the dtype of activations:
    faster on a GPU, as one kernel serves the micro-batch."""
    packing: Packing | None = None
    """Rows of the documents for a kernel that takes several lengths, in place of a bias."""

    @skip_compile  # lengths differ from batch to batch: each would be recompiled
    def attend(self, attention: Callable[[Tensor, int, int], Tensor], qkv: Tensor) -> Tensor:
        """`attention` within each document: [S, B, 3H/t] -> [S, B, H/t].

        attention(qkv [s, 1, 3H/t] of a document, its sample, its first token's row) returns [s, 1, H/t]. The
        cost grows with the squares of the documents' lengths: on a CPU faster than a mask.
        """
        samples = []
        for sample, (tokens, lengths) in enumerate(zip(qkv.split(1, dim=1), self.lengths, strict=True)):
            firsts = accumulate(lengths, initial=0)
            parts = zip(tokens.split(lengths), firsts, strict=False)
            samples.append(torch.cat([attention(part, sample, first) for part, first in parts]))
        return torch.cat(samples, dim=1)


@dataclass(frozen=True, eq=False)
class Documents:
    """Positions and attention spans of the documents of a micro-batch."""

    positions: Tensor | None
    """[B, S] int64: each token's position in its document; None counts through the sample."""
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
        """Boundaries of a run; None if documents have no effect. Raises ValueError without eod_id."""
        switches = (data.reset_positions, data.reset_attention, data.mask_eod_loss)
        if not any(switches):
            return None
        if data.eod_id is None or not 0 <= data.eod_id < 1 << 31:
            raise ValueError(f"data.eod_id={data.eod_id} is not a token that could end a document")
        return cls(data.eod_id, *switches)

    def scored(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Labels [B, S] without predictions after an end-of-document token."""
        return labels.masked_fill(tokens == self.eod_id, IGNORE_INDEX) if self.mask_eod_loss else labels

    def documents(
        self, tokens: Tensor, dtype: torch.dtype, on_host: Tensor | None = None
    ) -> Documents | None:
        """The documents of tokens [B, S], on their device; `dtype` is the activations'.

        `on_host` are the same tokens on the host, for counting lengths without waiting for the device.
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
    """Position of each token in its document: bool [B, S], True at its last token -> int64 [B, S]."""
    positions = torch.arange(ends.shape[1], device=ends.device)
    begins = torch.where(_document_begins(ends), positions, 0).cummax(dim=1).values
    return positions - begins


def document_spans(ends: Tensor, dtype: torch.dtype) -> Spans:
    """Spans of documents whose last tokens `ends` marks, bool [B, S]."""
    if ends.device.type != "cpu":
        return Spans((), document_bias(ends, dtype))
    edges = [[0, *begins.nonzero().flatten().tolist(), len(begins)] for begins in _document_begins(ends)]
    return Spans(tuple(tuple(end - begin for begin, end in pairwise(sample)) for sample in edges))


def padding_spans(lengths: Tensor, width: int, dtype: torch.dtype, device: torch.device) -> Spans | None:
    """Return spans that hide the padding after sequences; None if there is no padding.

    `lengths` are [B] int64 on the host, `width` is S, `dtype` and `device` are the activations'.
    """
    if int(lengths.min()) == width:
        return None
    if packs(device):
        return Spans((), packing=build_packing([[length] for length in lengths.tolist()], device))
    is_padding = torch.arange(width) >= lengths[:, None]  # [B, S]
    bias = torch.zeros(is_padding.shape, dtype=dtype).masked_fill_(is_padding, -math.inf)
    return Spans((), to_device(bias[:, None, None], device))


def document_bias(ends: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for each token and those before it in its document, else -inf: bool [B, S] -> [B, 1, S, S]."""
    numbers = _document_begins(ends).cumsum(dim=1)  # document of each token
    attends = (numbers[:, :, None] == numbers[:, None, :]).tril()
    bias = torch.zeros(attends.shape, dtype=dtype, device=ends.device)
    return bias.masked_fill_(~attends, -math.inf).unsqueeze(1)


def _document_begins(ends: Tensor) -> Tensor:
    """True at tokens right after the end of a document: bool [B, S]."""
    begins = ends.roll(1, dims=1)
    begins[:, 0] = False
    return begins
