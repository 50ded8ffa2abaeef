"""Description of a model family in Megatron-LM's names and arguments, filled in by mappings.py.

Shapes and tensor-parallel dims are our model's.
Tables of names have regular expressions of Megatron-LM's names as keys and our names as values, {} where a
group stands. Three generations are read: `transformer` and `attention` (2019 to 2021), `encoder` and
`self_attention` (2021 to 2024), and Megatron Core's `decoder.layers.0.self_attention.linear_qkv` in the same
files. Source: NVIDIA/Megatron-LM, language_model.py, transformer.py and bert_model.py of those years,
core/models/gpt, core/models/bert, core/transformer; arguments.py from 2020 to 2025.

Their tensors may hold other rows than ours: see `RowLayouts`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlm.convert.row_layouts import RowLayouts, split_layer
from mlm.models.config import ModelConfig

HEAD = "head.weight"
"""The output layer. Of a model that ties it, the last stage's copy of the token table, which is compared with
the table and left out. Else our output.weight."""

OUTER = {
    r"embedding\.word_embeddings\.weight": "token.weight",
    r"(?:embedding\.)?position_embeddings\.weight": "position.weight",
    r"(?:transformer|encoder|decoder)\.final_(?:layernorm|norm)\.(weight|bias)": "final_norm.{}",
    r"word_embeddings_for_head\.weight|output_layer\.weight": HEAD,
}
"""Names outside the layers that GPT-2 and BERT share."""
LAYER = {
    r"input_(?:layernorm|norm)\.(weight|bias)": "attention_norm.{}",
    r"self_attention\.linear_qkv\.layer_norm_(weight|bias)": "attention_norm.{}",
    r"(?:self_)?attention\.(?:query_key_value|linear_qkv)\.(weight|bias)": "attention.qkv.{}",
    r"(?:self_)?attention\.(?:dense|linear_proj)\.(weight|bias)": "attention.out.{}",
    r"(?:post_attention_(?:layernorm|norm)|pre_mlp_layernorm)\.(weight|bias)": "mlp_norm.{}",
    r"mlp\.linear_fc1\.layer_norm_(weight|bias)": "mlp_norm.{}",
    r"mlp\.(?:dense_h_to_4h|linear_fc1)\.(weight|bias)": "mlp.up.{}",
    r"mlp\.(?:dense_4h_to_h|linear_fc2)\.(weight|bias)": "mlp.down.{}",
}
"""Names in a layer."""
CORE_OUTER = {
    r"token\.weight": "embedding.word_embeddings.weight",
    r"position\.weight": "embedding.position_embeddings.weight",
    r"token_type\.weight": "embedding.tokentype_embeddings.weight",
    r"output\.weight": "output_layer.weight",
    r"pooler\.(weight|bias)": "pooler.dense.{}",
    r"mlm_head\.transform\.(weight|bias)": "lm_head.dense.{}",
    r"mlm_head\.norm\.(weight|bias)": "lm_head.layer_norm.{}",
    r"mlm_head\.vocabulary\.bias": "output_layer.bias",
    r"sop_head\.(weight|bias)": "binary_head.{}",
}
"""Our names outside the layers -> Megatron Core's; final_norm is in the part that holds the layers."""
CORE_LAYER = {
    r"attention_norm\.(weight|bias)": "self_attention.linear_qkv.layer_norm_{}",
    r"attention\.qkv\.(weight|bias)": "self_attention.linear_qkv.{}",
    r"attention\.out\.(weight|bias)": "self_attention.linear_proj.{}",
    r"attention\.query_norm\.weight": "self_attention.q_layernorm.weight",
    r"attention\.key_norm\.weight": "self_attention.k_layernorm.weight",
    r"mlp_norm\.(weight|bias)": "mlp.linear_fc1.layer_norm_{}",
    r"mlp\.up\.(weight|bias)": "mlp.linear_fc1.{}",
    r"mlp\.down\.(weight|bias)": "mlp.linear_fc2.{}",
}
"""Our names in a layer -> Megatron Core's with Transformer Engine, which torch_dist always has."""
THROUGH_HF = (
    "mixtures of experts go to Megatron and back as a folder of Hugging Face, which mlm export hf writes and "
    "mlm import reads: convert it with Megatron Bridge"
)
"""Problem and fix of a model that is not converted."""
_IN_LAYER = re.compile(r"(?:transformer|encoder|decoder)\.layers\.(\d{1,6})\.(.+)")

