"""Self-attention with its heads split over the tensor-parallel ranks, causal where its family is.

Shapes: S sequence, B micro-batch, H hidden, N heads, D head_dim, t = tensor-parallel size.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlm.models.blocked_attention import FUSED, causal_attention_in_blocks, uses_blocks
from mlm.models.cache import Reading, merge_heads
from mlm.models.config import ModelConfig
from mlm.models.documents import Spans, packed_attention
from mlm.models.family import family_of
from mlm.models.rotary import Rotary
from mlm.models.shape import architecture_of
from mlm.parallel.compute_state import skip_compile
from mlm.parallel.context import context_attention
from mlm.parallel.dropout import DropoutStream, site_keys
from mlm.parallel.layers import ColumnParallelLinear, FusedRows, RowParallelLinear
from mlm.parallel.mesh import Axis


class SelfAttention(nn.Module):
    """Multi-head self-attention (arXiv:1909.08053, section 3, figure 3b).

    The rows of the fused qkv weight are ordered `[head][q, k, v][head_dim]`: a contiguous split at any tp
    that divides num_heads gives whole heads.
    """

    dropout_keys: Tensor
    """Keys of its dropout masks, int32 [1, 2]."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer: int,
        tp: Axis,
        sequence_parallel: bool = False,
        recompute: bool = False,
        cp: Axis | None = None,
    ) -> None:
        super().__init__()
        parts = architecture_of(config)
        self.tp, self.cp = tp, cp or Axis("cp")
        if config.num_heads % tp.size:
            raise ValueError(f"num_heads={config.num_heads} must be divisible by tp={tp.size}")
        self.layer, self.recompute, self.causal = layer, recompute, family_of(config.kind).causal
        self.head_dim, self.dropout = parts.head_dim, config.attention_dropout
        self.scores = parts.scores(layer)
        self.first_head = tp.rank * config.num_heads // tp.size
        self.register_buffer("dropout_keys", site_keys([(layer, "attention")]), persistent=False)
        self._add_projections(config, sequence_parallel)
        self.out = RowParallelLinear(
            config.num_heads * parts.values_dim,
            config.hidden_size,
            tp=tp,
            sequence_parallel=sequence_parallel,
            init_std=config.hidden_std / math.sqrt(2 * config.num_layers),
            init_seed=None,
            bias=parts.bias,
        )

    def _add_projections(self, config: ModelConfig, sequence_parallel: bool) -> None:
        """Add the modules that `project` uses."""
        h = config.hidden_size
        self.qkv = ColumnParallelLinear(
            h,
            3 * h,
            tp=self.tp,
            sequence_parallel=sequence_parallel,
            init_std=config.hidden_std,
            init_seed=None,
        )
        self.qkv.fused_rows = FusedRows(3, self.head_dim, are_heads=True)

    def forward(
        self,
        x: Tensor,
        stream: DropoutStream | None,
        spans: Spans | None = None,
        reading: Reading | None = None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """[S, B, H] -> [S, B, H], or [S/t, B, H] with sequence parallelism; S/c tokens over c = cp ranks.

        `stream` is None without dropout (evaluation). With `spans` each document attends to itself alone, or
        no token to padding; with `reading` tokens attend to the cached ones of their sequences. `rotary`
        rotates queries and keys by their positions.
        """
        if reading is not None:
            attended = self.attend_cached(x, rotary, reading)
        else:
            qkv = self.project(x, rotary)  # [S, B, 3H/t]: all of S, also with sequence parallelism
            attended = self.values(self.attend(qkv, stream, spans, self.first_head))
        y: Tensor = self.out(attended)
        return y

    def attend(
        self, qkv: Tensor, stream: DropoutStream | None, spans: Spans | None, first_head: int
    ) -> Tensor:
        """Attention of heads from `first_head` on: `project`, or a part of it -> the input of `values`."""
        if self.cp.parts > 1:
            assert self.causal
            assert spans is None, "checked with the configuration"
            return self._across_ranks(qkv, stream, first_head)
        if stream is None or self.dropout == 0:
            return self._fused(qkv, 0.0, spans)
        if qkv.is_cpu:
            return self._unfused(qkv, stream, spans, first_head)
        return self._with_drawn_masks(qkv, stream, spans)

    @property
    def sink_logits(self) -> Tensor | None:
        """Attention-sink logits of this rank's heads, [n]: they take probability without a value."""
        return None

    def project(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """Queries, keys and values in one tensor, for all of S also with sequence parallelism."""
        qkv: Tensor = self.qkv(x)
        return qkv

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `project`, each [B, heads, S, D]."""
        q, k, v = qkv.unflatten(-1, (-1, 3, self.head_dim)).permute(3, 1, 2, 0, 4).unbind(0)
        return q, k, v

    def parts(self, qkv: Tensor, count: int) -> tuple[Tensor, ...]:
        """Split `project` into the shares of `count` tp ranks."""
        return qkv.chunk(count, dim=-1)

    def fused(self, qkv: Tensor, p: float, bias: Tensor | None, causal: bool) -> Tensor:
        """Attention by PyTorch's best kernel, dropping probabilities with probability p."""
        if causal and p == 0 and bias is None and uses_blocks(qkv):
            return causal_attention_in_blocks(qkv.unflatten(-1, (-1, self.head_dim)), FUSED)
        return fused_attention(qkv, self.head_dim, p, bias, causal)

    def unfused(
        self, qkv: Tensor, drop: Callable[[Tensor], Tensor], bias: Tensor | None, causal: bool
    ) -> Tensor:
        """Attention with `drop` of the probabilities."""
        return unfused_attention(qkv, self.head_dim, drop, bias, causal)

    def attend_cached(self, x: Tensor, rotary: Rotary | None, reading: Reading) -> Tensor:
        """Attention of the tokens of a pass to all earlier ones: [S, B, H] -> the input of `out`."""
        return reading.attend(self.layer, *self.heads(self.project(x, rotary)), self.scores)

    def values(self, attended: Tensor) -> Tensor:
        """Input of `out` from the kernels' output, [S, B, N/t D]."""
        return attended

    @skip_compile  # asynchronous communication cannot be traced
    def _across_ranks(self, qkv: Tensor, stream: DropoutStream | None, first_head: int) -> Tensor:
        q, k, v = self.heads(qkv)

        def drop(x: Tensor, heads: range, rows: Tensor, columns: Tensor) -> Tensor:
            assert stream is not None
            return stream.probabilities_at(
                x,
                self.dropout,
                self.dropout_keys[0],
                length=q.shape[2] * self.cp.size,
                heads=range(first_head + heads.start, first_head + heads.stop),
                rows=rows,
                columns=columns,
            )

        drops = drop if stream is not None and self.dropout > 0 else None
        y = context_attention(q, k, v, self.cp, scores=self.scores, drop=drops, sinks=self.sink_logits)
        return merge_heads(y)

    def _fused(self, qkv: Tensor, p: float, spans: Spans | None) -> Tensor:
        # the kernel's masks do not depend on the row in a sample
        def attention(qkv: Tensor, bias: Tensor | None = None, causal: bool = True, **_: int) -> Tensor:
            return self.fused(qkv, p, bias, causal)

        return self._attend_spans(spans, attention, qkv)

    @skip_compile  # a compiler draws other random numbers
    def _with_drawn_masks(self, qkv: Tensor, stream: DropoutStream, spans: Spans | None) -> Tensor:
        """Attention in a kernel that draws its masks, for each tp rank that this process stands for."""
        results = []
        for rank, part in zip(stream.split_parts, self.parts(qkv, len(stream.split_parts)), strict=True):
            stream.seed_kernel(self.layer, rank)
            results.append(self._fused(part.contiguous(), self.dropout, spans))
        return results[0] if len(results) == 1 else torch.cat(results, dim=-1)

    def _unfused(self, qkv: Tensor, stream: DropoutStream, spans: Spans | None, first_head: int) -> Tensor:
        """Attention with dropout on a CPU, for which PyTorch has no fused kernel."""
        drop = partial(
            stream.probabilities,
            p=self.dropout,
            site_key=self.dropout_keys[0],
            length=qkv.shape[0],
            first_head=first_head,
        )

        def attention(qkv: Tensor, bias: Tensor | None = None, causal: bool = True, **part: int) -> Tensor:
            return self.unfused(qkv, partial(drop, **part), bias, causal)

        def core(qkv: Tensor) -> Tensor:
            return self._attend_spans(spans, attention, qkv)

        if self.recompute and torch.is_grad_enabled():
            # unlike fused kernels, this keeps tensors of size S * S for backward
            y: Tensor = checkpoint(core, qkv, use_reentrant=False, preserve_rng_state=False)
            return y
        return core(qkv)

    def _attend_spans(self, spans: Spans | None, attention: Callable[..., Tensor], qkv: Tensor) -> Tensor:
        """`attention` within each document, whose sample and first row it receives."""
        if spans is None:
            return attention(qkv, causal=self.causal)
        if spans.packing is not None:  # kernels without dropout
            return packed_attention(qkv, self.head_dim, spans.packing, self.causal)
        if spans.bias is not None:
            return attention(qkv, bias=spans.bias, causal=False)
        return spans.attend(
            lambda document, sample, first: attention(
                document, causal=self.causal, sample=sample, first_row=first
            ),
            qkv,
        )


def fused_attention(
    qkv: Tensor, head_dim: int, p: float, bias: Tensor | None = None, causal: bool = True
) -> Tensor:
    """Attention by PyTorch's best kernel: [S, B, 3H/t] -> [S, B, H/t].

    `bias`, [B, 1, S, S] or [B, 1, 1, S], is added to the scores if not causal.
    """
    s, b, _ = qkv.shape
    # split before transposed: backward writes the three gradients once, in the order of the qkv product
    parts = qkv.view(s, b, -1, 3, head_dim).unbind(3)  # each [S, B, N/t, D]
    q, k, v = (x.permute(1, 2, 0, 3) for x in parts)  # each [B, N/t, S, D]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p, is_causal=causal)
    return y.permute(2, 0, 1, 3).reshape(s, b, -1)  # from [B, N/t, S, D]


def unfused_attention(
    qkv: Tensor,
    head_dim: int,
    drop: Callable[[Tensor], Tensor],
    bias: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """drop(softmax(q k^T / sqrt(D))) v: [S, B, 3H/t] -> [S, B, H/t].

    `drop` takes the probabilities [B * N/t, S, S]. With dropout five bytes per score are kept for backward in
    half precision: probabilities, mask, and their product (arXiv:2205.05198, section 4.1). `bias` and
    `causal` as in `fused_attention`.
    """
    s, b, _ = qkv.shape
    heads = qkv.reshape(s, -1, 3, head_dim)  # [S, B * N/t, 3, D]
    q, k, v = (x.transpose(0, 1) for x in heads.unbind(2))  # each [B * N/t, S, D], views
    if causal:
        added = torch.full((s, s), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
    elif bias is not None:  # a sequence's heads are adjacent
        added = bias.expand(b, heads.shape[1] // b, -1, s).flatten(0, 1)  # [B * N/t, 1 or S, S]
    else:
        added = q.new_zeros(())
    scores = torch.baddbmm(added, q, k.transpose(1, 2), alpha=1 / math.sqrt(head_dim))  # [B * N/t, S, S]
    y = torch.bmm(drop(torch.softmax(scores, -1)), v)  # [B * N/t, S, D]
    return y.transpose(0, 1).reshape(s, b, -1)
