"""Description of a `model_type` of the Llama family: keys of config.json, names of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from mlm.convert.huggingface import mapping as hf
from mlm.convert.locations import ExpertRows

_FIXED = hf.UNSUPPORTED | {
    "is_causal": (True,),
    "use_bidirectional_attention": (None, False),
    "logit_scale": (None, 1.0),
    "attention_multiplier": (None,),
    "use_sliding_window": (False, True),
    "norm_topk_prob": (False, True),
}
_NO_EXPERTS = {
    **{"num_experts": (None, 0, 1), "num_local_experts": (None, 0, 1)},
    "n_routed_experts": (None, 0),
}
_MAY_BE_NULL = frozenset({"num_kv_heads", "head_dim", "q_lora_rank", "attention_softcap", "logit_softcap"})
_ABOVE_0 = frozenset({"attention_multiplier", "attention_softcap", "logit_softcap"})
INPUT_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


class Defaults(NamedTuple):
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int | None
    """None: equal to `heads`."""
    positions: int
    vocabulary: int
    head_dim: int | None = None
    theta: float = 1e4
    rotary_fraction: float | None = None
    """None for a model that rotates full heads."""
    eps: float = 1e-6

    @property
    def rope(self) -> tuple[float, float | None]:
        return self.theta, self.rotary_fraction


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model_type: its config.json, and the tensor names that differ."""

    classes: str
    """Prefix of its classes."""
    marks: tuple[str, ...] = ()
    """Options (or name=value) that identify such a model: no model of a row below sets all of them. Without
    marks a model has this type only by model_type."""
    options: Mapping[str, bool | int | str] = field(default_factory=dict)
    """Options of all its models that differ from mlm's defaults."""
    defaults: Defaults
    fixed: Mapping[str, tuple[hf.JSON, ...]] = field(default_factory=dict)
    """Further `ConfigKeys.fixed`; they are written too."""
    fields: Mapping[str, tuple[str, hf.JSON]] = field(default_factory=dict)
    """Further `ConfigKeys.fields`, for options."""
    absent: Mapping[str, hf.JSON] = field(default_factory=dict)
    """Defaults of keys where null has another meaning."""
    may_be_0: frozenset[str] = frozenset()
    """As in ConfigKeys."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative name of a key -> the key."""
    meanings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Key -> value -> value that it means."""
    written: Mapping[str, hf.JSON] = field(default_factory=dict)
    """Keys that are written and not read."""
    activation: str = "hidden_act"
    """Key of the activation."""
    activations: tuple[str, ...] = (*hf.SILU, *hf.EXACT_GELU, *hf.TANH_GELU)
    """Supported activations; the first is the default."""
    norms: Mapping[str, str] = field(default_factory=lambda: INPUT_NORMS)
    """Norms of a layer -> names in `transformers`."""
    base: str = ""
    """Class without a head; "" for {classes}Model."""
    tied: bool = False
    """Default of tie_word_embeddings."""
    scales_embedding: bool = False
    """True if rows of the token table are multiplied by sqrt(hidden_size)."""
    sliding_theta: float | None = None
    """Default base of rotary positions in layers with a window; None if all layers have the same base."""
    layer_keys: tuple[str, ...] = ()
    """Keys by layer that its class reads: layer_types, sliding_window_pattern, no_rope_layers."""
    sliding_layers: str = ""
    """Default pattern of layers with (s) and without (f) a window; "" for a window in all layers."""
    full_layers_lack_rotary: bool = False
    """True if only layers with a window have rotary positions."""
    writes_head_dim: Literal["always", "unusual", "never"] = "always"
    window_keys: tuple[str, ...] = ()
    """Keys of a sliding window; () for a model without."""
    window: int | None = None
    """Default of sliding_window."""
    full_layers: int | None = None
    """Default of max_window_layers, the first layers without a window; None if the key has no effect."""
    normalises: bool | None = None
    """Default of norm_topk_prob; None if expert weights are always divided by their sum."""
    dense_key: str = ""
    """Key of the layers without experts."""
    block: str = "mlp"
    """Module of router and experts."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of an expert."""
    all_experts: tuple[tuple[str, ExpertRows], ...] = ()
    """Tensors of all experts: gates with inputs, then outputs; () if each expert has its own."""
    router: str = "gate"
    """Module of the router."""
    router_bias: str = "gate.e_score_correction_bias"
    """Tensor of the biases for the choice of experts."""
    quantised: str | None = None
    """Supported quant_method of quantised weights."""
    shared: str = "shared_experts"
    """Module of the shared experts; the name of their gate ends in _gate."""
    eps_key: str = "rms_norm_eps"
    """Key of layer_norm_eps."""
    mlp: tuple[str, str] = ("up_proj", "down_proj")
    """Matrices of an MLP without gate_proj."""
    rotates_neighbours: bool = False
    """True if dimensions 2i and 2i + 1 of a head are rotated together; in mlm i and i + R/2."""
    fuses_qkv: bool = False
    """True if queries, keys and values are one tensor, qkv_proj."""
    fuses_gate: bool = False
    """True if gate and up of an MLP are one tensor, gate_up_proj."""

    @property
    def has_experts(self) -> bool:
        return any(field_name == "num_experts" for field_name, _ in self.fields.values())

    @property
    def is_all_experts(self) -> bool:
        """True if every layer has experts, of width intermediate_size."""
        return self.has_experts and "moe_intermediate_size" not in self.fields

    @cached_property
    def keys(self) -> hf.ConfigKeys:
        """All keys of config.json except rotary positions and windows."""
        fixed_keys = _FIXED if self.has_experts else _FIXED | _NO_EXPERTS
        fixed = {key: values for key, values in fixed_keys.items() if key not in self.fields}
        return hf.ConfigKeys(
            activation=self.activation,
            may_be_0=self.may_be_0,
            may_be_null=_MAY_BE_NULL,
            above_0=_ABOVE_0,
            fixed={**fixed, self.activation: self.activations, **self.fixed},
            fields={
                "vocab_size": ("vocab_size", self.defaults.vocabulary),
                "hidden_size": ("hidden_size", self.defaults.hidden),
                "num_hidden_layers": ("num_layers", self.defaults.layers),
                "num_attention_heads": ("num_heads", self.defaults.heads),
                "num_key_value_heads": ("num_kv_heads", self.defaults.kv_heads),
                "intermediate_size": ("ffn_hidden_size", self.defaults.ffn),
                "max_position_embeddings": ("max_positions", self.defaults.positions),
                "head_dim": ("head_dim", self.defaults.head_dim),
                self.eps_key: ("layer_norm_eps", self.defaults.eps),
                "initializer_range": ("init_std", 0.02),
                "attention_dropout": ("attention_dropout", 0.0),
                **self.fields,
            },
        )
