"""BERT folders of `transformers`: what is read of each class, and what is rejected."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.parameters import parameters
from mlm.convert.huggingface.bert import locations, read_config, write_config
from mlm.convert.huggingface.folder import HFModel, read_model
from mlm.convert.huggingface.mapping import TokenIds
from mlm.convert.huggingface.tensors import HFTensors
from mlm.util.errors import ConfigError, CorruptFileError, UserError
from tests.convert.hf_berts import FAMILIES, MODEL, make_bert
from tests.convert.hf_models import edit_config, edit_tensors

Tensors = dict[str, Tensor]
POOLER = {"pooler.weight", "pooler.bias"}
ORDER = {"sop_head.weight", "sop_head.bias"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model with both pretraining heads."""
    make_bert(tmp_path / "model", "bert", "ForPreTraining")
    return tmp_path / "model"


def read(folder: Path) -> HFModel:
    """All that is checked before a tensor is imported."""
    tensors = HFTensors(read_model(folder))
    tensors.check()
    return tensors.model


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("head", ["language_model", "none", "classification", "span"])
def test_every_parameter_has_a_location_of_its_own(norm: Any, head: Any) -> None:
    model = replace(MODEL, norm=norm, head=head, num_labels=3 if head == "classification" else 0)
    found = dict(locations(model))
    assert found.keys() == parameters(model).keys()
    names = [name for location in found.values() for name in location.names]
    assert len(set(names)) == len(names)


CLASSES: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("ForPreTraining", {}, {"head": "language_model"}, set()),
    ("ForMaskedLM", {}, {"head": "language_model"}, POOLER | ORDER),
    ("Model", {}, {"head": "none"}, set()),
    ("ModelWithoutPooler", {}, {"head": "none"}, POOLER),
    ("ForNextSentencePrediction", {}, {"head": "none"}, set()),
    ("ForSequenceClassification", {"num_labels": 5}, {"head": "classification", "num_labels": 5}, set()),
    ("ForMultipleChoice", {}, {"head": "classification", "num_labels": 1}, set()),
    ("ForQuestionAnswering", {}, {"head": "span"}, set()),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "settings", "changes", "filled"), CLASSES, ids=[c[0] for c in CLASSES])
def test_each_class_is_known_by_its_tensors(
    tmp_path: Path,
    family: str,
    name: str,
    settings: dict[str, Any],
    changes: dict[str, Any],
    filled: set[str],
) -> None:
    make_bert(tmp_path, family, name, **settings)
    edit_config(tmp_path, architectures=["Something"])
    found = read(tmp_path)
    norm = "post" if family == "bert" else "pre"
    assert found.config == replace(MODEL, norm=norm, **changes)
    assert found.content.filled == filled


def pooler(tensors: Tensors) -> None:
    """As versions before 3.5 saved beside an answer head."""
    tensors["bert.pooler.dense.weight"] = torch.ones(24, 24)


@pytest.mark.parametrize(
    ("name", "edit", "notes"),
    [
        ("ForMaskedLM", None, ["no pooler.dense is there", "no cls.seq_relationship is there"]),
        ("ForNextSentencePrediction", None, ["left out: cls.seq_relationship"]),
        ("ForQuestionAnswering", pooler, ["left out: pooler.dense"]),
    ],
)
def test_what_is_missing_or_left_out_is_reported(
    tmp_path: Path, name: str, edit: Callable[[Tensors], None] | None, notes: list[str]
) -> None:
    make_bert(tmp_path, "bert", name)
    if edit is not None:
        edit_tensors(tmp_path, edit)
    assert [note[: len(want)] for note, want in zip(read(tmp_path).notes, notes, strict=True)] == notes


def test_names_of_tensorflow_buffers_and_equal_copies_are_accepted(folder: Path) -> None:
    """As in google-bert/bert-base-uncased and older."""
    want = {}

    def old(tensors: Tensors) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            older = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            tensors[older] = tensors.pop(name)
        want["norm"] = tensors["bert.embeddings.LayerNorm.gamma"].clone()
        tensors["bert.embeddings.position_ids"] = torch.arange(48).unsqueeze(0)
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()

    edit_tensors(folder, old)
    tensors = HFTensors(read(folder))
    assert torch.equal(tensors.read("embedding_norm.weight", Region((0,), (24,))), want["norm"])


def test_bias_of_the_output_layer_may_stand_under_its_other_name(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"cls.predictions.decoder.bias": t.pop("cls.predictions.bias")}))
    assert read(folder).config.head == "language_model"


