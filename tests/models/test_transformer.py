"""Layers of each stage, settings that every model hands to them, and a dropout mask for each place."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mlm.models.backbone import Inputs
from mlm.models.bert.model import BERT
from mlm.models.stage import split_layers
from mlm.parallel.dropout import DropoutStream, draw_keep_mask
from mlm.parallel.mesh import Axis
from mlm.parallel.random import init_parameters
from tests.models.tiny import tiny

ONE = Axis("tp")


def test_no_two_places_of_a_model_share_a_dropout_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forward pass up to the head, with every stage's places."""
    keys = []

    def noted(rows: Tensor, keys_: Tensor, *args: Any) -> Tensor:
        keys.append(tuple(keys_.flatten().tolist()))
        return draw_keep_mask(rows, keys_, *args)

    monkeypatch.setattr("mlm.parallel.dropout.draw_keep_mask", noted)
    config = tiny("bert", hidden_dropout=0.1, attention_dropout=0.1, head="classification", num_labels=3)
    model = BERT(config, tp=ONE)
    init_parameters(model, 1, ONE)
    stream = DropoutStream.of_micro_batch(5, 0, 2, torch.device("cpu"))
    model.outputs(Inputs(torch.zeros(2, 6, dtype=torch.int64), torch.tensor([6, 6])), stream)
    assert len(keys) == 1 + 3 * 2 + 1  # embedding, three in a layer, classifier
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (6, 4, [1, 2, 2, 1]), (5, 2, [3, 2]), (3, 1, [3])],
)
def test_embedding_and_head_stages_get_fewer(layers: int, stages: int, counts: list[int]) -> None:
    assert [len(s.layers) for s in split_layers(layers, stages)] == counts


@given(st.integers(1, 64), st.integers(0, 64))
def test_every_layer_is_in_one_stage_in_order(stages: int, more: int) -> None:
    split = split_layers(stages + more, stages)
    assert [n for s in split for n in s.layers] == list(range(stages + more))
    sizes = [len(s.layers) for s in split]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert [s.is_first for s in split] == [True] + [False] * (stages - 1)
    assert [s.is_last for s in split] == [False] * (stages - 1) + [True]
