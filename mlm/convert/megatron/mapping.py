"""Description of a model family in Megatron Core's names and arguments, filled in by mappings.py.

Names are as with Transformer Engine, which torch_dist always uses. Source: NVIDIA/Megatron-LM,
core/models/gpt, core/models/bert, core/transformer; arguments.py of 2023 to 2025.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from mlm.checkpoint.parameters import parameters
from mlm.convert.locations import Location
from mlm.models.config import ModelConfig

TOKEN_TABLE, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""A tied output layer may be stored too, as a copy of the token table."""
TABLES = (TOKEN_TABLE, OUTPUT, "output_layer.bias")
"""Tensors with a row per token."""
IN_LAYER = re.compile(r"((?:en|de)coder)\.layers\.(\d{1,6})\.(.+)")


def core_names(module: str, core_template: str) -> dict[str, str]:
    """Return Megatron Core's names of a weight and a bias; {} in `core_template` stands for either word."""
    return {f"{module}.{part}": core_template.format(part) for part in ("weight", "bias")}


OUTER = {
    "token.weight": TOKEN_TABLE,
    "position.weight": "embedding.position_embeddings.weight",
    "output.weight": OUTPUT,
}
"""Parameters outside the layers -> Megatron Core's names; final_norm is in the module of the layers."""
LAYER = {
    **core_names("attention_norm", "self_attention.linear_qkv.layer_norm_{}"),
    **core_names("attention.qkv", "self_attention.linear_qkv.{}"),
    **core_names("attention.out", "self_attention.linear_proj.{}"),
    **core_names("mlp_norm", "mlp.linear_fc1.layer_norm_{}"),
    **core_names("mlp.up", "mlp.linear_fc1.{}"),
    **core_names("mlp.down", "mlp.linear_fc2.{}"),
}
"""Parameters in a layer -> Megatron Core's names."""
THROUGH_HF = (
    "mixtures of experts go to Megatron and back as a folder of Hugging Face, which mlm export hf writes and "
    "mlm import reads: convert it with Megatron Bridge"
)
"""Problem and fix of a model that is not converted."""

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
"""Arguments that would change GPT-2 or BERT -> values that do not, as in versions without the argument."""


class SizeOf(NamedTuple):
    """A dim of a parameter that shows a size of the model."""

    parameter: str
    dim: int = 0


SIZES = {
    "vocab_size": SizeOf("token.weight"),
    "hidden_size": SizeOf("final_norm.weight"),
    "max_positions": SizeOf("position.weight"),
    "ffn_hidden_size": SizeOf("layers.0.mlp.up.bias"),
}


@dataclass(frozen=True, kw_only=True)
class MegatronMapping:
    """Names and configuration of a model family in Megatron-LM."""

    name: str
    """Its name in messages."""
    summary: str = "layer norm first, learned positions, gelu, biases, tied embeddings"
    """Features of the models that are imported, for messages about others."""
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    args: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: ARGS)
    """Arguments of a run -> supported values; other arguments do not change the model."""
    required: tuple[str, ...] = ()
    """Arguments without which a run is of another family."""
    is_grouped: bool = False
    """True if heads may share keys and values, and have another width than hidden_size / num_heads."""
    rows: Callable[[ModelConfig], Mapping[str, Location]] = lambda model: {}
    """Return locations, without names, of parameters with another order of rows, by name in a layer."""
    layers: str = "decoder"
    """Megatron Core's module of the layers."""
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    """Return the arguments of such a model, without the sizes that all families have."""
    problem: Callable[[ModelConfig], str | None] = lambda model: None
    """Return why Megatron Core has no such model."""
    sizes: Mapping[str, SizeOf] = field(default_factory=lambda: SIZES)
    """Field of ModelConfig -> parameter that shows it."""
    vocabularies: tuple[int, ...]
    """Vocabulary sizes of published tokenizers, for runs that do not record one."""
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Return fields of ModelConfig that depend on a run's arguments or are fixed."""
    zero_if_absent: Mapping[str, str] = field(default_factory=dict)
    """Parameters that a run may lack, which are then zero -> remark."""
    initial_if_absent: tuple[str, ...] = ()
    """Modules that a run may lack, which then take initial values."""
    notes: Callable[[Mapping[str, Any]], Sequence[str]] = lambda args: ()
    """Return remarks on small differences from the run."""

    @cached_property
    def _outer_names(self) -> Mapping[str, str]:
        final_norm = core_names("final_norm", f"{self.layers}.final_layernorm.{{}}")
        return {**self.outer, **final_norm}

    def has_name(self, core_name: str) -> bool:
        """True if a parameter of the family, or a copy of one, has this name in Megatron Core."""
        if (in_layer := IN_LAYER.fullmatch(core_name)) and in_layer[1] == self.layers:
            return in_layer[3] in self.layer.values()
        return core_name in self._outer_names.values()

    def core_name(self, parameter: str) -> str:
        """Return Megatron Core's name of the tensor that stores a parameter."""
        if in_layer := re.fullmatch(r"(layers\.\d+\.)(.+)", parameter):
            return f"{self.layers}.{in_layer[1]}{self.layer[in_layer[2]]}"
        return self._outer_names[parameter]

    def locations(self, model: ModelConfig) -> Iterator[tuple[str, Location]]:
        """Yield (parameter, location) of every parameter."""
        rows = self.rows(model)
        for parameter in parameters(model):
            location = rows.get(re.sub(r"^layers\.\d+\.", "", parameter), Location(()))
            yield parameter, replace(location, names=(self.core_name(parameter),))
