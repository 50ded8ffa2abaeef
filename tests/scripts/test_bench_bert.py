"""The benchmark of BERT's pretraining: both sides compute the same. No time is asserted."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from bench.bert import BertShape, TransformersBert
from bench.contenders import MlmTrainee, Trainee
from bench.equality import Reference
from bench.ranks import build_trainee
from bench.shapes import NAMED
from bench.spec import Spec

from mlm.util.errors import UserError

SHAPE = BertShape("test", 2, 32, 2, 16, 211, 3, norm="post", dropout=0.1)


def trainee(name: str, **changes: Any) -> Trainee:
    return build_trainee(name, Spec(replace(SHAPE, **changes), "cpu", "fp32", 1, "default"), 1, 0)


def test_what_is_compared_has_padding() -> None:
    assert SHAPE.batches(1234)[0].lengths.min() < SHAPE.seq_length


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_both_sides_have_equal_losses_and_gradients(norm: str) -> None:
    """Though both train with dropout: the comparison is without it."""
    reference = Reference(*trainee("mlm", norm=norm).loss_and_gradients())
    compared = trainee("transformers", norm=norm).check(reference)
    assert compared.loss_error < 1e-5
    assert compared.gradient_error < 1e-4


def test_another_model_is_rejected() -> None:
    """The embeddings of two token types exchanged: a mistake of a mapping, say."""
    other = trainee("transformers")
    assert isinstance(other, TransformersBert)
    with torch.no_grad():
        types = other.model.get_parameter("bert.embeddings.token_type_embeddings.weight")
        types.copy_(types.flip(0))
    with pytest.raises(UserError, match="does not compute the same"):
        other.check(Reference(*trainee("mlm").loss_and_gradients()))


def test_a_step_trains_with_dropout_after_the_comparison() -> None:
    ours, theirs = trainee("mlm"), trainee("transformers")
    assert isinstance(ours, MlmTrainee)
    assert isinstance(theirs, TransformersBert)
    for one in (ours, theirs):
        one.loss_and_gradients()
    assert ours.trainer.dropout(ours.batches[0]) is not None
    assert theirs.model.training


@pytest.mark.parametrize("name", ["mlm", "transformers"])
def test_a_step_moves_the_weights(name: str) -> None:
    one = trainee(name)
    assert isinstance(one, (MlmTrainee, TransformersBert))
    shards = one.trainer.shards if isinstance(one, MlmTrainee) else ()
    parameters = [s.parameter for s in shards] or one.parameters  # type: ignore[union-attr]
    before = [p.detach().clone() for p in parameters]
    one.step(0)
    assert not any(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_weights_are_those_of_the_class(norm: Literal["post", "pre"]) -> None:
    """None is zero, so that all of them show."""
    assert all(bool((value != 0).any()) for value in replace(SHAPE, norm=norm).state(0).values())


def test_random_texts_hold_no_padding_tokens() -> None:
    """transformers does not train their row of the input table."""
    for batch in replace(SHAPE, batch_size=50, vocab_size=9).batches(0):
        inside = torch.arange(16) < batch.lengths[:, None]
        assert batch.tokens[inside].min() > 0
        assert np.array_equal(batch.lengths < 16, (batch.tokens == 0).any(1))


def test_the_shape_of_base_is_that_of_the_paper() -> None:
    model = BertShape.of(NAMED["cpu"]["base-512"][0], "post", 0.0).model()
    assert model.num_parameters() == 110_106_428  # BertForPreTraining of bert-base-uncased, its tables tied
