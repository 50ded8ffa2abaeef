"""`mlm convert` of a BERT: what it wrote says what `transformers`' MegatronBert says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MegatronBertForPreTraining

from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.cli.convert.run import run
from mlm.convert.config import ConvertConfig
from mlm.convert.huggingface.mapping import Outputs, ProbeSamples
from mlm.convert.source import open_source
from mlm.models.config import ModelConfig
from mlm.util.errors import CorruptFileError, UserError
from mlm.verify.huggingface import our_outputs, relative_difference
from tests.convert.dcp.llamas import write_torch_dist
from tests.convert.megatron.written import VOCAB, arguments, bert_state, random_bert

LIMIT = 1e-5
"""Of the largest number: float32 sums in another order."""


def imported(
    tmp_path: Path, state: dict[str, Tensor] | None = None, vocab_size: int | None = VOCAB, **changes: Any
) -> Path:
    """Write a BERT, import it; the run directory."""
    write_torch_dist(tmp_path / "theirs", state or bert_state(random_bert()), arguments(**changes))
    out = tmp_path / "run"
    run(ConvertConfig(source=str(tmp_path / "theirs"), out=str(out), vocab_size=vocab_size))
    return out


def model_of(run: Path) -> ModelConfig:
    return open_source(str(run)).config.model


@torch.no_grad()
def reference(model: MegatronBertForPreTraining, config: ModelConfig) -> Outputs:
    """Outputs of transformers on the probe."""
    probe = ProbeSamples.of(config)
    said = model(probe.tokens, attention_mask=probe.mask.long(), token_type_ids=probe.token_types)
    return {"token logits": said.prediction_logits[probe.mask], "order logits": said.seq_relationship_logits}


def assert_same(found: Outputs, want: Outputs) -> None:
    for name, value in want.items():
        assert relative_difference(found[name], value) <= LIMIT, name


def test_it_says_what_transformers_says(tmp_path: Path) -> None:
    found = imported(tmp_path)
    assert model_of(found).activation == "gelu_tanh"
    assert_same(our_outputs(found), reference(random_bert(), model_of(found)))


def test_exact_gelu_is_computed_where_it_was_trained_with(tmp_path: Path) -> None:
    model = random_bert(hidden_act="gelu")
    found = imported(tmp_path, bert_state(model), openai_gelu=False, bias_gelu_fusion=False)
    assert model_of(found).activation == "gelu"
    assert_same(our_outputs(found), reference(model, model_of(found)))


def test_two_kinds_of_gelu_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM's default: the fused kernel in the layers, torch's in the masked-LM head."""
    found = imported(tmp_path, openai_gelu=False)
    assert model_of(found).activation == "gelu_tanh"
    assert "its masked-LM head was trained with the exact gelu" in capsys.readouterr().out


def test_without_a_binary_head_its_parts_are_filled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--bert-no-binary-head: no pooler, and no token types, which is a table of zeros."""
    found = imported(tmp_path, bert_state(random_bert(), binary_head=False))
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
    state = bert_state(random_bert(), rows=rows)
    if wanted is None:
        with pytest.raises(UserError, match="BERT's 30522 or 28996 tokens do not fill"):
            imported(tmp_path, state, vocab_size=None)
    else:
        assert model_of(imported(tmp_path, state, vocab_size=None)).vocab_size == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("output_layer.bias"), "mlm_head.vocabulary.bias is missing"),
        (lambda s: s.pop("binary_head.bias"), "sop_head.bias is missing"),
        (lambda s: s.update({"binary_head.weight": torch.ones(3, 32)}), r"sop_head.weight is \[3, 32\]"),
        (lambda s: s.update({"output_layer.bias": torch.ones(63)}), r"vocabulary.bias is \[63\]"),
        (lambda s: s.update({"encoder.layers.mlp.router.weight": torch.ones(4, 8)}), "Megatron Bridge"),
        (
            lambda s: s.update({"encoder.layers.mlp.odd.weight": torch.ones(4, 8)}),
            "is no part of GPT-2, BERT",
        ),
    ],
    ids=["bias", "half", "classes", "rows", "a mixture", "an unknown name"],
)
def test_problem_of_a_tensor_is_named(tmp_path: Path, change: Any, message: str) -> None:
    state = bert_state(random_bert())
    change(state)
    with pytest.raises(UserError, match=message):
        imported(tmp_path, state)


def test_an_output_layer_that_is_not_the_table_is_rejected(tmp_path: Path) -> None:
    state = bert_state(random_bert())
    table = state["embedding.word_embeddings.weight"]
    with pytest.raises(UserError, match="differs from the token table that it is tied to"):
        imported(tmp_path, state | {"output_layer.weight": table + 1})


def test_layer_norm_behind_the_sums_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="apply_residual_connection_post_layernorm=True"):
        imported(tmp_path, apply_residual_connection_post_layernorm=True)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    state = bert_state(random_bert()) | {"pooler.dense.bias": torch.ones(32, dtype=torch.int64)}
    with pytest.raises(CorruptFileError, match="only floating-point numbers are read"):
        imported(tmp_path, state)
