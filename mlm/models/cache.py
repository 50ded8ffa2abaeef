"""Keys and values of what a model has read, so that a text's next token costs the work of one token.

A cache has a row per text. A token's column is its position, so texts of any lengths lie side by side without
padding before them, and nothing a row has not read yet is seen: it lies after the row's end. A pass either
fills rows from their beginning, or reads one more token of each.

Shapes: S sequence, B texts of a pass, H hidden, N heads, K heads of keys and values (of grouped queries
fewer than N: they are cached as they are, not repeated), D head_dim, L columns, t = tensor-parallel size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.models.documents import Documents

FIRST_COLUMNS = 64
"""Columns of a new cache at least; each time they do not suffice, they are doubled."""


class KeyValueCache:
    """Keys and values of the layers that this rank holds; rows and columns are made when first written.

    Attributes:
        max_rows, max_columns: never more than these; max_columns is the model's max_positions.
    """

    def __init__(self, max_rows: int, max_columns: int) -> None:
        self.max_rows, self.max_columns = max_rows, max_columns
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(
        self, number: int, like: Tensor, columns: int, *, shared: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [max_rows, K/t, L, D] with L >= `columns`; `like` is [B, K/t, S, D].

        With `shared` both are one tensor. What was never written is 0: it is masked, and no mask hides a NaN.
        """
        assert columns <= self.max_columns
        held = self._layers.get(number)
        if held is not None and held[0].shape[2] >= columns:
            return held
        room = max(columns, FIRST_COLUMNS if held is None else 2 * held[0].shape[2])
        shape = (self.max_rows, like.shape[1], min(self.max_columns, room), like.shape[3])
        keys = like.new_zeros(shape)
        made = keys, keys if shared else like.new_zeros(shape)
        for new, old in zip(made, held or (), strict=False):
            new[:, :, : old.shape[2]] = old
        self._layers[number] = made
        return made

    def move(self, source: int, target: int, columns: int) -> None:
        """Let row `target` be what the first `columns` of row `source` are."""
        for pair in self._layers.values():
            for held in pair:
                held[target, :, :columns] = held[source, :, :columns]


@dataclass(frozen=True, eq=False)
class PrefillPass:
    """A pass that reads sequences from their beginning: tokens [B, S], shorter ones padded on the right.

    Attention is causal, so no token sees the padding; what it writes is written over before it is seen.
    """

    cache: KeyValueCache
    rows: Sequence[int]
    """Rows of the B sequences in the cache."""

    documents: None = None
    wants_logits = False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        """Queries [B, N/t, S, D], keys and values [B, K/t, S, D] -> [S, B, H/t], keeping keys and values.

        With a `window` a token attends to that many, itself included.
        """
        self.keep(layer, k, v)
        return merge_heads(causal_attention(q, k, v, window=window))

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Cache keys and values [B, K/t, S, D]; once, where they are one tensor."""
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
        """`columns[b]`, the position of row b's token, is how many tokens of it were read before.

        `dtype` is that of activations.
        """
        self.cache, self.count, self.columns = cache, len(columns), max(columns) + 1
        places = torch.tensor(columns, device=device)  # [B]
        self.documents = Documents(positions=places.unsqueeze(1), spans=None)
        self._places: tuple[Tensor | slice, slice, Tensor | int]
        self._positions, self._dtype = places, dtype
        self._biases: dict[int, Tensor | None] = {}
        if min(columns) == max(columns):
            self._places = slice(self.count), slice(None), columns[0]
            self._biases[0] = None
            return
        self._places = torch.arange(self.count, device=device), slice(None), places

    def bias(self, window: int) -> Tensor | None:
        """0 for the columns that each row's token attends to, else -inf: [B, 1, 1, L]; None if it is all."""
        window = 0 if window >= self.columns else window
        if window not in self._biases:
            places = self._positions.unsqueeze(1)
            columns = torch.arange(self.columns, device=places.device)
            hidden = columns > places  # [B, L]: not read yet
            if window:
                hidden |= columns <= places - window
            bias = torch.zeros(hidden.shape, dtype=self._dtype, device=places.device)
            self._biases[window] = bias.masked_fill_(hidden, -math.inf)[:, None, None]
        return self._biases[window]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
        """Queries [B, N/t, 1, D], keys and values [B, K/t, 1, D] -> [1, B, H/t]."""
        keys, values = self.cache.layer(layer, k, self.columns, shared=v is k)
        keys[self._places], values[self._places] = k.squeeze(2), v.squeeze(2)
        keys, values = keys[: self.count, :, : self.columns], values[: self.count, :, : self.columns]
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=self.bias(window), enable_gqa=grouped)
        return merge_heads(y)


Reading = PrefillPass | DecodePass


def split_heads(qkv: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of [S, B, 3H/t], each [B, N/t, S, D]."""
    s, b, _ = qkv.shape
    q, k, v = qkv.view(s, b, -1, 3, head_dim).permute(3, 1, 2, 0, 4).unbind(0)
    return q, k, v


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int = 0, p: float = 0.0) -> Tensor:
    """Attention of each token to those before it: [B, N/t, S, D], keys and values [B, K/t, S, D].

    Heads of keys and values are not repeated for the queries that share them. With a `window` a token attends
    to that many, itself included. Probabilities are dropped with probability p.
    """
    length, grouped = q.shape[2], q.shape[1] != k.shape[1]
    mask = window_mask(length, window, q.device) if 0 < window < length else None
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None, enable_gqa=grouped
    )


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """True where a token attends: to the `window` tokens up to itself, bool [S, S]."""
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window)


def merge_heads(y: Tensor) -> Tensor:
    """[B, N/t, S, D] -> [S, B, H/t]."""
    return y.permute(2, 0, 1, 3).flatten(2)
