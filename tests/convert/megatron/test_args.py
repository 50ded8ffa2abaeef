"""Model settings from Megatron-LM's arguments, and the arguments that are not supported."""

from pathlib import Path
from typing import Any

import pytest

from mlm.util.errors import ConfigError, UserError
from tests.convert.megatron.test_merge import opened
from tests.convert.megatron.written import HIDDEN, LAYERS, VOCAB, Layout, written

UNSUPPORTED = dict.fromkeys(
    (
        *("use_rotary_position_embeddings", "position_embedding_type", "add_position_embedding"),
        *("normalization", "apply_layernorm_1p", "apply_residual_connection_post_layernorm", "swiglu"),
        *("squared_relu", "untie_embeddings_and_output_weights", "add_bias_linear", "num_experts"),
        *("quick_geglu", "disable_bias_linear", "multi_latent_attention", "qk_layernorm", "qk_l2_norm"),
        *("softmax_type", "window_size", "attention_output_gate", "activation_func_clamp_value"),
        *("mtp_num_layers", "retro_add_retriever", "hybrid_override_pattern", "use_mup", "scaling_recipe"),
    ),
    "other",
) | {"group_query_attention": True, "softmax_scale": 0.125, "swiglu": True, "add_bias_linear": False}


@pytest.mark.parametrize("setting", UNSUPPORTED)
def test_settings_of_other_models_are_rejected_by_name(tmp_path: Path, setting: str) -> None:
    value = UNSUPPORTED[setting]
    folder = written(tmp_path, Layout(args={setting: value, "num_query_groups": 2}))
    words = "Megatron Bridge" if setting == "num_experts" else "mlm imports GPT-2"
    with pytest.raises(ConfigError, match=rf"args\.{setting}={value}.*{words}") as refusal:
        opened(folder)
    assert len(refusal.value.problems) == 1


def test_usual_settings_of_newer_versions_pass(tmp_path: Path) -> None:
    usual = {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "group_query_attention": False,
        "num_query_groups": 1,
        "num_experts": None,
        "add_bias_linear": True,
        "kv_channels": HIDDEN // 4,
        "softmax_scale": (HIDDEN // 4) ** -0.5,
        "use_mup": False,
        "mup_attn_scale_power": 1.0,
        "scaling_recipe": "none",
    }
    assert opened(written(tmp_path, Layout(args=usual))).notes == ()


def test_args_become_the_models_configuration(tmp_path: Path) -> None:
    args = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.2,
        "init_method_std": 0.006,
        "layernorm_epsilon": 1e-6,
    }
    found = opened(written(tmp_path, Layout(args=args))).model
    assert (found.hidden_dropout, found.attention_dropout) == (0.0, 0.2)
    assert (found.init_std, found.layer_norm_eps) == (0.006, 1e-6)
    assert (found.num_layers, found.hidden_size, found.num_heads) == (LAYERS, HIDDEN, 4)
    assert (found.max_positions, found.vocab_size, found.ffn_size) == (24, VOCAB, 4 * HIDDEN)


@pytest.mark.parametrize(
    "gelu, exact",
    [
        ({}, False),
        ({"bias_gelu_fusion": False}, True),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, False),
        ({"onnx_safe": True}, True),
        ({"bias_gelu_fusion": ...}, True),  # mid 2020: torch's gelu
        ({"bias_gelu_fusion": ..., "openai_gelu": ...}, False),  # early 2020: the tanh form
    ],
)
def test_gelu_is_the_one_it_was_trained_with(tmp_path: Path, gelu: dict[str, Any], exact: bool) -> None:
    found = opened(written(tmp_path, Layout(args=gelu)))
    assert (found.model.activation == "gelu", found.notes) == (exact, ())


@pytest.mark.parametrize(
    "rows, settings, wanted",
    [
        (50304, {}, 50257),
        (50257, {}, 50257),
        (50385, {}, None),  # 50257 would have been padded to 50304
        (50048, {}, None),
        (64, {"tokenizer_size": 60}, 60),
        (64, {"tokenizer_size": 65}, None),
        (64, {"vocab_size": 64, "tokenizer_size": 60}, 64),
        (64, {"vocab_size": 65}, None),
        (64, {"vocab_size": 62, "tokenizer_size": 63}, None),
    ],
)
def test_vocabulary_is_reported_or_gpt2s(
    tmp_path: Path, rows: int, settings: dict[str, int], wanted: int | None
) -> None:
    folder = written(tmp_path, Layout(rows=rows))
    if wanted is not None:
        assert opened(folder, **({"vocab_size": None} | settings)).model.vocab_size == wanted
    else:
        with pytest.raises(UserError, match="token"):
            opened(folder, **({"vocab_size": None} | settings))
