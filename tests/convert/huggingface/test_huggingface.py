"""Folders of `transformers`, GPT-2's and BERT's: which are read, and what is said about the others."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mlm.checkpoint.native.slices import Region
from mlm.convert.huggingface.families import mapping_of_kind
from mlm.convert.huggingface.folder import read_model
from mlm.convert.huggingface.mapping import TokenIds
from mlm.convert.huggingface.tensors import HFTensors
from mlm.models.config import ModelConfig
from mlm.util.errors import ConfigError, CorruptFileError, UserError
from tests.convert import hf_berts
from tests.convert.hf_berts import make_bert
from tests.convert.hf_models import MODEL, SHAPE, edit_config, edit_tensors, make_model

Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    make_bert(tmp_path / "bert", "bert", "ForPreTraining")
    return tmp_path / "bert"


def read(folder: Path) -> HFTensors:
    """All that is checked before a tensor is imported."""
    tensors = HFTensors(read_model(folder))
    tensors.check()
    return tensors


@pytest.mark.parametrize(
    "model",
    [
        *(replace(MODEL, activation=activation) for activation in ("gelu", "gelu_tanh", "relu2")),  # type: ignore[arg-type]
        *(replace(hf_berts.MODEL, norm="pre", activation=activation) for activation in ("gelu", "gelu_tanh")),  # type: ignore[arg-type]
        hf_berts.MODEL,
    ],
    ids=lambda model: f"{model.kind}-{model.norm}-{model.activation}",
)
def test_config_survives_both_ways(model: ModelConfig) -> None:
    mapping = mapping_of_kind(model.kind)
    assert mapping.read(mapping.write(model, TokenIds(0)), "") == (model, [])


@pytest.mark.parametrize(
    ("kind", "layers", "width", "vocabulary", "positions", "eps"),
    [
        ("gpt2", 12, 768, 50257, 1024, 1e-5),
        ("bert", 12, 768, 30522, 512, 1e-12),
        ("megatron-bert", 24, 1024, 29056, 512, 1e-12),
    ],
)
def test_missing_keys_have_the_defaults_of_transformers(
    kind: str, layers: int, width: int, vocabulary: int, positions: int, eps: float
) -> None:
    model, _ = mapping_of_kind(kind.removeprefix("megatron-")).read({"model_type": kind}, "")
    assert (model.num_layers, model.hidden_size, model.num_heads) == (layers, width, width // 64)
    assert (model.vocab_size, model.max_positions, model.layer_norm_eps) == (vocabulary, positions, eps)
    assert (model.hidden_dropout, model.ffn_hidden_size) == (0.1, None)
    assert (model.token_types, model.activation) == ((0, "gelu_tanh") if kind == "gpt2" else (2, "gelu"))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("gpt2", "activation_function", "relu"),
        ("gpt2", "is_causal", False),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "pruned_heads", {"0": [1]}),
        ("gpt2", "transformers_weights", "../other.safetensors"),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "is_decoder", True),
        ("bert", "quantization_config", {"bits": 4}),
        ("bert", "type_vocab_size", 0),
    ],
)
def test_what_our_model_cannot_express_is_rejected_by_key(
    request: pytest.FixtureRequest, kind: str, key: str, value: Any
) -> None:
    folder = request.getfixturevalue("folder" if kind == "gpt2" else "bert")
    edit_config(folder, **{key: value})
    with pytest.raises(ConfigError) as caught:
        read_model(folder)
    (problem,) = caught.value.problems
    assert key in problem
    assert "config.json" in problem


def duplicate(tensors: Tensors) -> None:
    tensors["wpe.weight"] = tensors["transformer.wpe.weight"].clone()


def untie(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    tensors["lm_head.weight"][330, 3] += 1


def token_labels(tensors: Tensors) -> None:
    for name in [name for name in tensors if "pooler" in name or name.startswith("cls.")]:
        del tensors[name]
    tensors["classifier.weight"] = torch.ones(2, 24)


def untie_bert(tensors: Tensors) -> None:
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1


QUERY = "bert.encoder.layer.1.attention.self.query.weight"
GAMMA = "bert.embeddings.LayerNorm.gamma"


@pytest.mark.parametrize(
    ("kind", "edit", "said"),
    [
        ("gpt2", lambda t: t.pop("transformer.h.1.ln_2.bias"), r"no tensor h\.1\.ln_2\.bias"),
        (
            "gpt2",
            lambda t: t.update({"v_head.weight": torch.ones(2, 24)}),
            "v_head.weight is not a parameter",
        ),
        (
            "gpt2",
            lambda t: t.update({"transformer.h.3.ln_1.bias": torch.ones(24)}),
            r"h\.3\.ln_1\.bias is no",
        ),
        (
            "gpt2",
            lambda t: t.update({"transformer.wpe.weight": torch.ones(47, 24)}),
            r"wpe\.weight is \[47, 24\]",
        ),
        (
            "gpt2",
            lambda t: t.update({"transformer.ln_f.bias": torch.ones(24).double()}),
            r"ln_f\.bias is F64",
        ),
        ("gpt2", duplicate, r"wpe\.weight is in .* and in"),
        ("gpt2", untie, r"lm_head\.weight differs from wte\.weight"),
        ("bert", lambda t: t.pop(QUERY), r"no tensor encoder\.layer\.1\.attention\.self\.query\.weight"),
        ("bert", lambda t: t.update({QUERY: torch.ones(24, 24).int()}), r"query\.weight is I32"),
        ("bert", lambda t: t.update({"classifier.weight": torch.ones(2, 24)}), "of two heads"),
        ("bert", lambda t: t.update({GAMMA: torch.ones(24)}), r"embeddings\.LayerNorm\.weight is in"),
        ("bert", token_labels, "a label for each token"),
        ("bert", untie_bert, "differs from"),
    ],
)
def test_tensors_that_are_not_the_model_are_named(
    request: pytest.FixtureRequest, kind: str, edit: Callable[[Tensors], Any], said: str
) -> None:
    folder = request.getfixturevalue("folder" if kind == "gpt2" else "bert")
    edit_tensors(folder, edit)
    with pytest.raises((UserError, CorruptFileError), match=said):
        read(folder)


def test_no_layer_is_built_before_its_tensors_are_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config.json may claim any number of layers, and each takes milliseconds to build."""
    edit_config(folder, n_layer=1 << 20)
    build = Mock(side_effect=AssertionError("layers were built"))
    monkeypatch.setattr("mlm.convert.huggingface.tensors.parameters", build)
    with pytest.raises(UserError, match=r"holds no tensor h\.3\.ln_1\.weight"):
        HFTensors(read_model(folder))