ARGS: Mapping[str, tuple[Any, ...]] = {
    "use_rotary_position_embeddings": (None, False),
    "position_embedding_type": (None, "learned_absolute"),
    "add_position_embedding": (None, True),
    "normalization": (None, "LayerNorm"),
    "apply_layernorm_1p": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "swiglu": (None, False),
    "squared_relu": (None, False),
    "quick_geglu": (None, False),
    "untie_embeddings_and_output_weights": (None, False),
    "add_bias_linear": (None, True),
    "disable_bias_linear": (None, False),
    "num_experts": (None, 0, 1),
    "multi_latent_attention": (None, False),
    "qk_layernorm": (None, False),
    "qk_l2_norm": (None, False),
    "softmax_type": (None, "vanilla"),
    "use_mup": (None, False),  # multiplies embeddings, logits and attention by widths
    "scaling_recipe": (None, "none"),
    "window_size": (None,),
    "attention_output_gate": (None, False),
    "activation_func_clamp_value": (None,),
    "mtp_num_layers": (None, 0),
    "retro_add_retriever": (None, False),
    "hybrid_override_pattern": (None,),
}
"""Arguments that would change GPT-2 or BERT -> the values that do not. A version without an argument has the
behaviour of these."""


class SizeOf(NamedTuple):
    """A dim of one of our parameters that shows a size of the model."""

    parameter: str
    is_split: bool
    """True if tensor-parallel ranks share this dim."""
    dim: int = 0


SIZES = {
    "vocab_size": SizeOf("token.weight", True),
    "hidden_size": SizeOf("final_norm.weight", False),
    "max_positions": SizeOf("position.weight", False),
    "ffn_hidden_size": SizeOf("layers.0.mlp.up.bias", True),
}


@dataclass(frozen=True, kw_only=True)
class MegatronMapping:
    """A model family as Megatron-LM names and configures it."""

    name: str
    """Its name in messages."""
    summary: str = "layer norm first, learned positions, gelu, biases, tied embeddings"
    """Features of the models that are imported, for messages about others."""
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    args: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: ARGS)
    """Arguments of a run -> supported values; one that is not here changes nothing."""
    required: tuple[str, ...] = ()
    """Arguments whose absence means a model that the family is not."""
    is_grouped: bool = False
    """True if heads may share keys and values, and have another width than hidden_size / num_heads."""
    layouts: Callable[[ModelConfig, int], RowLayouts] = lambda model, tp: RowLayouts({}, {})
    """Return the tensors with rows in another order, merged from the ranks of a tensor-parallel size, which
    is 1 in torch_dist."""
    layers: str = "decoder"
    """Megatron Core's name of the part that holds the layers."""
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    """Return the arguments that make such a model, without the sizes that all families have."""
    problem: Callable[[ModelConfig], str | None] = lambda model: None
    """Return why Megatron Core has no such model."""
    sizes: Mapping[str, SizeOf] = field(default_factory=lambda: SIZES)
    """Field of ModelConfig -> parameter that shows it."""
    vocabularies: tuple[int, ...]
    """Tokens of the published tokenizers, for runs that do not name theirs."""
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Return fields of ModelConfig that depend on a run's arguments or are fixed."""
    zero_if_absent: Mapping[str, str] = field(default_factory=dict)
    """Parameters that a run may lack, and is computed as if they were zero -> remark."""
    initial_if_absent: tuple[str, ...] = ()
    """Modules that a run may lack: they take initial values."""
    notes: Callable[[Mapping[str, Any]], Sequence[str]] = lambda args: ()
    """Return remarks on what differs a little from the run."""

    def our_name(self, theirs: str, first_layer: int = 0) -> str | None:
        """Return our name of a parameter, or None if the family has no such.

        Layers of a part of the model are numbered from 0, ours from `first_layer`.
        """
        short = theirs.removeprefix("language_model.")
        if in_layer := _IN_LAYER.fullmatch(short):
            ours = _translate(self.layer, in_layer[2])
            return None if ours is None else f"layers.{first_layer + int(in_layer[1])}.{ours}"
        return _translate(self.outer, short)

    def core_name(self, ours: str) -> tuple[str, int | None]:
        """Return Megatron Core's name of a tensor, with {} for its layer's number, and that number."""
        if ours.startswith("final_norm."):
            return f"{self.layers}.final_layernorm.{ours.rpartition('.')[2]}", None
        layer, short = split_layer(ours)
        theirs = _translate(CORE_OUTER if layer is None else CORE_LAYER, short)
        assert theirs is not None, f"{ours} has no name in Megatron Core"
        return (theirs, None) if layer is None else (f"{self.layers}.layers.{{}}.{theirs}", layer)


def _translate(table: Mapping[str, str], theirs: str) -> str | None:
    for pattern, ours in table.items():
        if match := re.fullmatch(pattern, theirs):
            return ours.format(*match.groups())
    return None
