"""Base of all families: embeddings, layers split over tensor-parallel ranks, pipeline stages.

Shapes: S sequence, B micro-batch, H hidden, t = tensor-parallel size, c = context-parallel size. Between
layers and stages the hidden states are [S/c, B, H], with sequence parallelism [S/(ct), B, H].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlm.models.config import ModelConfig
from mlm.models.documents import Spans
from mlm.models.heads import GatherOutputs, PlainLinear
from mlm.models.norms import LayerNorm
from mlm.models.rotary import Rotary
from mlm.models.shape import architecture_of, is_tied
from mlm.models.stage import PipelineStage, split_layers
from mlm.models.transformer import TransformerLayer
from mlm.parallel.context import local_positions, local_tokens
from mlm.parallel.dropout import DropoutStream, site_keys
from mlm.parallel.layers import VocabParallelEmbedding, embedding_lookup
from mlm.parallel.mesh import Axis, ExpertAxes


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of a model with a task's head, on the device; shorter sequences padded on the right."""

    tokens: Tensor
    """[B, S] int64."""
    lengths: Tensor
    """[B] int64: tokens before the padding, at least 1."""
    token_types: Tensor | None = None
    """[B, S] int64: type of each token's segment; None for 0, or a model without segment types."""
    spans: Spans | None = None
    """Hides the padding where attention is not causal; None without padding."""


class LearnedTable(nn.Module):
    """Learned table of positions or segment types, [offset + rows, H], replicated over tp."""

    def __init__(self, rows: int, hidden_size: int, *, init_std: float, offset: int = 0) -> None:
        super().__init__()
        self.init_std, self.offset = init_std, offset
        self.weight = nn.Parameter(torch.empty(offset + rows, hidden_size))

    def forward(self, rows: range | Tensor) -> Tensor:
        """[len(rows), 1, H], the same rows for all samples, or [S, B, H] for int64 rows [S, B]."""
        if isinstance(rows, Tensor):
            return embedding_lookup(rows + self.offset if self.offset else rows, self.weight)
        return self.weight[self.offset + rows.start : self.offset + rows.stop].unsqueeze(1)


