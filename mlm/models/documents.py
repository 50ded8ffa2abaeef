"""Documents inside a sample: where one ends, and what restarts after it.

A document ends with its end-of-document token. Megatron-LM's three switches, each on its own:
--reset-position-ids, --reset-attention-mask and --eod-mask-loss (`_get_ltor_masks_and_position_ids` in
megatron/core/datasets/gpt_dataset.py says what they do; this is our own code for it).

A bias on the scores that hides padding, or other documents, forbids flash kernels. With a `Packing` the
tokens that count are gathered, sequence by sequence, and the kernel is given where each begins: it computes
the squares of the lengths rather than of S, and padding goes through no kernel. Gathering and putting back
move 18 bytes for each element of H and token forward, and 22 backward, in half precision.

Shapes: S sequence, B micro-batch, H hidden, N heads, D head_dim, t = tensor-parallel size, T tokens that
count.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.parallel.collectives import to_device
from mlm.parallel.compute_state import skip_compile
from mlm.parallel.config import IGNORE_INDEX

_switch: list[bool] = []


@dataclass(frozen=True, eq=False)
class Packing:
    """Places of the sequences of a micro-batch, packed."""

    rows: Tensor
    """int64 [T]: rows of the flattened [S * B, ...], sequence by sequence; each once."""
    begins: Tensor
    """int32 [sequences + 1]: the first packed token of each sequence, and T."""
    longest: int
    """Tokens of the longest."""


def pack_sequences(on: bool) -> None:
    """Let the spans of this process be packed, or not: a choice of kernels, as in mlm/training/kernels.py."""
    _switch[:] = [True] if on else []


def packs(device: torch.device) -> bool:
    """True if spans are packed on a device."""
    return bool(_switch) and device.type == "cuda"


def build_packing(lengths: Sequence[Sequence[int]], device: torch.device) -> Packing:
    """Packing of sequences one after the other in each sample; what follows the last is padding.

    `lengths` has those of each of the B samples.
    """
    samples = len(lengths)
    rows = [torch.arange(sum(each)) * samples + b for b, each in enumerate(lengths)]  # row s * B + b
    flat = [length for each in lengths for length in each]
    begins = torch.tensor([0, *accumulate(flat)], dtype=torch.int32)
    return Packing(to_device(torch.cat(rows), device), to_device(begins, device), max(flat))


class _Take(torch.autograd.Function):
    """Some rows of a matrix, each once; the gradient of the others is zero."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = len(x)  # type: ignore[attr-defined]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return dy.new_zeros(ctx.size, dy.shape[1]).index_copy_(0, rows, dy), None  # type: ignore[attr-defined]


class _Put(torch.autograd.Function):
    """The reverse: rows of a matrix of zeros."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, rows: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(rows)
        return x.new_zeros(size, x.shape[1]).index_copy_(0, rows, x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return dy.index_select(0, rows), None, None


@skip_compile  # the number of tokens differs from batch to batch: each would be compiled anew
def packed_attention(qkv: Tensor, head_dim: int, packing: Packing, causal: bool) -> Tensor:
    """Attention within each packed sequence: [S, B, 3H/t] -> [S, B, H/t], 0 for padding."""
    from torch.nn.attention.varlen import varlen_attn  # loads the kernels' registration

    s, b, _ = qkv.shape
    tokens: Tensor = _Take.apply(qkv.view(s * b, -1), packing.rows)  # type: ignore[no-untyped-call]
    q, k, v = tokens.view(len(packing.rows), -1, 3, head_dim).unbind(2)  # each [T, N/t, D]
    y = varlen_attn(
        q,
        k,
        v,
        packing.begins,
        packing.begins,
        packing.longest,
        packing.longest,
        window_size=(-1, 0) if causal else (-1, -1),
    )
    assert isinstance(y, Tensor)  # no auxiliary results were asked for
    whole: Tensor = _Put.apply(y.flatten(1), packing.rows, s * b)  # type: ignore[no-untyped-call]
    return whole.view(s, b, -1)


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
