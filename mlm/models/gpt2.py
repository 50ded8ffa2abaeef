"""GPT-2, its layers split over the tensor-parallel ranks and dealt out to pipeline stages.

Shapes: S sequence, B micro-batch, H hidden, V padded vocabulary, t = tensor-parallel size. Between layers and
stages the hidden states are [S, B, H], with sequence parallelism [S/t, B, H].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlm.config.model_schema import ModelConfig
from mlm.models.cache import Reading
from mlm.models.documents import Documents
from mlm.models.stage import Stage, split_layers
from mlm.models.transformer import LayerNorm, TransformerLayer
from mlm.parallel.collectives import copy_to_tp, gather_rows, gather_sequence
from mlm.parallel.cross_entropy import full_logits, linear_cross_entropy, token_losses, token_scores
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.mesh import Axis
from mlm.parallel.random import DropoutStream


class PositionEmbedding(nn.Module):
    """Learned position table [max_positions, H], replicated over tp."""

    def __init__(self, max_positions: int, hidden_size: int, *, init_std: float) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(max_positions, hidden_size))

    def forward(self, positions: range | Tensor) -> Tensor:
        """[len(positions), 1, H]; of positions int64 [S, B] that are each sample's own, [S, B, H]."""
        if isinstance(positions, Tensor):
            return F.embedding(positions, self.weight)
        return self.weight[positions.start : positions.stop].unsqueeze(1)


class GPT2(nn.Module):
    """Decoder-only transformer with learned positions and an output layer tied to the token table.

    One pipeline stage of it, or all: `token` and `position` are there in the first stage, `final_norm` and
    again `token` in the last. Parameters are kept in float32 (or float64); activations are of `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: Axis,
        dtype: torch.dtype = torch.float32,
        recompute: str = "none",
        sequence_parallel: bool = False,
        stage: Stage | None = None,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.dtype, self.recompute = config, tp, dtype, recompute
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.stage = stage = stage or split_layers(config.num_layers, 1)[0]
        h, std = config.hidden_size, config.init_std
        if stage.is_first or stage.is_last:
            self.token = VocabParallelEmbedding(
                config.vocab_size,
                config.padded_vocab_size(tp.size),
                h,
                tp=tp,
                sequence_parallel=self.sequence_parallel,
                is_tied_copy=not stage.is_first,
                init_std=std,
            )
        if stage.is_first:
            self.position = PositionEmbedding(config.max_positions, h, init_std=std)
        self.layers = nn.ModuleDict(
            {
                str(n): TransformerLayer(
                    config,
                    layer=n,
                    tp=tp,
                    sequence_parallel=self.sequence_parallel,
                    recompute_attention=recompute == "selective",
                )
                for n in stage.layers
            }
        )
        if stage.is_last:
            self.final_norm = LayerNorm(h, eps=config.layer_norm_eps)

    def boundary_shape(self, tokens: Tensor) -> tuple[int, int, int]:
        """Shape of the hidden states between stages for tokens [B, S]."""
        batch, length = tokens.shape
        return length // (self.tp.size if self.sequence_parallel else 1), batch, self.config.hidden_size

    def embed(
        self, tokens: Tensor, stream: DropoutStream | None, documents: Documents | None = None
    ) -> Tensor:
        """Tokens [B, S] -> hidden states before the first layer."""
        rows = self.boundary_shape(tokens)[0]
        first = self.tp.rank * rows if self.sequence_parallel else 0
        positions: range | Tensor = range(first, first + rows)
        if documents is not None and documents.positions is not None:
            positions = documents.positions.t()[first : first + rows]
        x = (self.token(tokens.t()) + self.position(positions)).to(self.dtype)
        return x if stream is None else stream.hidden(x, self.config.hidden_dropout, -1, "embedding")

    def hidden_states(
        self,
        tokens: Tensor,
        stream: DropoutStream | None = None,
        x: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Hidden states behind this stage's layers, normed in the last: tokens [B, S] for the first stage,
        the hidden states `x` of the stage before for the others."""
        x = self.embed(tokens, stream, documents) if x is None else x
        spans = None if documents is None else documents.spans
        for layer in self.layers.values():
            if self.recompute == "full" and torch.is_grad_enabled():
                # masks are functions of the stream and the layer: no generator state to stash and restore
                x = checkpoint(layer, x, stream, spans, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, stream, spans)
        return self.final_norm(x) if self.stage.is_last else x

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        scale: Tensor,
        stream: DropoutStream | None = None,
        x: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Last stage: scale * sum of a micro-batch's token losses, 0-d. Others: hidden states for the next.

        Args:
            tokens, labels: [B, S] int64; labels of -100 are not scored.
            scale: 0-d float tensor.
            x: hidden states of the stage before; None in the first stage.
            documents: those in the samples, where something begins anew with each; None where nothing does.
        """
        h = self.hidden_states(tokens, stream, x, documents)
        if not self.stage.is_last:
            return h
        h = gather_sequence(h, self.tp) if self.sequence_parallel else copy_to_tp(h, self.tp)
        return linear_cross_entropy(h.flatten(0, 1), labels.t().flatten(), self.token, scale)

    @torch.no_grad()
    def losses(
        self,
        tokens: Tensor,
        labels: Tensor,
        x: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Last stage: each token's loss without dropout or gradients, [B, S]. Others: hidden states."""
        h = self.hidden_states(tokens, None, x, documents)
        if not self.stage.is_last:
            return h
        h = gather_rows(h, self.tp) if self.sequence_parallel else h
        losses = token_losses(h.flatten(0, 1), labels.t().flatten(), self.token)
        return losses.view(h.shape[0], h.shape[1]).t()

    @torch.no_grad()
    def scores(self, tokens: Tensor, places: Tensor, labels: Tensor, x: Tensor | None = None) -> Tensor:
        """Last stage: the loss of `labels` after some of the tokens, and 1 where they are the most probable.
        Others: hidden states. Without sequence parallelism: texts have lengths that tp does not divide.

        Args:
            tokens: [B, S] int64.
            places, labels: [R] int64. A place is s * B + b: row b's token s, all before it as context; one
                place may have several labels. Only places go through the vocabulary projection.

        Returns:
            [2, R] float32 (float64 for float64), the same on every tp rank: see `token_scores`.
        """
        assert not self.sequence_parallel
        h = self.hidden_states(tokens, None, x)
        return token_scores(h.flatten(0, 1)[places], labels, self.token) if self.stage.is_last else h

    @torch.no_grad()
    def read(self, tokens: Tensor, reading: Reading, x: Tensor | None = None) -> Tensor:
        """Read on in the texts of a cache: tokens [B, S] for the first stage, the hidden states `x` of the
        stage before for the others. Without sequence parallelism: texts have lengths that tp does not divide.

        Last stage: logits of the tokens after these, [B, vocab_size], on every tp rank; where `reading` wants
        none, nothing [0]. Others: hidden states.
        """
        assert not self.sequence_parallel
        x = self.embed(tokens, None, reading.documents) if x is None else x
        for layer in self.layers.values():
            x = layer(x, None, None, reading)
        if not self.stage.is_last:
            return x
        return full_logits(self.final_norm(x[-1]), self.token) if reading.wants_logits else x.new_empty(0)
