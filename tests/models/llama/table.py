"""The table of models of `transformers` that ours are compared with: a row for each, in three odd shapes.

A new family is a row of ROWS: the class of `transformers`, and settings that show what is its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from mlm.convert.huggingface.llama import MAPPING
from mlm.models.config import ModelConfig

BATCH = 2
COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}


@dataclass(frozen=True)
class Shape:
    """A shape of which no size is a multiple of another's tile."""

    length: int
    """Tokens of a sample."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int


SHAPES = (
    Shape(21, 97, 36, 52, 2, 4, 2, 10, 48),
    Shape(33, 131, 54, 45, 3, 6, 3, 8, 33),
    Shape(9, 259, 20, 28, 4, 2, 1, 14, 64),
)
"""The first splits over tp = 2 and pp = 2; windows of rows are shorter than its length."""


@dataclass(frozen=True)
class Row:
    """A model of `transformers`."""

    kind: str
    """Prefix of its configuration's class."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of its config.json besides those of a shape, of which null leaves a key out."""
    by_shape: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of some shapes."""
    has_head_dim: bool = True
    """False if a head's width is hidden_size / num_attention_heads."""
    config_kind: str = ""
    """Prefix of its configuration, if it is another."""
    kept_null: tuple[str, ...] = ()
    """Keys that are null, which another default stands for if they are left out."""

    def config(self, shape: int) -> Any:
        sizes = {**vars(SHAPES[shape])}
        del sizes["length"]
        if not self.has_head_dim:
            sizes["hidden_size"] = sizes["num_attention_heads"] * sizes.pop("head_dim")
        given = {**sizes, **COMMON, **self.settings, **self.by_shape.get(shape, {})}
        kept = {*self.kept_null, *(key for key in COMMON if key.endswith("_token_id"))}
        given = {key: value for key, value in given.items() if value is not None or key in kept}
        return getattr(transformers, f"{self.config_kind or self.kind}Config")(**given)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12, "rope_theta": 100.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
_LATENT: dict[str, Any] = {"kv_lora_rank": 9, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "head_dim": None}
_DEEPSEEK: dict[str, Any] = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
    **{"moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1},
    **{**_LATENT, "q_lora_rank": 14, "v_head_dim": 5, "rms_norm_eps": 1e-6},
}
_EVERY_HEAD = {n: {"num_key_value_heads": shape.num_attention_heads} for n, shape in enumerate(SHAPES)}
"""As many heads of keys and values as of queries."""


