"""Parts and sizes of a model that its family decides.

Formulas of parameters, operations and memory count by them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlm.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Parts and sizes of a model beyond those that ModelConfig names; the defaults are those of GPT-2."""

    head_dim: int
    """Width of one attention head, D."""
    kv_heads: int
    """Heads of keys and of values, K; num_heads where each query head has its own."""
    gated: bool = False
    """True for an MLP of three matrices: its input is multiplied by a gate (arXiv:2002.05202)."""
    fused_qkv: bool = True
    """True if queries, keys and values are of one weight; else queries of one, keys and values of another."""
    qkv_bias: bool = True
    """True if queries, keys and values have biases."""
    bias: bool = True
    """True if attention's output and the MLP have biases."""
    norm_bias: bool = True
    """True for layer norm, which has a bias; False for RMSNorm."""
    head_norms: bool = False
    """True if the queries and keys of each head are normed."""
    learned_positions: bool = True
    """True if there is a table of positions."""
    tied: bool = True
    """True if a language model's output layer is the token table."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0 for all before it."""

    def attended(self, seq_length: int) -> float:
        """Tokens that attention is computed for, of each token: S, as formulas count no causal mask.

        A window W < S leaves S W - W^2/2 of the S^2/2 pairs under the mask.
        """
        w = min(self.window or seq_length, seq_length)
        return w * (2 - w / seq_length)

    def kv_size(self, tp: int = 1) -> int:
        """Width of the keys on one tensor-parallel rank: beyond K ranks, heads are replicated."""
        return self.head_dim * max(1, self.kv_heads // tp)


def usual_sizes(model: "ModelConfig") -> Sizes:
    """The sizes of GPT-2 and BERT."""
    return Sizes(head_dim=model.hidden_size // model.num_heads, kv_heads=model.num_heads)
