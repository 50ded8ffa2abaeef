"""Opening a Megatron-LM checkpoint: what does not belong together, or is no model of ours, is named."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mlm.checkpoint.native.slices import Region
from mlm.convert.megatron.files import find_files
from mlm.convert.megatron.merge import MegatronModel, open_checkpoint
from mlm.convert.megatron.model import MegatronOverrides
from mlm.util.errors import ConfigError, CorruptFileError, UserError
from tests.convert.megatron.written import (
    FILE,
    HIDDEN,
    LAYERS,
    VOCAB,
    Change,
    Layout,
    language_model,
    same_gpt2,
    written,
)


def opened(folder: Path, **settings: Any) -> MegatronModel:
    return open_checkpoint(find_files(folder), MegatronOverrides(**({"vocab_size": VOCAB} | settings)))


def test_tensors_stay_in_their_file_until_they_are_read(tmp_path: Path) -> None:
    """Mapped: a weight changed in the file after opening is the one that is read. Memory is one tensor's."""
    folder = written(tmp_path)
    found = opened(folder)
    path = folder / "mp_rank_00" / FILE
    bias = same_gpt2().state_dict()["transformer.h.1.mlp.c_fc.bias"]
    at = path.read_bytes().index(bias.numpy().tobytes())
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(torch.full_like(bias, 5.0).numpy().tobytes())
    whole = Region((0,), (4 * HIDDEN,))
    assert found.read("layers.1.mlp.up.bias", whole).tolist() == [5.0] * 4 * HIDDEN


def test_read_gives_the_region(tmp_path: Path) -> None:
    found = opened(written(tmp_path, Layout(tp=2)))
    whole = same_gpt2().state_dict()["transformer.wte.weight"]
    assert torch.equal(found.read("token.weight", Region((30, 4), (20, 9))), whole[30:50, 4:13])


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1).expand(HIDDEN),  # a few bytes that claim any size
        torch.zeros(HIDDEN, dtype=torch.int64),
        torch.zeros(HIDDEN, device="meta"),
        torch.zeros(HIDDEN).to_sparse(),
        [0.0] * HIDDEN,
        None,
    ],
    ids=["strides", "integers", "meta", "sparse", "list", "none"],
)
def test_weight_that_is_no_plain_tensor_is_rejected(tmp_path: Path, value: Any) -> None:
    name = "layers.2.mlp.dense_4h_to_h.bias"
    folder = written(tmp_path, change=lambda c: language_model(c)["encoder"].update({name: value}))
    with pytest.raises(CorruptFileError, match="is not a plain tensor"):
        opened(folder)


def holding_itself() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop.update({str(n): loop for n in range(50)})
    return loop


def shared_six_deep() -> dict[str, Any]:
    """50^6 entries in a few kilobytes."""
    shared: dict[str, Any] = {}
    for _ in range(6):
        shared = {str(n): shared for n in range(50)}
    return shared


@pytest.mark.parametrize("make", [holding_itself, shared_six_deep])
def test_dictionaries_without_end_are_rejected(tmp_path: Path, make: Callable[[], dict[str, Any]]) -> None:
    folder = written(tmp_path, change=lambda c: language_model(c).update(encoder=make()))
    with pytest.raises(CorruptFileError, match="no dictionary of names"):
        opened(folder)


def layers(content: dict[str, Any]) -> dict[str, Any]:
    encoder: dict[str, Any] = language_model(content)["encoder"]
    return encoder


def remove_layer_1(content: dict[str, Any]) -> None:
    for name in [name for name in layers(content) if name.startswith("layers.1.")]:
        del layers(content)[name]


BERT_BIAS = {"bias": torch.zeros(64)}
ADAPTER = {"layers.0.adapter.weight": torch.zeros(3)}
WRONG_SHAPE = {"layers.1.self_attention.dense.weight": torch.zeros(3, 3)}
PROBLEMS: dict[str, tuple[Change, str]] = {
    "half a bert": (lambda c: c["model"].update(lm_head=BERT_BIAS), "mlm_head.transform.weight is missing"),
    "no model": (lambda c: c.pop("model"), "holds no model"),
    "version": (lambda c: c.update(checkpoint_version=4.0), "checkpoint_version=4.0"),
    "args": (lambda c: c.update(args={"num_layers": 4}), "args are dict, not a Namespace"),
    "heads": (lambda c: setattr(c["args"], "num_attention_heads", 5), "num_heads=5 does not fit"),
    "no heads": (lambda c: delattr(c["args"], "num_attention_heads"), "give num_heads="),
    "odd": (lambda c: setattr(c["args"], "hidden_dropout", "a"), "args.hidden_dropout=a is out of range"),
    "unknown": (lambda c: layers(c).update(ADAPTER), "encoder.layers.0.adapter.weight is no part of GPT-2"),
    "missing": (
        lambda c: layers(c).pop("layers.1.mlp.dense_h_to_4h.bias"),
        "layers.1.mlp.up.bias is missing",
    ),
    "shape": (
        lambda c: layers(c).update(WRONG_SHAPE),
        r"attention.out.weight is \[3, 3\] in its 1 tensor-parallel ranks, \[32, 32\] is needed",
    ),
    "hole": (remove_layer_1, r"its layers are \[0, 2, 3\]"),
}


def test_names_in_a_file_reach_no_terminal_as_they_are(tmp_path: Path) -> None:
    odd = "layers.0.\x1b[2J\nmlm: all is well"
    folder = written(tmp_path, change=lambda c: language_model(c)["encoder"].update({odd: torch.zeros(3)}))
    with pytest.raises(UserError, match=r"x1b\[2J.n.*is no part of GPT-2") as refusal:
        opened(folder)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("case", PROBLEMS)
def test_problem_of_a_file_is_named_in_one_line(tmp_path: Path, case: str) -> None:
    change, message = PROBLEMS[case]
    with pytest.raises(UserError, match=message) as refusal:
        opened(written(tmp_path, change=change))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update(iteration=2000), "iteration=1000, but 2000 in mp_rank_00_000"),
        (lambda c: c.update(checkpoint_version=2.0), "checkpoint_version=3.0, but 2.0"),
        (lambda c: c.update(iteration=torch.ones(3)), r"iteration=\(Record\)"),
        (
            lambda c: language_model(c)["encoder"]["layers.0.input_layernorm.bias"].add_(1),
            "layers.0.attention_norm.bias differs between",
        ),
        (
            lambda c: language_model(c)["embedding"]["word_embeddings"]["weight"].add_(1),
            "output layer differs from the token table",
        ),
        (
            lambda c: language_model(c)["embedding"]["position_embeddings"]["weight"].mul_(2),
            "position.weight differs between",
        ),
    ],
    ids=["iteration", "version", "kind", "norm", "head", "positions"],
)
def test_ranks_that_do_not_belong_together_are_rejected(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(written(tmp_path, Layout(tp=2, pp=2), change))


@pytest.mark.parametrize("change", [None, lambda c: c.pop("args")], ids=["args", "no args"])
def test_missing_last_rank_is_seen_by_the_shapes(tmp_path: Path, change: Change | None) -> None:
    folder = written(tmp_path, Layout(tp=2), change)
    shutil.rmtree(folder / "mp_rank_01")
    with pytest.raises(CorruptFileError, match=r"attention\.qkv\.weight is \[48, 32\].*\[96, 32\] is needed"):
        opened(folder, num_heads=None if change is None else 4)


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
