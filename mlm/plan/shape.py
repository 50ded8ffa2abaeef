"""Sizes that the plan's formulas read: a transformer's shape, a layout, and floating-point operations.

Letters of the papers: L layers, H hidden, S sequence, V vocabulary, B micro-batch; t, p, v, d = tp, pp, vp,
dp and m micro-batches per replica.
"""

from dataclasses import dataclass
from typing import Literal

from mlm.models.config import ModelConfig
from mlm.models.sizes import Sizes
from mlm.parallel.config import ParallelConfig

Schedule = Literal["1f1b", "gpipe", "zb_h1"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A transformer as matrix products see it; also of models that this toolkit does not train."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    seq: int
    vocab: int
    """Rows of the vocabulary projection, padding included."""
    kv_heads: int | None = None
    """Heads of keys and values; None for as many as queries."""
    gated: bool = False
    """True for an MLP of three matrices (SwiGLU)."""
    causal: bool = True
    """False if tokens attend to those after them too."""
    scored: float = 1.0
    """Share of the tokens that go through the vocabulary projection."""
    tied: bool = True
    """True if the vocabulary projection is the token table."""
    head_width: int | None = None
    """Width of a head; None for hidden / heads."""
    window: int = 0
    """Tokens that each attends to; 0 for all before it."""
    hidden_dropout: bool = True
    """True if residual branches are dropped out."""
    attention_dropout: bool = True
    """True if attention probabilities are."""

    @classmethod
    def of(cls, model: ModelConfig, seq: int, tp: int = 1) -> "Shape":
        """The shape of a model; its vocabulary is padded for `tp`."""
        sizes = model.sizes
        return cls(
            layers=model.num_layers,
            hidden=model.hidden_size,
            heads=model.num_heads,
            ffn=model.ffn_size,
            seq=seq,
            vocab=model.padded_vocab_size(tp),
            causal=model.family.causal,
            scored=model.family.scored,
            kv_heads=sizes.kv_heads,
            gated=sizes.gated,
            tied=sizes.tied,
            head_width=sizes.head_dim,
            window=sizes.window,
            hidden_dropout=model.hidden_dropout > 0,
            attention_dropout=model.attention_dropout > 0,
        )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.head_width or self.hidden // self.heads

    @property
    def query_size(self) -> int:
        """Width of all queries."""
        return self.head_dim * self.heads

    @property
    def attended(self) -> float:
        """Tokens that attention is computed for, of each token."""
        return Sizes(head_dim=self.head_dim, kv_heads=1, window=self.window).attended(self.seq)

    @property
    def kv_size(self) -> int:
        """Width of all keys."""
        return self.head_dim * (self.kv_heads or self.heads)

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's matrices."""
        attention = 2 * self.hidden * (self.query_size + self.kv_size)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """Elements of all matrices, learned positions left out."""
        tables = self.hidden * self.vocab * (1 if self.tied else 2)
        return self.layers * self.layer_weights + tables

    @property
    def layer_flops(self) -> float:
        """Forward operations of one layer on one sequence: 2 per weight and token, 4 S^2 H for attention."""
        return 2 * self.seq * self.layer_weights + 4 * self.seq * self.attended * self.query_size

    def model_flops(self, samples: int = 1) -> float:
        """Operations of a step: forward once, backward twice that (arXiv:2205.05198, appendix A)."""
        head = 2 * self.seq * self.hidden * self.vocab * self.scored
        return samples * 3 * (self.layers * self.layer_flops + head)

    def hardware_flops(self, recompute: Recompute = "none", samples: int = 1) -> float:
        """Operations of a step with those recomputed.

        Full recomputation is another forward pass of every layer: 96 B S L H^2 (1 + S/6H + V/16LH), equation
        (3) of arXiv:2104.04473. Fused attention kernels recompute scores too, which no formula counts.
        """
        again = samples * self.layers * self.layer_flops if recompute == "full" else 0
        return self.model_flops(samples) + again


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLayout:
    """A layout with its batch: all that a step's time and memory depend on besides model and hardware."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    pipeline: Schedule = "1f1b"
    zero: Literal[0, 2, 3] = 0
    zero_reduce: Literal["last", "every"] = "last"
    recompute: Recompute = "none"
    micro_batch: int = 1
    global_batch: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, *, dp: int, micro_batch: int, global_batch: int) -> "PlannedLayout":
        """The layout of these settings, with dp filled in."""
        return cls(
            tp=parallel.tp,
            pp=parallel.pp,
            vp=parallel.vp,
            dp=dp,
            sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
            pipeline=parallel.pipeline,
            zero=parallel.zero if dp > 1 else 0,
            zero_reduce=parallel.zero_reduce,
            recompute=parallel.recompute,
            micro_batch=micro_batch,
            global_batch=global_batch,
        )

    @property
    def gpus(self) -> int:
        """Devices."""
        return self.tp * self.pp * self.dp

    @property
    def micro_batches(self) -> int:
        """m: micro-batches of a replica in a step."""
        return self.global_batch // (self.dp * self.micro_batch)

    def settings(self) -> dict[str, object]:
        """Settings of `mlm pretrain` that give this layout; those at their defaults left out."""
        found: dict[str, object] = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        if self.sequence_parallel:
            found["sequence_parallel"] = True
        if self.pp > 1:
            found |= {"vp": self.vp} if self.vp > 1 else {}
            found |= {"pipeline": self.pipeline} if self.pipeline != "1f1b" else {}
        if self.zero:
            found["zero"] = self.zero
            found |= {"zero_reduce": self.zero_reduce} if self.zero_reduce != "last" else {}
        if self.recompute != "none":
            found["recompute"] = self.recompute
        return {
            **found,
            "train.micro_batch_size": self.micro_batch,
            "train.global_batch_size": self.global_batch,
        }
