"""`mlm import megatron` of a BERT: what it wrote says what `transformers`' MegatronBert says."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MegatronBertForPreTraining

from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.cli.convert.run import run
from mlm.cli.convert.settings import ImportMegatronConfig
from mlm.convert.huggingface.mapping import Outputs, ProbeSamples
from mlm.convert.source import open_source
from mlm.models.config import ModelConfig
from mlm.util.errors import CorruptFileError, UserError
from mlm.verify.huggingface import our_outputs, relative_difference
from tests.convert.megatron.berts import random_bert, write_bert
from tests.convert.megatron.written import FILE, VOCAB, Change, Layout, edit
from tests.slow import thinned

LIMIT = 1e-5
"""Of the largest number: float32 sums in another order."""


@cache
def same_bert() -> MegatronBertForPreTraining:
    """`random_bert`, made once."""
    return random_bert()


def imported(
    tmp_path: Path, layout: Layout, model: Any = None, change: Change | None = None, **written: Any
) -> Path:
    """Write a BERT in a layout, import it; the run directory."""
    folder = write_bert(tmp_path / "theirs", model or same_bert(), layout, **written)
    if change is not None:
        edit(sorted(folder.iterdir())[0] / FILE, change)
    run(ImportMegatronConfig(source=str(folder), out=str(tmp_path / "run"), vocab_size=VOCAB))
    return tmp_path / "run"


def model_of(run: Path) -> ModelConfig:
    return open_source(str(run)).config.model


@torch.no_grad()
def reference(model: MegatronBertForPreTraining, config: ModelConfig, **inputs: Any) -> Outputs:
    """Outputs of transformers on the probe."""
    probe = ProbeSamples.of(config)
    inputs = {"token_type_ids": probe.token_types} | inputs
    said = model(probe.tokens, attention_mask=probe.mask.long(), **inputs)
    return {"token logits": said.prediction_logits[probe.mask], "order logits": said.seq_relationship_logits}


def assert_same(found: Outputs, want: Outputs) -> None:
    for name, value in want.items():
        assert relative_difference(found[name], value) <= LIMIT, name


LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(pp=2),
    Layout(tp=2, pp=2, vp=2),
    Layout(tp=2, version=0, names="transformer"),
    Layout(pp=2, version=1.0, names="transformer"),
    Layout(tp=2, names="norm"),
    Layout(tp=2, pp=2, names="core"),
]


@pytest.mark.parametrize(
    "layout", thinned(LAYOUTS, 3), ids=lambda x: f"{x.names}-{x.version}-{x.tp}{x.pp}{x.vp}"
)
def test_it_says_what_transformers_says(tmp_path: Path, layout: Layout) -> None:
    found = imported(tmp_path, layout)
    assert_same(our_outputs(found), reference(same_bert(), model_of(found)))


def test_exact_gelu_is_computed_where_it_was_trained_with(tmp_path: Path) -> None:
    model = random_bert(hidden_act="gelu")
    args = {"openai_gelu": False, "bias_gelu_fusion": False}
    found = imported(tmp_path, Layout(args=args), model)
    assert model_of(found).activation == "gelu"
    assert_same(our_outputs(found), reference(model, model_of(found)))


def test_two_kinds_of_gelu_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM's default: the fused kernel in the layers, torch's in the masked-LM head."""
    found = imported(tmp_path, Layout(args={"openai_gelu": False, "bias_gelu_fusion": True}))
    assert model_of(found).activation == "gelu_tanh"
    assert "its masked-LM head was trained with the exact gelu" in capsys.readouterr().out


def test_without_a_binary_head_its_parts_are_filled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--bert-no-binary-head: no pooler, and no token types, which is a table of zeros."""
    found = imported(tmp_path, Layout(tp=2), binary_head=False)
    out = capsys.readouterr().out
    assert "it knows no token types" in out
    assert "no pooler is there" in out
    assert "no sop_head is there" in out
    filled = read_manifest(resolve(str(found))).state["source"]["filled"]
    assert filled == ["pooler.bias", "pooler.weight", "sop_head.bias", "sop_head.weight"]
    model = random_bert()
    with torch.no_grad():
        model.bert.embeddings.token_type_embeddings.weight.zero_()
    want = reference(model, model_of(found))
    assert_same(our_outputs(found), {"token logits": want["token logits"]})


@pytest.mark.parametrize(("rows", "wanted"), [(30592, 30522), (29056, 28996), (30720, None)])
def test_vocabulary_is_berts_where_it_fits(tmp_path: Path, rows: int, wanted: int | None) -> None:
    folder = write_bert(tmp_path / "theirs", same_bert(), Layout(rows=rows))
    config = ImportMegatronConfig(source=str(folder), out=str(tmp_path / "run"))
    if wanted is None:
        with pytest.raises(UserError, match="BERT's 30522 or 28996 tokens do not fill"):
            run(config)
    else:
        run(config)
        assert model_of(tmp_path / "run").vocab_size == wanted


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c["model"]["lm_head"].pop("bias"), "mlm_head.vocabulary.bias is missing"),
        (lambda c: c["model"]["binary_head"].pop("bias"), "sop_head.bias is missing"),
        (
            lambda c: c["model"]["binary_head"].update(weight=torch.ones(3, 32)),
            r"sop_head.weight is \[3, 32\]",
        ),
        (lambda c: c["model"]["lm_head"].update(bias=torch.ones(63)), r"vocabulary.bias is \[63\]"),
    ],
    ids=["bias", "half", "classes", "rows"],
)
def test_problem_of_a_file_is_named(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CorruptFileError, match=message):
        imported(tmp_path, Layout(), change=change)


def test_layer_norm_behind_the_sums_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="apply_residual_connection_post_layernorm=True"):
        imported(tmp_path, Layout(args={"apply_residual_connection_post_layernorm": True}))
