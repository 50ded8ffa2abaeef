"""GPT-2, its layers split over the tensor-parallel ranks.

Shapes: S sequence, B micro-batch, H hidden, V padded vocabulary, t = tensor-parallel size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlm.config.schema import ModelConfig
from mlm.models.transformer import LayerNorm, TransformerLayer
from mlm.parallel.collectives import copy_to_tp
from mlm.parallel.cross_entropy import full_logits, linear_cross_entropy, token_losses
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis
from mlm.parallel.random import DropoutStream


class PositionEmbedding(nn.Module):
    """Learned position table [max_positions, H], replicated over tp."""

    def __init__(self, max_positions: int, hidden_size: int, *, init_std: float) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(max_positions, hidden_size))

    def forward(self, seq_length: int) -> Tensor:
        """[S, 1, H] of the first S positions."""
        return self.weight[:seq_length].unsqueeze(1)


class GPT2(nn.Module):
    """Decoder-only transformer with learned positions and an output layer tied to the token table.

    Parameters are kept in float32 (or float64); activations are of `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: Axis,
        dtype: torch.dtype = torch.float32,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        self.config, self.tp, self.dtype, self.recompute = config, tp, dtype, recompute
        self.token = VocabParallelEmbedding(
            config.vocab_size,
            config.padded_vocab_size(tp.size),
            config.hidden_size,
            tp=tp,
            init_std=config.init_std,
        )
        self.position = PositionEmbedding(config.max_positions, config.hidden_size, init_std=config.init_std)
        self.layers = nn.ModuleList(
            TransformerLayer(config, layer=n, tp=tp) for n in range(config.num_layers)
        )
        self.final_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def hidden_states(self, tokens: Tensor, dropout: DropoutStream | None = None) -> Tensor:
        """Final hidden states, normed: tokens [B, S] -> [S, B, H]."""
        x = self.token(tokens.t()) + self.position(tokens.shape[1])
        x = x.to(self.dtype)
        if dropout is not None and self.config.hidden_dropout > 0:
            dropout.enter(-1, "embedding")
            x = F.dropout(x, self.config.hidden_dropout)
        for layer in self.layers:
            if self.recompute == "full" and torch.is_grad_enabled():
                # masks are functions of the stream and the layer: no generator state to stash and restore
                x = checkpoint(layer, x, dropout, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, dropout)
        return self.final_norm(x)

    def forward(
        self, tokens: Tensor, labels: Tensor, scale: Tensor, dropout: DropoutStream | None = None
    ) -> Tensor:
        """scale * sum of the token losses of a micro-batch; the form training differentiates.

        Args:
            tokens, labels: [B, S] int64; labels of -100 are not scored.
            scale: 0-d float tensor.
        """
        h = copy_to_tp(self.hidden_states(tokens, dropout), self.tp)
        return linear_cross_entropy(h.flatten(0, 1), labels.t().flatten(), self.token, scale)

    @torch.no_grad()
    def losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Each token's loss without dropout or gradients: [B, S], [B, S] -> [B, S]."""
        h = self.hidden_states(tokens)
        losses = token_losses(h.flatten(0, 1), labels.t().flatten(), self.token)
        return losses.view(h.shape[0], h.shape[1]).t()

    @torch.no_grad()
    def last_logits(self, tokens: Tensor) -> Tensor:
        """Logits of the token after the last: [B, S] -> [B, vocab_size], on every tp rank."""
        return full_logits(self.hidden_states(tokens)[-1], self.token)