class Transformer(nn.Module):
    """One pipeline stage of a transformer, or all of it.

    The first stage has `token`, `position` (if learned), `token_type` and `embedding_norm`, the last stage
    `final_norm` and the head, and `token` again if the output layer is tied to it. Parameters are float32 (or
    float64), activations have `dtype`.
    """

    pools: ClassVar[bool] = False
    """True if head=classification reads the first token through a pooler, else the last token."""
    pooled_heads: ClassVar[tuple[str, ...]] = ("language_model", "none", "classification")
    """Heads with a pooler, in families that have one."""
    layer_type: ClassVar[type[TransformerLayer]] = TransformerLayer
    """Class of its layers; a custom family may derive its layers from it."""
    dropout_keys: Tensor
    """Keys of the dropout masks after the embeddings and before the classifier, int32 [2, 2]."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: Axis | None = None,
        dtype: torch.dtype = torch.float32,
        recompute: str = "none",
        sequence_parallel: bool = False,
        stage: PipelineStage | None = None,
        cp: Axis | None = None,
        experts: ExpertAxes | None = None,
    ) -> None:
        super().__init__()
        tp = Axis("tp") if tp is None else tp  # None: one process
        self.cp = cp or Axis("cp")
        self.config, self.tp, self.dtype, self.recompute = config, tp, dtype, recompute
        self.sequence_parallel = sequence_parallel and tp.size > 1
        parts = architecture_of(config)
        self.learns_positions, self.embedding_multiplier = parts.learned_positions, parts.embedding_multiplier
        self.logit_multiplier = parts.logit_multiplier
        self.stage = stage = stage or split_layers(config.num_layers, 1)[0]
        dropout_keys = site_keys([(-1, "embedding"), (config.num_layers, "classifier")])
        self.register_buffer("dropout_keys", dropout_keys, persistent=False)
        h, std = config.hidden_size, config.init_std
        if stage.is_first or (stage.is_last and is_tied(config)):
            self.token = VocabParallelEmbedding(
                config.vocab_size,
                config.padded_vocab_size(tp.parts),
                h,
                tp=tp,
                sequence_parallel=self.sequence_parallel,
                is_tied_copy=not stage.is_first,
                init_std=std,
                init_seed=None,
            )
        if stage.is_first:
            if self.learns_positions:
                self.position = LearnedTable(
                    config.max_positions, h, init_std=std, offset=parts.position_offset
                )
            if config.token_types:
                self.token_type = LearnedTable(config.token_types, h, init_std=std)
            if config.norm == "post":
                self.embedding_norm = LayerNorm(h, eps=config.layer_norm_eps)
        self.layers = nn.ModuleDict(
            {
                str(n): self.layer_type(
                    config,
                    layer=n,
                    tp=tp,
                    sequence_parallel=self.sequence_parallel,
                    recompute_attention=recompute == "selective",
                    cp=self.cp,
                    experts=experts,
                )
                for n in stage.layers
            }
        )
        if stage.is_last:
            self._add_head()

    def _add_head(self) -> None:
        """Add the modules after the layers; families add their pretraining heads."""
        config = self.config
        h, std = config.hidden_size, config.init_std
        if config.norm == "pre":
            self.final_norm = self.layer_type.build_norm(config)
        if self.pools and config.head in self.pooled_heads:
            self.pooler = PlainLinear(h, h, init_std=std)
        if config.head in ("classification", "span"):
            outputs = config.num_labels if config.head == "classification" else 2
            self.classifier = PlainLinear(h, outputs, init_std=std)

    def boundary_shape(self, tokens: Tensor) -> tuple[int, int, int]:
        """Shape of the hidden states between stages for tokens [B, S]."""
        batch, length = tokens.shape
        ranks = self.cp.size * (self.tp.size if self.sequence_parallel else 1)
        return length // ranks, batch, self.config.hidden_size

    def local_positions(self, length: int, positions: Tensor | None, device: torch.device) -> Tensor | None:
        """Positions of this cp rank's tokens, [B or 1, S/c], of `positions` [B, S]; None for 0 … S - 1."""
        if self.cp.parts == 1:
            return positions
        if positions is None:
            return local_positions(length, self.cp, device).unsqueeze(0)
        return local_tokens(positions, self.cp, 1)

    def embed(
        self,
        tokens: Tensor,
        stream: DropoutStream | None,
        positions: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Tokens [B, S] -> hidden states before the first layer.

        `positions` and `token_types` are [B, S] too; they default to 0 … S - 1, and to type 0.
        """
        rows = self.boundary_shape(tokens)[0]
        positions = self.local_positions(tokens.shape[1], positions, tokens.device)
        tokens = local_tokens(tokens, self.cp, 1)
        first = self.tp.rank * rows if self.sequence_parallel else 0
        shard = slice(first, first + rows)
        x = self.token(tokens.t())
        if self.embedding_multiplier != 1:
            x = x * self.embedding_multiplier
        if self.learns_positions:
            x = x + self.position(range(first, first + rows) if positions is None else positions.t()[shard])
        if token_types is not None:
            x = x + self.token_type(token_types.t()[shard])
        elif self.config.token_types:
            x = x + self.token_type(range(1))
        x = x.to(self.dtype)
        if self.config.norm == "post":
            x = self.embedding_norm(x)
        return x if stream is None else stream.hidden(x, self.config.hidden_dropout, self.dropout_keys[0])

    def run_layers(
        self,
        x: Tensor,
        stream: DropoutStream | None,
        spans: Spans | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after this stage's layers, normed in the last stage of a model with norm=pre."""
        length = x.shape[0] * self.cp.size * (self.tp.size if self.sequence_parallel else 1)
        rotary = self.rotary(x, self.local_positions(length, positions, x.device))
        angles = () if rotary is None else (rotary,)  # layers of a custom family may lack the argument
        for layer in self.layers.values():
            if self.recompute == "full" and torch.is_grad_enabled():
                # masks are functions of stream and layer, so no generator state is saved
                x = checkpoint(
                    layer, x, stream, spans, None, *angles, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = layer(x, stream, spans, None, *angles)
        return self.apply_final_norm(x) if self.stage.is_last and self.config.norm == "pre" else x

    def rotary(
        self, x: Tensor, positions: Tensor | None, lengths: Sequence[int] | None = None
    ) -> Rotary | None:
        """Return the angles of the queries and keys of hidden states `x`; None without rotary positions.

        `positions` of this cp rank's tokens are [B or 1, S]; None for 0 … S - 1. `lengths` are the tokens of
        each text so far, if the pass reads a part of it; None for S.
        """
        return None

    def apply_final_norm(self, x: Tensor) -> Tensor:
        """Hidden states for the output layer: the last norm, times the factor of logits.

        In muP they are divided by the width factor (arXiv:2203.03466, table 8, for an output layer tied to
        the token table: initial values and rate of an input layer, and a multiplier of 1 / width). Untied
        output layers follow the same rule here.
        """
        y: Tensor = self.final_norm(x)
        if self.logit_multiplier != 1 and self.config.head == "language_model":
            y = y * self.logit_multiplier
        return y if self.config.mup_base_width is None else y / self.config.width_factor

    def encode(self, inputs: Inputs, stream: DropoutStream | None = None, x: Tensor | None = None) -> Tensor:
        """Hidden states after this stage, from token ids in the first stage and from `x` in the others."""
        if x is None:
            x = self.embed(inputs.tokens, stream, token_types=inputs.token_types)
        return self.run_layers(x, stream, inputs.spans)

    def outputs(self, inputs: Inputs, stream: DropoutStream | None = None, x: Tensor | None = None) -> Tensor:
        """Return the outputs of head=classification|span, on every tp rank; else hidden states.

        Returns:
            classification: [B, num_labels], from the pooled [CLS] (arXiv:1810.04805, section 4), in a GPT-2
                from the last token. span: [B, S, 2], where an answer begins and where it ends.
        """
        h = self.encode(inputs, stream, x)
        if not self.stage.is_last:
            return h
        if self.config.head == "span":
            return self.gather_outputs(self.classifier(h)).transpose(0, 1)
        if self.pools:
            pooled = self.pool(h)
            if stream is not None:
                pooled = stream.replicated(pooled, self.config.hidden_dropout, self.dropout_keys[1])
            return self.gather_outputs(self.classifier(pooled))[0]
        rows = torch.arange(len(inputs.lengths), device=h.device)
        if self.sequence_parallel:  # any rank may hold a row's last token
            return self.gather_outputs(self.classifier(h))[inputs.lengths - 1, rows]
        y: Tensor = self.classifier(h[inputs.lengths - 1, rows])
        return y

    def pool(self, h: Tensor) -> Tensor:
        """Return tanh(W x + b) of the first token of [S, B, H]: [1, B, H].

        With sequence parallelism each tp rank pools the first of its rows; only the first rank's are used.
        """
        return torch.tanh(self.pooler(h[:1]))

    def gather_outputs(self, y: Tensor) -> Tensor:
        """Gather results of each rank's rows on every rank with sequence parallelism: [S/t, …] -> [S, …]."""
        if self.sequence_parallel:
            y = GatherOutputs.apply(y, self.tp)  # type: ignore[no-untyped-call]
        return y
