"""RoBERTa, XLM-R and DistilBERT against transformers: folders in and out, logits, gradients and training."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from mlm.convert.huggingface import bert
from mlm.convert.huggingface.bert import MAPPING, write_config
from mlm.convert.huggingface.folder import read_model
from mlm.convert.huggingface.mapping import TokenIds
from mlm.convert.source import open_source
from mlm.inference.trained import load_trained
from mlm.models.backbone import Inputs
from mlm.models.bert.model import MaskedLanguageModel, masked_targets
from mlm.models.documents import padding_spans
from mlm.models.shape import count_parameters
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import IGNORE_INDEX, ParallelConfig
from mlm.parallel.mesh import Axis, shape_context
from mlm.parallel.sharding import parameter_shards
from mlm.util.errors import UserError
from mlm.verify.huggingface import our_outputs, reference_outputs, relative_difference
from tests.convert.hf_models import edit_config, export_model, import_model
from tests.models.reference import randomized
from tests.models.tiny import tiny
from tests.slow import slow_but

KIN = ("Roberta", "XLMRoberta", "Camembert", "DistilBert")
"""Beginnings of the names of transformers' classes."""
SHAPES = [  # layers, width, heads, MLP, vocabulary, positions, id of padding
    (3, 24, 4, 60, 331, 48, 1),
    (2, 20, 5, 33, 130, 40, 0),
    (1, 18, 3, 72, 259, 33, 5),
]
BATCH, LENGTH = 3, 29


def make_kin(kin: str, name: str, shape: Sequence[int] = SHAPES[0], **settings: Any) -> Any:
    """A model of random weights, biases and norms too, without dropout."""
    layers, width, heads, inner, vocabulary, positions, pad = shape
    torch.manual_seed(0)
    if kin == "DistilBert":
        known = {"n_layers": layers, "dim": width, "n_heads": heads, "hidden_dim": inner}
        known |= {"max_position_embeddings": positions, "pad_token_id": pad}
        known |= dict.fromkeys(("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"), 0.0)
    else:
        known = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
        known |= {"intermediate_size": inner, "max_position_embeddings": positions + pad + 1}
        known |= {"type_vocab_size": 1, "pad_token_id": pad, "layer_norm_eps": 1e-4}
        known |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = getattr(transformers, f"{kin}Config")(vocab_size=vocabulary, **known | settings)
    return randomized(getattr(transformers, f"{kin}{name}")(config).eval(), 0.1)