def test_a_region_of_joined_tensors_is_read(folder: Path) -> None:
    state = make_bert(folder, "bert", "ForPreTraining").state_dict()
    key = state["bert.encoder.layer.1.attention.self.key.weight"]
    second_head = Region((3 * 6 + 6, 2), (6, 5))  # rows of k, D = 6
    found = HFTensors(read(folder)).read("layers.1.attention.qkv.weight", second_head)
    assert torch.equal(found, key[6:12, 2:7])


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_config_survives_both_ways(norm: Any, activation: Any) -> None:
    model = replace(MODEL, norm=norm, activation=activation)
    assert read_config(write_config(model, TokenIds(pad=0)), "") == (model, [])


@pytest.mark.parametrize(
    ("kind", "size"), [("bert", (12, 768, 12, 30522)), ("megatron-bert", (24, 1024, 16, 29056))]
)
def test_missing_keys_have_the_defaults_of_transformers(kind: str, size: tuple[int, ...]) -> None:
    model, _ = read_config({"model_type": kind}, "")
    assert (model.num_layers, model.hidden_size, model.num_heads, model.vocab_size) == size
    assert (model.max_positions, model.layer_norm_eps, model.ffn_hidden_size) == (512, 1e-12, None)
    assert (model.token_types, model.activation) == (2, "gelu")


def test_dropout_of_the_classifier_that_differs_is_noted() -> None:
    model, notes = read_config({"classifier_dropout": 0.3}, "")
    assert model.hidden_dropout == 0.1
    assert "classifier_dropout=0.3" in notes[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "relu"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("pruned_heads", {"0": [1]}),
        ("is_causal", True),
        ("quantization_config", {"bits": 4}),
        ("num_hidden_layers", 10**15),
        ("hidden_size", True),
        ("intermediate_size", None),
        ("type_vocab_size", 0),
        ("type_vocab_size", 1),
        ("vocab_size", "many"),
        ("hidden_dropout_prob", 1.0),
        ("layer_norm_eps", float("nan")),
        ("num_attention_heads", 5),
    ],
)
def test_what_our_model_cannot_express_is_rejected_by_key_and_value(
    folder: Path, key: str, value: Any
) -> None:
    edit_config(folder, **{key: value})
    with pytest.raises(ConfigError) as caught:
        read_model(folder)
    (problem,) = caught.value.problems
    # with the file's value, or with that of our setting which the model config rejects
    assert f"{key}=" in problem or re.search(rf"{key}: (model\.)?\w+={re.escape(str(value))}", problem), (
        problem
    )
    assert "config.json" in problem


def token_labels(tensors: Tensors) -> None:
    for name in [name for name in tensors if "pooler" in name or name.startswith("cls.")]:
        del tensors[name]
    tensors["classifier.weight"] = torch.ones(2, 24)


def untie(tensors: Tensors) -> None:
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1


QUERY = "bert.encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop(QUERY), r"no tensor encoder\.layer\.1\.attention\.self\.query\.weight"),
        (lambda t: t.pop("bert.pooler.dense.bias"), r"no tensor pooler\.dense\.bias"),
        (lambda t: t.pop("cls.predictions.bias"), r"no tensor cls\.predictions\.bias"),
        (lambda t: t.update({QUERY: torch.ones(48, 24)}), r"query\.weight is \[48, 24\]"),
        (lambda t: t.update({QUERY: torch.ones(24, 24).int()}), r"query\.weight is I32"),
        (lambda t: t.update({"classifier.weight": torch.ones(2, 24)}), "of two heads"),
        (lambda t: t.update({"bert.encoder.layer.3.ln.bias": torch.ones(24)}), r"layer\.3\.ln\.bias is no"),
        (lambda t: t.update({"cls.seq_relationship.weight": torch.ones(3, 24)}), r"is \[3, 24\]"),
        (token_labels, "a label for each token"),
        (untie, "differs from"),
    ],
)
def test_tensors_that_are_not_the_model_are_named(
    folder: Path, edit: Callable[[Tensors], Any], said: str
) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(UserError, match=said):
        read(folder)


def test_a_name_that_stands_twice_is_rejected(folder: Path) -> None:
    def old_and_new(tensors: Tensors) -> None:
        tensors["bert.embeddings.LayerNorm.gamma"] = torch.ones(24)

    edit_tensors(folder, old_and_new)
    with pytest.raises(CorruptFileError, match=r"embeddings\.LayerNorm\.weight is in"):
        read(folder)
