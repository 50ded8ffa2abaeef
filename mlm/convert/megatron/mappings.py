"""Names, order of rows and configuration of GPT-2, BERT and Llama (Mistral, Qwen) in Megatron-LM.

A Llama is a run with `--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear`.
Source: NVIDIA/Megatron-LM, core/transformer/attention.py, mlp.py,
core/models/common/embeddings/rotary_pos_embedding.py; arguments.py.
"""

from collections.abc import Mapping
from typing import Any

from mlm.convert.locations import Location
from mlm.convert.megatron.mapping import ARGS, LAYER, OUTER, MegatronMapping, SizeOf, core_names
from mlm.models.config import ModelConfig
from mlm.models.llama.settings import LlamaSettings, num_blocks, unusual_form


def write_gelu(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of a GPT-2 or BERT; Megatron's fused kernel is the tanh form of gelu."""
    return {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "swiglu": False,
        "untie_embeddings_and_output_weights": False,
        "openai_gelu": False,
        "bias_gelu_fusion": model.activation == "gelu_tanh",
        "group_query_attention": False,
    }


def gelu_problem(model: ModelConfig) -> str | None:
    if model.activation not in ("gelu", "gelu_tanh") or model.norm != "pre":
        return f"model.activation={model.activation} model.norm={model.norm}: Megatron has gelu and norm=pre"
    return None


def gelu_of(args: Mapping[str, Any]) -> str:
    """Return model.activation of a run: gelu_tanh if it computed gelu by its tanh form.

    Megatron-LM's fused kernel and openai_gelu are the tanh form, as is every run before openai_gelu became an
    argument (2020); otherwise it is torch's exact gelu.
    """
    is_fused = args.get("bias_gelu_fusion", "openai_gelu" not in args) is True and not args.get("onnx_safe")
    return "gelu_tanh" if args.get("openai_gelu") is True or is_fused else "gelu"


def bert_notes(args: Mapping[str, Any]) -> list[str]:
    """Return a remark if layers and masked-LM head were trained with different forms of gelu.

    Only the layers use the fused kernel (bias_gelu_fusion).
    """
    is_tanh_in_head = args.get("openai_gelu") is True or "openai_gelu" not in args
    if gelu_of(args) == "gelu" or is_tanh_in_head:
        return []
    return [
        "its masked-LM head was trained with the exact gelu, its layers with the tanh approximation "
        "(args.bias_gelu_fusion=True); mlm computes the approximation in both, within 5e-4 of the other"
    ]


GPT2 = MegatronMapping(
    name="GPT-2",
    vocabularies=(50257,),
    settings=lambda args: {"activation": gelu_of(args)},
    write=write_gelu,
    problem=gelu_problem,
)
BERT = MegatronMapping(
    name="BERT",
    outer={
        **OUTER,
        "token_type.weight": "embedding.tokentype_embeddings.weight",
        **core_names("pooler", "pooler.dense.{}"),
        **core_names("mlm_head.transform", "lm_head.dense.{}"),
        **core_names("mlm_head.norm", "lm_head.layer_norm.{}"),
        "mlm_head.vocabulary.bias": "output_layer.bias",
        **core_names("sop_head", "binary_head.{}"),
    },
    vocabularies=(30522, 28996),  # uncased and cased
    settings=lambda args: {"activation": gelu_of(args), "token_types": 2},
    # a BERT trained with --bert-no-binary-head has neither
    zero_if_absent={
        "token_type.weight": "it knows no token types: their embeddings are zeros, which training moves"
    },
    initial_if_absent=("pooler", "sop_head"),
    notes=bert_notes,
    layers="encoder",
    write=write_gelu,
    problem=gelu_problem,
)
LLAMA3_CONTEXT = 8192
"""Context before scaling (use_rope_scaling), a constant of Megatron Core, like its factors 1 and 4."""


def llama_rows(model: ModelConfig) -> dict[str, Location]:
    """Return rows in the tensors of attention, [group][queries, k, v][head_dim], and MLP, [gate, up]."""
    settings = LlamaSettings.of(model)
    kv, width = settings.num_kv_heads, settings.head_dim
    queries = model.num_heads // kv * width
    query = Location((), section=(0, queries, queries + 2 * width), blocks=kv)
    pair = Location((), section=(queries, queries + 2 * width, queries + 2 * width), blocks=kv)
    return {
        **{f"attention.query.{part}": query for part in ("weight", "bias")},
        **{f"attention.kv.{part}": pair for part in ("weight", "bias")},
        "mlp.up.weight": Location((), num_heads=num_blocks(model), parts=2),
    }


def llama_settings(args: Mapping[str, Any]) -> dict[str, Any]:
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
        options |= {"rope_scaling": "llama3", "rope_original_positions": LLAMA3_CONTEXT}
        options["rope_factor"] = args.get("rope_scaling_factor") or 8.0
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


def write_llama(model: ModelConfig) -> dict[str, Any]:
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


def llama_problem(model: ModelConfig) -> str | None:
    settings = LlamaSettings.of(model)
    factors = settings.rope_low_freq_factor, settings.rope_high_freq_factor
    is_usual = (settings.rope_original_positions, *factors) == (LLAMA3_CONTEXT, 1.0, 4.0)
    if settings.rope_scaling in ("dynamic", "yarn", "longrope") or (
        settings.rope_scaling == "llama3" and not is_usual
    ):
        return f"its rope_scaling={settings.rope_scaling} has other factors than Megatron Core's"
    if settings.window:
        return f"its window={settings.window}: written would be a model that attends to all"
    if model.activation != "silu":
        return f"its activation={model.activation}: Megatron's --swiglu is silu's"
    if settings.qk_norm_whole:
        return "its qk_norm_whole=true: --qk-layernorm norms each head"
    form = unusual_form(settings)
    return None if form is None else f"its {form}: written would be a model without it"


LLAMA = MegatronMapping(
    name="Llama",
    summary="RMSNorm first, rotary positions, SwiGLU, no biases except in queries, keys and values",
    layer={
        **LAYER,
        **core_names("attention.query", "self_attention.linear_qkv.{}"),
        **core_names("attention.kv", "self_attention.linear_qkv.{}"),
        "attention.query_norm.weight": "self_attention.q_layernorm.weight",
        "attention.key_norm.weight": "self_attention.k_layernorm.weight",
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
    rows=llama_rows,
    sizes={
        "vocab_size": SizeOf("token.weight"),
        "hidden_size": SizeOf("final_norm.weight"),
        "ffn_hidden_size": SizeOf("layers.0.mlp.down.weight", dim=1),
    },
    vocabularies=(),
    settings=llama_settings,
    write=write_llama,
    problem=llama_problem,
)

MAPPINGS = {"gpt2": GPT2, "bert": BERT, "llama": LLAMA}
"""Kind of model -> its mapping, in the order in which they are tried."""
