"""Llama, Mistral and Qwen as Megatron-LM names and orders them.

`--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear`. One weight holds
queries, keys and values, [group][its queries, k, v][head_dim]; another gates and inputs, on each
tensor-parallel rank [gate, up]. Source: NVIDIA/Megatron-LM, core/transformer/attention.py, mlp.py,
core/models/common/embeddings/rotary_pos_embedding.py; arguments.py.
"""

from collections.abc import Mapping
from typing import Any

from mlm.convert.megatron.mapping import ARGS, LAYER, MegatronMapping, SizeOf
from mlm.convert.row_layouts import RowLayout, RowLayouts
from mlm.models.config import ModelConfig
from mlm.models.llama.settings import LlamaSettings, num_blocks

LLAMA3_CONTEXT = 8192
"""Context before scaling, which Megatron Core fixes, as it does the factors 1 and 4 (use_rope_scaling)."""


def layouts(model: ModelConfig, tp: int) -> RowLayouts:
    """Return the tensors of attention and MLP, theirs merged from `tp` ranks."""
    settings = LlamaSettings.of(model)
    kv, width = settings.num_kv_heads, settings.head_dim
    ours: dict[str, RowLayout] = {}
    theirs: dict[str, RowLayout] = {}
    for part in ("weight", "bias") if settings.qkv_bias else ("weight",):
        q, k, v = (f"{name}.{part}" for name in "qkv")
        rows_q, rows_kv = model.num_heads * width, kv * width
        ours[f"attention.query.{part}"] = RowLayout(((q, rows_q),), 1)
        ours[f"attention.kv.{part}"] = RowLayout(((k, rows_kv), (v, rows_kv)), kv)
        theirs[f"attention.qkv.{part}"] = RowLayout(((q, rows_q), (k, rows_kv), (v, rows_kv)), kv)
    pair = (("gate", model.ffn_size), ("up", model.ffn_size))
    ours["mlp.up.weight"] = RowLayout(pair, num_blocks(model))
    theirs["mlp.up.weight"] = RowLayout(pair, tp)
    return RowLayouts(ours, theirs)


def settings_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of ModelConfig of a run's arguments."""
    heads = args.get("num_attention_heads")
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    options: dict[str, Any] = {
        "num_kv_heads": groups or heads,
        "head_dim": args.get("kv_channels"),
        "rope_theta": args.get("rotary_base"),
        "rotary_fraction": args.get("rotary_percent"),
        "tied": args.get("untie_embeddings_and_output_weights") is not True,
        "qkv_bias": args.get("add_qkv_bias") is True,
        "qk_norm": args.get("qk_layernorm") is True,
    }
    if args.get("use_rope_scaling") is True:
        options |= {
            "rope_scaling": "llama3",
            "rope_factor": args.get("rope_scaling_factor") or 8.0,
            "rope_original_positions": LLAMA3_CONTEXT,
        }
    elif args.get("rotary_seq_len_interpolation_factor") not in (None, 1):
        options |= {"rope_scaling": "linear", "rope_factor": args["rotary_seq_len_interpolation_factor"]}
    for name in ("rope_theta", "rope_factor", "rotary_fraction"):
        if type(options.get(name)) is int:
            options[name] = float(options[name])
    options = {name: value for name, value in options.items() if value not in (None, False)}
    return {
        "activation": "silu",
        "max_positions": args.get("max_position_embeddings") or args.get("seq_length") or 4096,
        "options": options,
    }


def write_args(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of such a model."""
    settings = LlamaSettings.of(model)
    scaling: dict[str, Any] = {"use_rope_scaling": False}
    if settings.rope_scaling == "llama3":
        scaling = {"use_rope_scaling": True, "rope_scaling_factor": settings.rope_factor}
    elif settings.rope_scaling == "linear":
        scaling |= {"rotary_seq_len_interpolation_factor": settings.rope_factor}
    return {
        "position_embedding_type": "rope",
        "rotary_base": settings.rope_theta,
        "rotary_percent": settings.rotary_fraction,
        "rotary_interleaved": False,
        **scaling,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": settings.qkv_bias,
        "qk_layernorm": settings.qk_norm,
        "untie_embeddings_and_output_weights": not settings.tied,
        "group_query_attention": settings.num_kv_heads != model.num_heads,
        "num_query_groups": settings.num_kv_heads,
        "kv_channels": settings.head_dim,
    }


def problem(model: ModelConfig) -> str | None:
    """Return why Megatron Core has no such model."""
    settings = LlamaSettings.of(model)
    factors = (
        settings.rope_original_positions,
        settings.rope_low_freq_factor,
        settings.rope_high_freq_factor,
    )
    if settings.rope_scaling == "yarn" or (
        settings.rope_scaling == "llama3" and factors != (LLAMA3_CONTEXT, 1.0, 4.0)
    ):
        return f"its rope_scaling={settings.rope_scaling} has other factors than Megatron Core's"
    if settings.window:
        return f"its window={settings.window}: written would be a model that attends to all"
    if model.activation != "silu":
        return f"its activation={model.activation}: Megatron's --swiglu is silu's"
    if settings.qk_norm_whole:
        return "its qk_norm_whole=true: --qk-layernorm norms each head"
    return None


MAPPING = MegatronMapping(
    name="Llama",
    summary="RMSNorm first, rotary positions, SwiGLU, no biases but those of queries, keys and values",
    layer=LAYER
    | {
        r"self_attention\.q_layernorm\.weight": "attention.query_norm.weight",
        r"self_attention\.k_layernorm\.weight": "attention.key_norm.weight",
    },
    args={
        **ARGS,
        "use_rotary_position_embeddings": (None, False, True),
        "position_embedding_type": ("rope",),
        "rotary_interleaved": (None, False),
        "normalization": ("RMSNorm",),
        "swiglu": (True,),
        "untie_embeddings_and_output_weights": (None, False, True),
        "add_bias_linear": (False,),
        "disable_bias_linear": (None, True, False),
        "qk_layernorm": (None, False, True),
        "yarn_rotary_scaling_factor": (None,),
    },
    required=("position_embedding_type", "normalization", "swiglu", "add_bias_linear"),
    is_grouped=True,
    layouts=layouts,
    sizes={
        "vocab_size": SizeOf("token.weight", is_split=True),
        "hidden_size": SizeOf("final_norm.weight", is_split=False),
        "ffn_hidden_size": SizeOf("layers.0.mlp.down.weight", is_split=True, dim=1),
    },
    vocabularies=(),
    settings=settings_of,
    write=write_args,
    problem=problem,
)