def _alternating(pattern: str) -> dict[int, dict[str, list[str]]]:
    """Types of layers in each shape, of a pattern that repeats: s (sliding) or f (full)."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    return {
        n: {"layer_types": [names[pattern[layer % len(pattern)]] for layer in range(shape.num_hidden_layers)]}
        for n, shape in enumerate(SHAPES)
    }


_HIDDEN_IS_HEADS = {
    n: {"hidden_size": shape.num_attention_heads * shape.head_dim} for n, shape in enumerate(SHAPES)
}
_WIDE_HEADS = {n: {"hidden_size": 8 * shape.num_attention_heads} for n, shape in enumerate(SHAPES)}


def _longrope(count: int) -> dict[str, Any]:
    factors = [1 + 0.3 * n for n in range(count)]
    long = [2 * factor for factor in factors]
    shared = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75}
    return {**shared, "short_factor": factors, "long_factor": long}


ROWS: dict[str, Row] = {
    "llama": Row("Llama"),
    "llama tied, one kv head, geglu": Row(
        "Llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "llama with biases": Row("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": Row("Llama", {"rope_parameters": LLAMA3}),
    "linear": Row("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}}),
    "yarn": Row("Qwen2", {"rope_parameters": YARN}, has_head_dim=False),
    "yarn with an attention factor": Row(
        "Llama",
        {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 4, "truncate": False}},
    ),
    "arcee": Row("Arcee", {"hidden_act": "relu2"}),
    "ernie4_5": Row("Ernie4_5"),
    "glm": Row("Glm", by_shape={0: {"head_dim": 12}, 2: {"head_dim": 16}}),
    "glm4": Row("Glm4", {"head_dim": 12}),
    "granite": Row(
        "Granite",
        {
            **{"embedding_multiplier": 12.0, "attention_multiplier": 0.0625},
            **{"residual_multiplier": 0.22, "logits_scaling": 6.0},
        },
        has_head_dim=False,
    ),
    "starcoder2": Row("Starcoder2", {"sliding_window": 6, "norm_epsilon": 1e-4}, has_head_dim=False),
    "stablelm": Row("StableLm", {"partial_rotary_factor": 0.5}, by_shape=_WIDE_HEADS, has_head_dim=False),
    "stablelm, parallel, biases": Row(
        "StableLm",
        {"use_parallel_residual": True, "use_qkv_bias": True, "layer_norm_eps": 1e-3},
        by_shape=_WIDE_HEADS,
        has_head_dim=False,
    ),
    "nemotron": Row("Nemotron", {"norm_eps": 1e-4, "head_dim": 12}),
    "cohere": Row("Cohere", {"logit_scale": 0.3, "layer_norm_eps": 1e-4}, has_head_dim=False),
    "cohere2": Row(
        "Cohere2",
        {"logit_scale": 0.3, "layer_norm_eps": 1e-4, "sliding_window": 6},
        by_shape=_alternating("sf"),
        has_head_dim=False,
    ),
    "internlm3": Row(
        "InternLM3", {"rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 50.0}}
    ),
    "helium": Row("Helium", by_shape=_HIDDEN_IS_HEADS),
    "mistral": Row("Mistral", {"sliding_window": 5}),
    "phi3": Row(
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.75}},
        by_shape={0: {"hidden_size": 64}, 1: {"sliding_window": 7}, 2: {"sliding_window": 3}},
        has_head_dim=False,
    ),
    "phi3 with longrope": Row(
        "Phi3",
        {"rope_parameters": _longrope(3), "hidden_act": "gelu"},
        by_shape={
            0: {"hidden_size": 32, "original_max_position_embeddings": 30},
            1: {"original_max_position_embeddings": 4, "rope_parameters": _longrope(3)},
            2: {"original_max_position_embeddings": 2, "rope_parameters": _longrope(5)},
        },
        has_head_dim=False,
    ),
    "seed_oss": Row("SeedOss", {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "qwen2": Row("Qwen2", {"tie_word_embeddings": True}, has_head_dim=False),
    "qwen3": Row("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3 with a window": Row(
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "num_key_value_heads": 1},
    ),
    "qwen3 whose last layers have a window": Row(
        "Qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ),
    "ministral": Row("Ministral", {"sliding_window": 6}, by_shape=_alternating("fs")),
    "smollm3": Row("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3 with windows": Row(
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": 5, "head_dim": 12},
        by_shape={
            n: {"no_rope_layers": [0, 1, 1, 0][: shape.num_hidden_layers]} for n, shape in enumerate(SHAPES)
        },
    ),
    "olmo2": Row("Olmo2", has_head_dim=False),
    "olmo3": Row("Olmo3", {"sliding_window": 7}, by_shape=_alternating("sf"), has_head_dim=False),
    "olmo3 with a scaled context": Row(
        "Olmo3",
        {
            "sliding_window": 4,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        by_shape=_alternating("fs"),
        has_head_dim=False,
    ),
    "gemma": Row("Gemma"),
    "gemma2": Row(
        "Gemma2",
        {
            **{"sliding_window": 5, "query_pre_attn_scalar": 7},
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
        },
    ),
    "gemma3": Row(
        "Gemma3",
        {
            **{"sliding_window": 6, "query_pre_attn_scalar": 11},
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
        by_shape=_alternating("sf"),
        config_kind="Gemma3Text",
    ),
    "mixtral": Row("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 1}),
    "qwen3_moe": Row(
        "Qwen3Moe",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
            **{"norm_topk_prob": True, "mlp_only_layers": [0]},
        },
    ),
    "olmoe": Row(
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False},
        has_head_dim=False,
    ),
    "deepseek_v3": Row(
        "DeepseekV3",
        {**_DEEPSEEK, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        by_shape=_EVERY_HEAD,
    ),
    "deepseek_v3 without experts": Row(
        "DeepseekV3",
        {**_LATENT, "first_k_dense_replace": 4, "q_lora_rank": None, "v_head_dim": 14},
        by_shape=_EVERY_HEAD,
        kept_null=("q_lora_rank",),
    ),
    "deepseek_v2": Row(
        "DeepseekV2",
        {
            **{**_DEEPSEEK, "kv_lora_rank": 10},  # theirs runs with no odd one
            **{"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7},
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
        by_shape=_EVERY_HEAD,
    ),
    "deepseek_v2 lite": Row(
        "DeepseekV2",
        {
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1},
            **{"moe_intermediate_size": 12, **_LATENT, "kv_lora_rank": 10, "q_lora_rank": None},
            "v_head_dim": 14,
        },
        by_shape=_EVERY_HEAD,
        kept_null=("q_lora_rank",),
    ),
    "granitemoe": Row(
        "GraniteMoe",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12},
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7},
            **{"logits_scaling": 2.5, "tie_word_embeddings": True},
        },
    ),
    "glm4_moe": Row(
        "Glm4Moe",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1},
            **{"moe_intermediate_size": 12, "n_shared_experts": 2, "routed_scaling_factor": 1.7},
            **{"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 8},
        },
    ),
    "glm4_moe without norms and biases": Row(
        "Glm4Moe",
        {
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 0},
            **{"moe_intermediate_size": 8, "head_dim": 12, "tie_word_embeddings": True},
        },
    ),
    "ernie4_5_moe": Row(
        "Ernie4_5_Moe",
        {
            **{"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2},
            **{"moe_intermediate_size": 8, "tie_word_embeddings": False},
        },
        by_shape={1: {"moe_num_shared_experts": 0}},
        has_head_dim=False,
    ),
    "gpt_oss": Row(
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12},
            **{"sliding_window": 5, "swiglu_limit": 1.5, "swiglu_alpha": 1.3},
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "qwen2_moe": Row(
        "Qwen2Moe",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
            **{"shared_expert_intermediate_size": 36, "mlp_only_layers": [0]},
        },
        has_head_dim=False,
    ),
}


@cache
def their_model(name: str, shape: int = 0) -> Any:
    """A model of random weights, biases and norms too, in float32. Shared: copy it to change it."""
    row = ROWS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        row.config(shape), attn_implementation="eager"
    ).eval()
    buffers = (b for n, b in model.named_buffers() if n.endswith("correction_bias"))
    with torch.no_grad():
        for p in (*model.parameters(), *buffers):
            p.add_(torch.randn_like(p) * 0.1)
    return model


def on_disk(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model, or their gradients, as `save_pretrained` names them: each expert for itself."""
    stored: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return stored


def their_gradients(model: Any) -> dict[str, Tensor]:
    """Gradients by name, 0 of parameters that took no part and of buffers."""
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    state = model.state_dict().items()
    return grads | {name: torch.zeros_like(value) for name, value in state if name not in grads}


def choices(model: Any, tokens: Tensor) -> list[Tensor]:
    """The experts of each token in each layer that has some, sorted: [B S, k]."""
    found = []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("router")]
    hooks = [each.register_forward_hook(lambda _, __, out: found.append(out[2])) for each in routers]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return [each.sort(-1).values for each in found]


def our_config(model: Any) -> ModelConfig:
    """Our settings of a model of `transformers`."""
    return MAPPING.read(model.config.to_dict(), "config.json")[0]


def samples(name: str, shape: int, count: int = 1) -> Tensor:
    """Random tokens and the ones after them: [count, B, S + 1]."""
    size = (count, BATCH, SHAPES[shape].length)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(their_model(name, shape).config.vocab_size, size, generator=generator)
