"""BERT as Megatron-LM names and configures it."""

from collections.abc import Mapping
from typing import Any

from mlm.models.megatron import OUTER, MegatronMapping, activation, gelu_problem, is_tanh_gelu, write_gelu


def notes(args: Mapping[str, Any]) -> list[str]:
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


MAPPING = MegatronMapping(
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
    notes=notes,
    layers="encoder",
    write=write_gelu,
    problem=gelu_problem,
)
