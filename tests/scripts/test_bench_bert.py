"""The benchmark of BERT's pretraining: both sides compute the same, and what is no success. No time is
asserted."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import bench_bert
import numpy as np
import pytest
import torch
from bench.bert_contenders import MlmBert, TransformersBert, build_bert_trainee, without_dropout
from bench.bert_shapes import BertShape, bert_batches, bert_shape, bert_state
from bench.contenders import Trainee
from bench.equality import Reference
from bench.ranks import build_trainee
from bench.spec import Spec

from mlm.util.errors import UserError

CPU = torch.device("cpu")
SHAPE = BertShape("test", 2, 32, 2, 16, 211, 3, norm="post", dropout=0.1)


def trainee(name: str, **changes: Any) -> Trainee:
    spec = Spec(replace(SHAPE, **changes), "cpu", "fp32", threads=1, allocator="default")
    return build_bert_trainee(name, spec, CPU)


def test_what_is_compared_has_padding() -> None:
    assert bert_batches(SHAPE, 1234)[0].lengths.min() < SHAPE.seq_length


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("name", ["transformers", "transformers-eager"])
def test_both_sides_have_equal_losses_and_gradients(name: str, norm: str) -> None:
    """Though both train with dropout: the comparison is without it."""
    reference = Reference(*trainee("mlm", norm=norm).loss_and_gradients())
    found = trainee(name, norm=norm).check(reference)
    assert found.loss_error < 1e-5
    assert found.gradient_error < 1e-4


def test_another_model_is_rejected() -> None:
    """The embeddings of two token types exchanged: a mistake of a mapping, say."""
    other = trainee("transformers")
    assert isinstance(other, TransformersBert)
    with torch.no_grad():
        types = other.model.bert.embeddings.token_type_embeddings.weight
        types.copy_(types.flip(0))
    with pytest.raises(UserError, match="does not compute the same"):
        other.check(Reference(*trainee("mlm").loss_and_gradients()))


def test_a_step_trains_with_dropout() -> None:
    ours = trainee("mlm")
    assert isinstance(ours, MlmBert)
    with without_dropout(ours.trainer):
        assert ours.trainer.dropout(ours.batches[0]) is None
    assert ours.trainer.dropout(ours.batches[0]) is not None


@pytest.mark.parametrize("name", ["mlm", "transformers"])
def test_a_step_moves_the_weights(name: str) -> None:
    one = trainee(name)
    parameters = (
        [shard.parameter for shard in one.trainer.shards] if isinstance(one, MlmBert) else one.parameters
    )
    before = [p.detach().clone() for p in parameters]
    one.step(0)
    assert not any(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


def test_processes_build_the_contenders_of_a_bert() -> None:
    spec = Spec(SHAPE, "cpu", "fp32", threads=1, allocator="default")
    assert isinstance(build_trainee("mlm", spec, 1, 0), MlmBert)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_weights_are_those_of_the_class(norm: Literal["post", "pre"]) -> None:
    """None is zero, so that all of them show."""
    assert all(bool((value != 0).any()) for value in bert_state(replace(SHAPE, norm=norm), 0).values())


def test_random_texts_hold_no_padding_tokens() -> None:
    """transformers does not train their row of the input table."""
    for batch in bert_batches(replace(SHAPE, batch_size=50, vocab_size=9), 0):
        inside = torch.arange(16) < batch.lengths[:, None]
        assert batch.tokens[inside].min() > 0
        assert np.array_equal(batch.lengths < 16, (batch.tokens == 0).any(1))


def test_the_shape_of_base_is_that_of_the_paper() -> None:
    model = bert_shape("base-512", "post", 0.0, None).model()
    assert model.num_parameters() == 110_106_428  # BertForPreTraining of bert-base-uncased, its tables tied


@pytest.mark.parametrize(
    "words",
    [
        ["--shape", "huge"],
        ["--shape", "2,30,4,16,99,2"],
        ["--shape", "2,32,4,4,99,2"],
        ["--dropout", "1"],
        ["--layers", "0"],
        ["--contenders", "nanogpt"],
        ["--corpus", "nowhere"],
        ["--out", "nowhere/out.json"],
    ],
)
def test_a_mistake_is_reported_by_the_exit_code(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench_bert.main(["--shape", "tiny", *words]) == 2


@pytest.mark.parametrize(("ratio", "fast"), [(1.7, True), (1.5, False), (None, False)])
def test_a_ratio_below_the_target_is_no_success(ratio: float | None, fast: bool) -> None:
    found = None if ratio is None else {"median": ratio}
    series = {"other": "transformers", "problems": {"wall": [], "cpu": []}, "tokens_ratio": found}
    assert bench_bert.reached({"series": [series]}) is fast
