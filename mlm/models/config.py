"""What a model is: shape, regularisation and head of a transformer; see schema.py."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from mlm.config.fields import Forbid
from mlm.data.config import MASKED


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and regularisation of a transformer. `kind` picks the builder in `mlm.models`."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    kind: Literal["gpt2", "bert"] = "gpt2"
    """Architecture family: gpt2 reads from left to right, bert both ways."""
    num_layers: int
    """Transformer layers, L."""
    hidden_size: int
    """Width of the residual stream, H. Must be a multiple of num_heads."""
    num_heads: int
    """Attention heads, N. Must be a multiple of tp."""
    ffn_hidden_size: int | None = None
    """Width of the MLP; null means 4 * hidden_size. Must be a multiple of tp."""
    max_positions: int = 1024
    """Rows of the learned position table: the longest sequence the model can read, in tokens."""
    vocab_size: int = 50257
    """Tokens of the tokenizer. The table is padded to a multiple of vocab_multiple * tp rows."""
    vocab_multiple: int = 128
    """Padding quantum of the vocabulary (arXiv:1909.08053, section 3)."""
    hidden_dropout: float = 0.1
    """Dropout after the embeddings and on both residual branches."""
    attention_dropout: float = 0.1
    """Dropout on attention probabilities."""
    init_std: float = 0.02
    """Standard deviation of initial weights; residual outputs get init_std / sqrt(2 * num_layers)."""
    layer_norm_eps: float = 1e-5
    """Added to the variance in layer norm."""
    norm: Literal["pre", "post"] = "pre"
    """Where layer norm is: before attention and MLP (arXiv:1909.08053, figure 7b), or behind the residual
    sums as in the first BERT (figure 7a). gpt2 knows pre only."""
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"
    """Nonlinearity of the MLP: GELU, or its approximation by tanh as in GPT-2."""
    token_types: int = 0
    """Kinds of segments a text may have, each with an embedding of its own; 0 for gpt2, 2 for bert."""
    head: Literal["language_model", "none", "classification", "span"] = "language_model"
    """What is made of the hidden states: what the model is pretrained for (bert: masked tokens and the order
    of sentences), nothing, num_labels numbers per text, or two per token (where an answer begins, ends)."""
    num_labels: int = 0
    """Outputs of head=classification."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head, D."""
        return self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        """Width of the MLP with its default filled in."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def is_tied(self) -> bool:
        """Whether the output layer is the token table, which the last stage then holds too."""
        return self.head == "language_model"

    def padded_vocab_size(self, tp: int) -> int:
        """vocab_size rounded up to vocab_multiple * tp, so each of tp ranks holds equal whole tiles."""
        quantum = self.vocab_multiple * tp
        return -(-self.vocab_size // quantum) * quantum

    def num_parameters(self) -> int:
        """Parameters of the unpadded model, the output layer tied to the token embedding."""
        h, ffn = self.hidden_size, self.ffn_size
        attention = 4 * h * h + 4 * h  # qkv and output projections with biases
        mlp = 2 * h * ffn + ffn + h
        norms = 4 * h
        embeddings = (self.vocab_size + self.max_positions + self.token_types) * h
        one_norm = 2 * h  # behind the layers, or behind the embeddings with norm=post
        return (
            embeddings + self.num_layers * (attention + mlp + norms) + one_norm + self.num_head_parameters()
        )

    def num_head_parameters(self) -> int:
        """Parameters behind the layers and their norm; an output layer tied to the token table has none."""
        h, is_bert = self.hidden_size, self.kind == "bert"
        pooler = h * h + h if is_bert and self.head != "span" else 0
        match self.head:
            case "classification":
                return pooler + self.num_labels * (h + 1)
            case "span":
                return 2 * (h + 1)
            case "language_model" if is_bert:
                transform = h * h + 3 * h  # with its norm
                return pooler + transform + self.vocab_size + 2 * (h + 1)
        return pooler

    def flops_per_token(self, seq_length: int, tp: int = 1) -> float:
        """Model floating-point operations of one training token, forward and backward, no recomputation.

        Matrix products only: 6 per weight, plus 12 * L * H * S for attention scores and values, plus the
        vocabulary projection (arXiv:2104.04473, section 5.1, without its recomputed forward pass). A BERT
        projects masked tokens alone, by its transform and onto the vocabulary.
        """
        h = self.hidden_size
        layer = 4 * h * h + 2 * h * self.ffn_size
        attention = 12 * self.num_layers * h * seq_length
        head: float = h * self.padded_vocab_size(tp)
        if self.head != "language_model":
            head = 0.0  # a few numbers per text
        elif self.kind == "bert":
            head = MASKED * (head + h * h)
        return 6 * (self.num_layers * layer + head) + attention
