"""Settings of a model: shape, regularisation and head of a transformer."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mlm.config.fields import EXTENT, FRACTION, NOT_NEGATIVE, POSITIVE, Aliases, ImportPath, OnlyIf, Options

KINDS = ("gpt2", "bert", "roberta", "llama")
"""Shipped families, each a folder here."""
ADAPTED = OnlyIf("rank")
ALL_LINEAR = "all-linear"
"""Target of adapters: every linear layer of the transformer layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters, trained in place of the weights (arXiv:2106.09685)."""

    rank: Annotated[int, NOT_NEGATIVE, Aliases("lora_r", "lora_rank")] = 0
    """Rank r of the adapters; 0 trains the weights themselves."""
    alpha: Annotated[float, POSITIVE, ADAPTED, Aliases("lora_alpha")] = 16.0
    """Adapters are scaled by alpha / rank."""
    targets: Annotated[tuple[str, ...], ADAPTED, Aliases("target_modules", "lora_target_modules")] = (
        ALL_LINEAR,
    )
    """Layers with adapters, by the ends of their names here (qkv, query, kv, out, up, down) or in
    transformers (q_proj, v_proj, c_attn); all-linear takes every linear layer of the transformer layers
    except routed experts, which `experts` takes."""
    dropout: Annotated[float, FRACTION, ADAPTED, Aliases("lora_dropout")] = 0.0
    """Dropout on the inputs of adapters, except routed experts'."""
    rslora: Annotated[bool, ADAPTED, Aliases("use_rslora")] = False
    """Scale by alpha / sqrt(rank), which keeps large ranks as strong (arXiv:2312.03732)."""
    quantize: Annotated[Literal["none", "nf4"], ADAPTED, Aliases("load_in_4bit")] = "none"
    """Numbers that the frozen weights of the transformer layers' linear layers are held in, but of routed
    experts: nf4 takes 4.5 bits each (arXiv:2305.14314), none the compute dtype's."""
    dora: Annotated[bool, ADAPTED, Aliases("use_dora")] = False
    """Train norms of a weight's rows, but of routed experts, apart from directions (arXiv:2402.09353)."""

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


NO_ADAPTERS = LoraConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and regularisation of a transformer. `kind` picks its family."""

    kind: Annotated[str, ImportPath(*KINDS)] = "gpt2"
    """Model family: gpt2 and llama (with Qwen and Mistral) read from left to right, bert and roberta (without
    sentence pairs; also DistilBERT) both ways; or one of your own by its import path,
    my_package.my_family:FAMILY."""
    num_layers: Annotated[int, EXTENT, Aliases("n_layer", "n_layers", "num_hidden_layers", "layers", "depth")]
    """Transformer layers, L."""
    hidden_size: Annotated[int, EXTENT, Aliases("n_embd", "d_model", "dim", "embed_dim", "width")]
    """Width of the residual stream, H. Must be a multiple of num_heads, unless model.options.head_dim is
    given."""
    num_heads: Annotated[int, EXTENT, Aliases("n_head", "n_heads", "num_attention_heads", "heads")]
    """Attention heads, N. Must be a multiple of tp."""
    ffn_hidden_size: Annotated[
        int | None, POSITIVE, Aliases("n_inner", "d_ff", "intermediate_size", "mlp_dim")
    ] = None
    """Width of the MLP; null means 4 * hidden_size. Must be a multiple of tp."""
    max_positions: Annotated[int, POSITIVE, Aliases("n_positions", "max_position_embeddings")] = 1024
    """The longest sequence the model can read, in tokens: rows of the table where positions are learned."""
    vocab_size: Annotated[int, POSITIVE] = 50257
    """Tokens of the tokenizer. The table is padded to a multiple of vocab_multiple * tp rows."""
    vocab_multiple: Annotated[int, POSITIVE] = 128
    """Padding quantum of the vocabulary (arXiv:1909.08053, section 3)."""
    hidden_dropout: Annotated[
        float, FRACTION, Aliases("dropout", "resid_pdrop", "embd_pdrop", "dropout_rate")
    ] = 0.1
    """Dropout after the embeddings and on both residual branches."""
    attention_dropout: Annotated[
        float, FRACTION, Aliases("attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
    ] = 0.1
    """Dropout on attention probabilities."""
    init_std: Annotated[float, NOT_NEGATIVE, Aliases("init_method_std", "initializer_range")] = 0.02
    """Standard deviation of initial weights; residual outputs get init_std / sqrt(2 * num_layers)."""
    mup_base_width: Annotated[int | None, EXTENT] = None
    """muP (arXiv:2203.03466): settings are for a model of this hidden_size, and learning rates, initial
    weights and the output layer follow this model's width. MLPs and experts widen with it, not heads, ranks
    or the number of experts. Of gpt2 and llama; null for none. One that is trained so stays so."""
    layer_norm_eps: Annotated[
        float, POSITIVE, Aliases("layer_norm_epsilon", "layernorm_epsilon", "norm_eps")
    ] = 1e-5
    """Added to the variance in layer norm."""
    norm: Literal["pre", "post"] = "pre"
    """Position of layer norm: before attention and MLP (arXiv:1909.08053, figure 7b), or after the residual
    sums as in the first BERT (figure 7a). gpt2 and llama know pre only."""
    activation: Literal["gelu", "gelu_tanh", "silu", "relu2"] = "gelu_tanh"
    """Nonlinearity of the MLP: GELU, its approximation by tanh as in GPT-2, SiLU (of llama's gates alone), or
    ReLU squared (arXiv:2109.08668, of gpt2 alone)."""
    token_types: Annotated[int, NOT_NEGATIVE] = 0
    """Segment types of a sequence, each with its own embedding; 0 for gpt2 and llama, 2 for bert, 1 for
    RoBERTa, of which all tokens have the same."""
    head: Literal["language_model", "none", "classification", "span"] = "language_model"
    """Outputs made of the hidden states: pretraining's (roberta: masked tokens; bert: these and the
    order of sentences), nothing, num_labels numbers per text, or two per token (where an answer begins,
    ends)."""
    num_labels: Annotated[int, NOT_NEGATIVE, OnlyIf("head", "classification")] = 0
    """Outputs of head=classification."""
    options: Options = field(default_factory=dict)
    """Settings of the family alone, by name: those of llama are in mlm/models/llama/settings.py, those of
    roberta in mlm/models/roberta/family.py; gpt2 and bert have none."""

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def width_factor(self) -> float:
        """Width over muP's base; 1 without muP."""
        return self.hidden_size / (self.mup_base_width or self.hidden_size)

    @property
    def hidden_std(self) -> float:
        """Standard deviation of the initial matrices of layers: variance falls as 1 / width in muP."""
        return self.init_std / math.sqrt(self.width_factor)

    def padded_vocab_size(self, tp: int) -> int:
        """vocab_size rounded up to vocab_multiple * tp, so each of tp ranks holds equal whole tiles."""
        quantum = self.vocab_multiple * tp
        return -(-self.vocab_size // quantum) * quantum
