"""GPT-2 and BERT as Megatron-LM names and configures them, and the table of all mappings."""

from collections.abc import Mapping
from typing import Any

from mlm.convert.megatron import llama
from mlm.convert.megatron.mapping import OUTER, MegatronMapping
from mlm.models.config import ModelConfig


def write_gelu(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of a GPT-2 or BERT; the fused kernel is gelu's tanh form."""
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
    """Return why Megatron Core has no such GPT-2 or BERT."""
    if model.activation not in ("gelu", "gelu_tanh") or model.norm != "pre":
        return f"model.activation={model.activation} model.norm={model.norm}: Megatron has gelu and norm=pre"
    return None


def is_tanh_gelu(args: Mapping[str, Any]) -> bool:
    """Return True if a run computed gelu by its tanh form.

    That is Megatron-LM's fused kernel, its openai_gelu, and all of it before openai_gelu became a choice
    (2020); torch's gelu, its other choice, is the exact one.
    """
    if args.get("openai_gelu") is True:
        return True
    if args.get("onnx_safe"):
        return False
    return args.get("bias_gelu_fusion", "openai_gelu" not in args) is True


def activation(args: Mapping[str, Any]) -> str:
    """Return model.activation of a run."""
    return "gelu_tanh" if is_tanh_gelu(args) else "gelu"


def bert_notes(args: Mapping[str, Any]) -> list[str]:
    """Return a remark if layers and masked-LM head were trained with two forms of gelu.

    The fused kernel (bias_gelu_fusion) is of the layers alone.
    """
    is_tanh_in_head = args.get("openai_gelu") is True or "openai_gelu" not in args
    if not is_tanh_gelu(args) or is_tanh_in_head:
        return []
    return [
        "its masked-LM head was trained with the exact gelu, its layers with the tanh approximation "
        "(args.bias_gelu_fusion=True); mlm computes the approximation in both, within 5e-4 of the other"
    ]


GPT2 = MegatronMapping(
    name="GPT-2",
    vocabularies=(50257,),
    settings=lambda args: {"activation": activation(args)},
    write=write_gelu,
    problem=gelu_problem,
)
BERT = MegatronMapping(
    name="BERT",
    outer=OUTER
    | {
        r"(?:embedding\.)?tokentype_embeddings\.weight": "token_type.weight",
        r"pooler\.dense\.(weight|bias)": "pooler.{}",
        r"lm_head\.dense\.(weight|bias)": "mlm_head.transform.{}",
        r"lm_head\.(?:layernorm|norm|layer_norm)\.(weight|bias)": "mlm_head.norm.{}",
        r"lm_head\.bias|output_layer\.bias": "mlm_head.vocabulary.bias",
        r"binary_head\.(weight|bias)": "sop_head.{}",
    },
    vocabularies=(30522, 28996),  # uncased and cased
    settings=lambda args: {"activation": activation(args), "token_types": 2},
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
MAPPINGS = {"gpt2": GPT2, "bert": BERT, "llama": llama.MAPPING}
"""Kind of model -> its mapping, in the order in which they are tried."""
