"""Compiled layers of the Llama family."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mlm.models.documents import Boundaries
from mlm.models.llama.model import Llama
from mlm.parallel.compute_state import prepare_to_compile
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.random import init_parameters
from tests.models.llama.test_parts import MODEL
from tests.ranks import run_on_ranks

EOD = 3
QWEN = {
    "num_kv_heads": 2,
    "head_dim": 10,
    "qk_norm": True,
    "qkv_bias": True,
    "window": 5,
    "rotary_fraction": 0.6,
}
CASES = {
    "llama": MODEL,
    "every option": replace(MODEL, options=QWEN, activation="gelu_tanh"),
    "dropout": replace(MODEL, hidden_dropout=0.2, attention_dropout=0.2),
}


def gradients_of(model: Llama, stream: DropoutStream | None, documents: bool) -> list[Tensor]:
    tokens = torch.randint(0, 31, (2, 16), generator=torch.Generator().manual_seed(0))
    tokens[0, 6] = EOD
    found = Boundaries(EOD, True, True).documents(tokens, torch.float32) if documents else None
    model.zero_grad()
    loss = model(tokens, tokens.roll(-1, 1), None, stream, None, found)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiled_layers_give_the_same_loss_and_gradients(name: str) -> None:
    """Float32 rounding apart, nothing changes: plain, with every option of the family, and with dropout."""
    check_compiled(ParallelContext(), name)


@pytest.mark.slow
def test_compiled_layers_communicate_as_eager_ones_do() -> None:
    """At tp=2, where queries, and keys with values, have one input."""
    run_on_ranks(check_compiled, "llama", tp=2)


def check_compiled(ctx: ParallelContext, name: str) -> None:
    model = Llama(CASES[name], tp=ctx.tp)
    init_parameters(model, 1, ctx.tp)
    stream = DropoutStream.of_micro_batch(1, 0, 2, torch.device("cpu")) if name == "dropout" else None
    documents = name == "every option"
    eager = gradients_of(model, stream, documents)
    prepare_to_compile()
    for layer in model.layers.values():
        layer.compile()
    for a, b in zip(eager, gradients_of(model, stream, documents), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
