"""Multi-head latent attention: keys and values of all heads from one narrow latent vector of each token.

Source: DeepSeek-V2 (arXiv:2405.04434, section 2.1), as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.1).

Down projections from hidden states to latents are replicated over tp, up projections from latents to heads
are split by heads. Generation caches only the latents: the up projections move to the other side of the
scores, q^T (W c) = (W^T q)^T c, and all heads attend to one head of latents.

Shapes: S sequence, B micro-batch, H hidden, N heads, t = tensor-parallel size, n = N/t heads of this rank.
Widths of a head: R rotated dimensions, P others, D = R + P of queries and keys, W of values; Q and C of the
latents of queries and of keys with values.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.models.cache import PrefillPass, Reading
from mlm.models.config import ModelConfig
from mlm.models.heads import PlainLinear
from mlm.models.llama.attention import GroupedQueryAttention
from mlm.models.llama.settings import LlamaSettings
from mlm.models.norms import RMSNorm
from mlm.models.rotary import Rotary
from mlm.parallel.collectives import copy_to_tp, gather_sequence
from mlm.parallel.layers import ColumnParallelLinear

LATENT_EPS = 1e-6
"""Added to the mean squares of latents, independent of model.layer_norm_eps, as in DeepSeek's code."""


class LatentAttention(GroupedQueryAttention):
    """Attention whose keys and values come from a latent vector (model.options.kv_lora_rank).

    Rows of the weights: `query` [head][R, P], `kv` [head][P, W], `kv_down` [C, R]. All heads share the R
    rotated dimensions of keys. Values are padded to D, as kernels take one width.
    """

    def _add_projections(self, config: ModelConfig, sequence_parallel: bool) -> None:
        settings, h = LlamaSettings.of(config), config.hidden_size
        self.sequence_parallel = sequence_parallel and self.tp.size > 1
        self.rope_dim, self.plain_dim = settings.rope_head_dim, self.head_dim - settings.rope_head_dim
        self.value_dim, self.latent_dim = settings.v_head_dim, settings.kv_lora_rank
        self.kv_heads = config.num_heads // self.tp.size
        self.score_factor, self.sinks = settings.score_factor, None

        def up(rank: int, head: int) -> ColumnParallelLinear:
            projection = ColumnParallelLinear(
                rank or h,
                config.num_heads * head,
                tp=self.tp,
                sequence_parallel=sequence_parallel,
                init_std=config.init_std if rank else config.hidden_std,
                init_seed=None,
                bias=False,
            )
            if rank:
                projection.constant_sides = {"weight": "in"}
            return projection

        def down(rank: int) -> PlainLinear:
            projection = PlainLinear(h, rank, init_std=config.hidden_std, bias=False)
            projection.constant_sides = {"weight": "out"}
            return projection

        rank = settings.q_lora_rank
        if rank:
            self.query_down = down(rank)
            self.query_down_norm = RMSNorm(rank, eps=LATENT_EPS)
        self.query = up(rank, self.head_dim)
        self.kv_down = down(self.latent_dim + self.rope_dim)
        self.kv_down_norm = RMSNorm(self.latent_dim, eps=LATENT_EPS)
        self.kv = up(self.latent_dim, self.plain_dim + self.value_dim)

    def project(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """Queries, keys and padded values: [S, B, 3 n D], ordered [q | k | v]; of all S."""
        return self._expand(*self._latents(x, rotary))

    def _latents(self, x: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [S, B, n, D], the latents that `kv` takes, [S or S/t, B, C], and rotated keys [S, B, 1, R].

        With sequence parallelism x and the latents are this rank's rows.
        """
        assert rotary is not None
        y = self.query_down_norm(self.query_down(x)) if hasattr(self, "query_down") else x
        q = self.query(y).unflatten(-1, (-1, self.head_dim))
        latent, keys = self.kv_down(x).split([self.latent_dim, self.rope_dim], dim=-1)
        # f: keys shared by all heads have partial gradients from this rank's heads
        keys = gather_sequence(keys, self.tp) if self.sequence_parallel else copy_to_tp(keys, self.tp)
        q = rotary.rotate(q)
        q = q if self.score_factor == 1 else q * self.score_factor
        return q, self.kv_down_norm(latent), rotary.rotate(keys.unsqueeze(2))

    def _expand(self, q: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
        """Return queries, keys and padded values of all heads from `_latents`."""
        kv: Tensor = self.kv(latent).unflatten(-1, (-1, self.plain_dim + self.value_dim))  # [S, B, n, P + W]
        plain, v = kv.split([self.plain_dim, self.value_dim], dim=-1)
        k = torch.cat([rotated.expand(-1, -1, kv.shape[2], -1), plain], dim=-1)
        return torch.cat([q, k, F.pad(v, (0, self.head_dim - self.value_dim))], dim=2).flatten(2)

    def values(self, attended: Tensor) -> Tensor:
        """Values without their padding: [S, B, n D] -> [S, B, n W]."""
        y: Tensor = attended.unflatten(-1, (-1, self.head_dim))[..., : self.value_dim].flatten(2)
        return y

    def attend_cached(self, x: Tensor, rotary: Rotary | None, reading: Reading) -> Tensor:
        """Attention to earlier tokens by their cached latents: [S, B, n W]."""
        q, latent, rotated = self._latents(x, rotary)
        cached = torch.cat([rotated, latent.unsqueeze(2)], dim=-1).permute(1, 2, 0, 3)  # [B, 1, S, R + C]
        if isinstance(reading, PrefillPass):
            reading.keep(self.layer, cached, cached)
            return self.values(self.fused(self._expand(q, latent, rotated), 0.0, None, True))
        weight = self.kv.weight_in(x.dtype).view(-1, self.plain_dim + self.value_dim, self.latent_dim)
        to_keys, to_values = weight.split([self.plain_dim, self.value_dim], dim=1)
        absorbed = torch.einsum("sbnp,npc->sbnc", q[..., self.rope_dim :], to_keys)
        # the kernel divides by the root of R + C, the scores by the root of D
        width = cached.shape[-1]
        q = torch.cat([q[..., : self.rope_dim], absorbed], dim=-1) * math.sqrt(width / self.head_dim)
        sums = reading.attend(self.layer, q.permute(1, 2, 0, 3), cached, cached)  # [S, B, n (R + C)]
        sums = sums.unflatten(-1, (-1, width))[..., self.rope_dim :]
        return torch.einsum("sbnc,nwc->sbnw", sums, to_values).flatten(2)
