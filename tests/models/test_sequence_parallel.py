"""Split sequences: what a layer keeps for backward. Over tp: tests/plan/test_dry_run.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mlm.models.gpt2.model import GPT2
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.random import init_parameters
from tests.models.tiny import tiny
from tests.ranks import on_ranks

LENGTH = 128
NARROW = tiny(hidden_size=128, max_positions=LENGTH, vocab_size=61, vocab_multiple=16, hidden_dropout=0.1)


@on_ranks(cp=4)
def test_activations_of_a_layer_fall_as_one_over_cp(ctx: ParallelContext) -> None:
    """Bytes that autograd keeps of one layer: what a model of two keeps more than a model of one."""
    split, whole = (kept(2, cp) - kept(1, cp) for cp in (ctx.cp, Axis("cp")))
    assert split * 4 == pytest.approx(whole, rel=0.01)


def kept(layers: int, cp: Axis) -> int:
    """Bytes of the distinct storages that autograd keeps for backward, parameters left out."""
    model = GPT2(replace(NARROW, num_layers=layers), dtype=torch.bfloat16, cp=cp)
    init_parameters(model, 1, Axis("tp"))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}  # which stay alive, so no address is counted for two tensors

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in parameters:
            saved[x.untyped_storage().data_ptr()] = x
        return x

    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    with saved_tensors_hooks(pack, lambda x: x):
        model(tokens, tokens, torch.tensor(1.0))
    return sum(x.untyped_storage().nbytes() for x in saved.values())