def test_old_names_masks_and_an_equal_output_layer_are_accepted(folder: Path) -> None:
    """As in openai-community/gpt2: no prefix, and the causal masks stored."""

    def old(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 48, 48, dtype=torch.uint8)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    edit_config(folder, tie_word_embeddings=False)
    edit_tensors(folder, old)
    want = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(read(folder).read("token.weight", Region((7, 0), (2, 24))), want[7:9])


def test_names_of_tensorflow_buffers_and_equal_copies_are_accepted(bert: Path) -> None:
    """As in google-bert/bert-base-uncased and older; the output layer's bias under its other name alone."""

    def old(tensors: Tensors) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            older = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            tensors[older] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(48).unsqueeze(0)
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()

    edit_tensors(bert, old)
    want = load_file(bert / "model.safetensors")[GAMMA]
    assert torch.equal(read(bert).read("embedding_norm.weight", Region((0,), (24,))), want)
    edit_tensors(bert, lambda tensors: tensors.pop("cls.predictions.bias"))
    assert read(bert).model.config.head == "language_model"


def test_pipe_in_place_of_a_file_does_not_block(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(UserError, match="no plain file"):
        read_model(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(folder: Path, dtype: torch.dtype) -> None:
    want = load_file(folder / "model.safetensors")["transformer.ln_f.bias"].to(dtype).float()
    edit_tensors(folder, lambda tensors: tensors.update({n: x.to(dtype) for n, x in tensors.items()}))
    found = read(folder).read("final_norm.bias", Region((0,), (SHAPE["n_embd"],)))
    assert found.dtype == torch.float32
    assert torch.equal(found, want)
