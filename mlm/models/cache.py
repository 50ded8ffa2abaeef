"""Cache of keys and values, so that a text's next token costs the work of one token.

A cache has a row per text. A token's column is its position, so texts of any lengths need no padding on the
left, and columns after a row's end are masked. A pass either fills rows from their beginning, or reads one
more token of each.

Shapes: S sequence, B texts of a pass, H hidden, N heads, K heads of keys and values (of grouped queries
fewer than N: they are cached as they are, not repeated), D head_dim, L columns, t = tensor-parallel size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.models.documents import Documents
from mlm.parallel.config import PLAIN_SCORES, AttentionScores

FIRST_COLUMNS = 64
"""Minimum columns of a new cache, doubled when they do not suffice."""


class KeyValueCache:
    """Keys and values of the layers that this rank holds, allocated when first written.

    `max_columns` is the model's max_positions.
    """

    def __init__(self, max_rows: int, max_columns: int) -> None:
        self.max_rows, self.max_columns = max_rows, max_columns
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(
        self, number: int, like: Tensor, columns: int, *, shared: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [max_rows, K/t, L, D] with L >= `columns`; `like` is [B, K/t, S, D].

        With `shared` both are one tensor. Unwritten columns are 0: they are masked, and no mask hides a NaN.
        """
        assert columns <= self.max_columns
        cached = self._layers.get(number)
        if cached is not None and cached[0].shape[2] >= columns:
            return cached
        room = max(columns, FIRST_COLUMNS if cached is None else 2 * cached[0].shape[2])
        shape = (self.max_rows, like.shape[1], min(self.max_columns, room), like.shape[3])
        keys = like.new_zeros(shape)
        grown = keys, keys if shared else like.new_zeros(shape)
        for new, old in zip(grown, cached or (), strict=False):
            new[:, :, : old.shape[2]] = old
        self._layers[number] = grown
        return grown

    def move(self, source: int, target: int, columns: int) -> None:
        """Copy the first `columns` of row `source` to row `target`."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :, :columns] = tensor[source, :, :columns]


@dataclass(frozen=True, eq=False)
class PrefillPass:
    """A pass that reads sequences from their beginning: tokens [B, S], shorter ones padded on the right.

    Attention is causal, so no token sees the padding; its columns are overwritten before they are seen.
    """

    cache: KeyValueCache
    rows: Sequence[int]
    """Rows of the B sequences in the cache."""
    lengths: Sequence[int] | None = None
    """Tokens of each sequence, the one read after the pass included; None for S."""

    documents: None = None
    wants_logits = False

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: AttentionScores = PLAIN_SCORES
    ) -> Tensor:
        """Queries [B, N/t, S, D], keys and values [B, K/t, S, D] -> [S, B, H/t], keeping keys and values."""
        self.keep(layer, k, v)
        return merge_heads(causal_attention(q, k, v, scores))

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Cache keys and values [B, K/t, S, D]; one copy if they are one tensor."""
        length = k.shape[2]
        keys, values = self.cache.layer(layer, k, length, shared=v is k)
        for number, row in enumerate(self.rows):
            keys[row, :, :length], values[row, :, :length] = k[number], v[number]


class DecodePass:
    """A pass that reads one more token of each of the cache's first B rows: tokens [B, 1]."""

    wants_logits = True

    def __init__(
        self, cache: KeyValueCache, columns: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`columns[b]` is the position of row b's token; `dtype` is the activations'."""
        self.cache, self.count, self.columns = cache, len(columns), max(columns) + 1
        self._positions, self._dtype = torch.tensor(columns, device=device), dtype  # [B]
        self.lengths = [column + 1 for column in columns]
        self.documents = Documents(positions=self._positions.unsqueeze(1), spans=None)
        self._biases: dict[int, Tensor | None] = {}
        self._entries: tuple[Tensor | slice, slice, Tensor | int]
        if min(columns) == max(columns):
            self._entries = slice(self.count), slice(None), columns[0]
            self._biases[0] = None
        else:
            self._entries = torch.arange(self.count, device=device), slice(None), self._positions

    def bias(self, window: int) -> Tensor | None:
        """0 for the columns that each row's token attends to, else -inf: [B, 1, 1, L]; None for all."""
        window = 0 if window >= self.columns else window
        if window not in self._biases:
            positions = self._positions.unsqueeze(1)
            columns = torch.arange(self.columns, device=positions.device)
            hidden = columns > positions  # [B, L]
            if window:
                hidden |= columns <= positions - window
            bias = torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device)
            self._biases[window] = bias.masked_fill_(hidden, -math.inf)[:, None, None]
        return self._biases[window]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: AttentionScores = PLAIN_SCORES,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Queries [B, N/t, 1, D], keys and values [B, K/t, 1, D], sinks [N/t] -> [1, B, H/t]."""
        keys, values = self.cache.layer(layer, k, self.columns, shared=v is k)
        keys[self._entries], values[self._entries] = k.squeeze(2), v.squeeze(2)
        keys, values = keys[: self.count, :, : self.columns], values[: self.count, :, : self.columns]
        bias = self.bias(scores.window)
        if scores.softcap or sinks is not None:
            return merge_heads(unfused_attention(q, keys, values, scores, bias, sinks))
        y = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=bias, enable_gqa=q.shape[1] != k.shape[1], scale=scores.scale
        )
        return merge_heads(y)


Reading = PrefillPass | DecodePass


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scores: AttentionScores = PLAIN_SCORES, *, p: float = 0.0
) -> Tensor:
    """Causal attention by PyTorch's kernel: queries [B, N/t, S, D], keys and values [B, K/t, S, D].

    p is the probability of dropping a score. Without softcap, which the kernel lacks.
    """
    assert not scores.softcap
    length, grouped = q.shape[2], q.shape[1] != k.shape[1]
    mask = window_mask(length, scores.window, q.device) if scores.hides(length) else None
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None, enable_gqa=grouped, scale=scores.scale
    )


def unfused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: AttentionScores,
    bias: Tensor | None,
    sinks: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] = lambda p: p,
) -> Tensor:
    """Unfused attention, `bias` added to the capped scores: for a query at a time, or dropout.

    Queries [B, N/t, S, D], keys and values [B, K/t, L, D], bias of shapes that expand to [B, 1, S, L];
    `sinks` [N/t] are logits of a key without a value; `drop` takes probabilities [B N/t, S, L].
    """
    b, n, s, width = q.shape
    k, v = (x.repeat_interleave(n // x.shape[1], dim=1) for x in (k, v))
    scale = scores.factor(width)
    x = (q @ k.transpose(2, 3)) * scale  # [B, N/t, S, L]
    x = torch.tanh(x / scores.softcap) * scores.softcap if scores.softcap else x
    x = x if bias is None else x + bias
    if sinks is None:
        p = torch.softmax(x, -1)
    else:
        column = sinks.to(x.dtype).view(1, n, 1, 1).expand(b, n, s, 1)
        p = torch.softmax(torch.cat([x, column], -1), -1)[..., :-1]
    return drop(p.flatten(0, 1)).view(b, n, s, -1) @ v


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """True for the `window` tokens up to each token itself: bool [S, S]."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance < window)


def merge_heads(y: Tensor) -> Tensor:
    """[B, N/t, S, D] -> [S, B, H/t]."""
    return y.permute(2, 0, 1, 3).flatten(2)