@cache
def batch_of(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, lengths and labels of padded sequences, which hold no id of padding."""
    draw, pad = torch.Generator().manual_seed(1), shape[-1]
    lengths = torch.tensor([LENGTH, 11, LENGTH - 1])
    inside = torch.arange(LENGTH) < lengths[:, None]
    tokens = torch.randint(6, shape[4], (BATCH, LENGTH), generator=draw)
    is_masked = inside & (torch.rand(BATCH, LENGTH, generator=draw) < 0.3)
    labels = torch.where(is_masked, tokens.flip(0), IGNORE_INDEX)
    return torch.where(inside, tokens, pad), lengths, labels


def theirs_loss(model: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    tokens, lengths, labels = batch_of(shape)
    mask = torch.arange(LENGTH) < lengths[:, None]
    logits = model(tokens, attention_mask=mask.long()).logits
    return logits[mask], F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def our_loss(model: MaskedLanguageModel, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    tokens, lengths, labels = batch_of(shape)
    mask = torch.arange(LENGTH) < lengths[:, None]
    inputs = Inputs(tokens, lengths, None, padding_spans(lengths, LENGTH, model.dtype, torch.device("cpu")))
    logits = model.token_logits(model.encode(inputs).transpose(0, 1)[mask])
    scale = torch.ones(2, dtype=torch.float64) / (labels != IGNORE_INDEX).sum()
    no_order = torch.full((BATCH,), IGNORE_INDEX)
    return logits, model(inputs, masked_targets(labels, no_order), scale)[0]


def read_ours(folder: Path, dtype: str = "fp64") -> MaskedLanguageModel:
    loaded = load_trained(
        open_source(str(folder)), ParallelConfig(), PrecisionConfig(dtype=dtype), shape_context()
    )
    (chunk,) = loaded.model.chunks
    return chunk.double() if dtype == "fp64" else chunk


CASES = [*((kin, SHAPES[0]) for kin in KIN), *(("Roberta", s) for s in SHAPES[1:]), ("DistilBert", SHAPES[1])]


@pytest.mark.parametrize(("kin", "shape"), slow_but({0, 3}, CASES))
def test_logits_and_gradients_are_those_of_transformers(
    tmp_path: Path, kin: str, shape: tuple[int, ...]
) -> None:
    model = make_kin(kin, "ForMaskedLM", shape)
    model.save_pretrained(tmp_path)
    ours = read_ours(tmp_path)
    assert count_parameters(ours.config) == sum(p.numel() for p in model.parameters())
    logits, loss = theirs_loss(model.double(), shape)
    our_logits, our = our_loss(ours, shape)
    loss.backward()
    our.backward()
    torch.testing.assert_close(our_logits, logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(our, loss, rtol=0, atol=1e-12)
    theirs = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    expected = MAPPING.to_parameters(theirs, ours.config)
    gradients = {s.name: s.without_padding(s.parameter.grad) for s in parameter_shards(ours, Axis("tp"))}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)


def test_three_steps_have_the_losses_of_transformers(tmp_path: Path) -> None:
    model, losses = make_kin("Roberta", "ForMaskedLM"), list[list[float]]()
    model.save_pretrained(tmp_path)
    for module, loss_of in ((model.double(), theirs_loss), (read_ours(tmp_path), our_loss)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(module, SHAPES[0])[1]
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=1e-9)


@pytest.mark.parametrize(("kin", "dtype"), [("Roberta", "bf16"), ("DistilBert", "fp16")])
def test_half_precision_is_as_near_as_that_of_transformers(tmp_path: Path, kin: str, dtype: str) -> None:
    """Root mean squares of what differs from float64; ours keeps weights in float32."""
    model = make_kin(kin, "ForMaskedLM")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        exact, _ = theirs_loss(make_kin(kin, "ForMaskedLM").double(), SHAPES[0])
        theirs, _ = theirs_loss(model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]), SHAPES[0])
        ours, _ = our_loss(read_ours(tmp_path, dtype), SHAPES[0])
    errors = [float((logits.double() - exact).square().mean().sqrt()) for logits in (ours, theirs)]
    assert 0 < errors[0] <= 1.5 * errors[1]


CLASSES = [
    *(("Roberta", f"For{head}") for head in ("MaskedLM", "SequenceClassification", "MultipleChoice")),
    *(("XLMRoberta", "Model"), ("Camembert", "ForQuestionAnswering")),
    *(("DistilBert", f"For{head}") for head in ("MaskedLM", "SequenceClassification", "MultipleChoice")),
]


@pytest.mark.parametrize(("kin", "name"), slow_but({0, 1, 2, 5, 6}, CLASSES))
def test_each_class_comes_back_to_the_bit(tmp_path: Path, kin: str, name: str) -> None:
    """But for a pooler that pretraining does not train, and the class of multiple choice."""
    labels = {"num_labels": 3} if name == "ForSequenceClassification" else {}
    model = make_kin(kin, name, **labels)
    model.save_pretrained(tmp_path / "model")
    run = import_model(tmp_path / "model", tmp_path / "run", verify=False)
    for output, value in reference_outputs(read_model(tmp_path / "model")).items():
        assert relative_difference(our_outputs(run)[output], value) <= 1e-5
    out = export_model(run, tmp_path / "out", verify=False)
    exported_class = name.replace("MultipleChoice", "SequenceClassification")
    family = "DistilBert" if kin == "DistilBert" else "Roberta"
    back = getattr(transformers, f"{family}{exported_class}").from_pretrained(out)
    expected, found = model.state_dict(), back.state_dict()
    if name == "ForMultipleChoice" and kin != "DistilBert":
        renamed = {"roberta.pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"}
        for source, target in renamed.items():
            for part in ("weight", "bias"):
                expected[f"{target}.{part}"] = expected.pop(f"{source}.{part}")
    poolers = {key for key in expected if key.startswith("pooler.")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected.keys() - poolers)
    assert back.config.pad_token_id == 1


def test_padding_sets_the_first_position(tmp_path: Path) -> None:
    make_kin("Roberta", "Model", SHAPES[2]).save_pretrained(tmp_path)
    config = read_model(tmp_path).config
    assert (config.max_positions, config.options) == (33, {"position_offset": 6})
    written = write_config(config, TokenIds(pad=5, eod=2, bos=0))
    assert (written["max_position_embeddings"], written["pad_token_id"]) == (39, 5)
    assert (written["bos_token_id"], written["eos_token_id"]) == (0, 2)


@pytest.mark.parametrize(
    ("kin", "changes", "problem"),
    [
        ("Roberta", {"pad_token_id": None}, "pad_token_id=null must be a token's id: positions begin after"),
        ("Roberta", {"hidden_act": "gelu_new"}, "hidden_act=gelu_new is not what our Roberta computes; sup"),
        ("Roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type=relative_key is"),
        ("DistilBert", {"n_heads": 5}, "num_heads=5 does not divide hidden_size=24"),
        ("DistilBert", {"dim": 0}, "dim=0 must be a whole number from 1"),
        ("DistilBert", {"hidden_dim": None}, "hidden_dim=null must be a number"),
    ],
)
def test_what_our_model_does_not_compute_is_rejected(
    tmp_path: Path, kin: str, changes: dict[str, Any], problem: str
) -> None:
    make_kin(kin, "Model").save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError) as caught:
        read_model(tmp_path)
    assert problem in str(caught.value)


ROBERTA = tiny(
    "roberta", num_heads=2, token_types=1, norm="post", activation="gelu", options={"position_offset": 2}
)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"norm": "pre"}, "its model.norm=pre, and transformers' Roberta has post"),
        ({"options": {}}, "its model.options.position_offset=0, and positions of"),
        ({"token_types": 0}, "its model.layer_norm_eps=1e-05, and transformers' DistilBert has 1e-12"),
        ({"token_types": 0, "layer_norm_eps": 1e-12, "options": {}}, None),
        (
            {"head": "classification", "options": {"position_offset": 2, "pooler_activation": "relu"}},
            "its model.options.pooler_activation=relu, and transformers' Roberta has tanh",
        ),
    ],
)
def test_what_transformers_does_not_compute_is_not_exported(
    changes: dict[str, Any], problem: str | None
) -> None:
    found = bert.problem(replace(ROBERTA, **changes))
    assert found is None if problem is None else found is not None and found.startswith(problem)
