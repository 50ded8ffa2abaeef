"""Parameters cast once a step: the bits of casts at each use, and none of their kernels.

Parameters of float64 and activations of float32 take the path of a GPU's half precision; layer norms of half
precision take one of their own on a CPU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mlm.models.bert.model import BERT
from mlm.models.gpt2.model import GPT2
from mlm.models.heads import MaskedTokenHead, PlainLinear
from mlm.models.norms import LayerNorm, RMSNorm
from mlm.parallel.compute_state import CachedHalfParams
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.random import init_parameters
from tests.models.test_compiled import FAMILIES, GPT
from tests.operators import Operators
from tests.ranks import on_ranks

MODEL = replace(GPT, num_layers=2, hidden_dropout=0.0)
BERT_MODEL = replace(FAMILIES["bert"][1], num_layers=2, hidden_dropout=0.0)


def layers_of(model: GPT2 | BERT) -> Callable[[Tensor], Tensor]:
    """Layers, and what follows them up to the loss."""

    def run(x: Tensor) -> Tensor:
        for layer in model.layers.values():
            x = layer(x, None, None, None)
        return model.final_norm(x) if isinstance(model, GPT2) else model.mlm_head(x)  # type: ignore[no-any-return]

    return run


def double(model: torch.nn.Module) -> None:
    init_parameters(model, 1)
    model.double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # bits that float32 loses, in biases too
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)])
@on_ranks()
def test_outputs_and_gradients_are_those_of_casts_at_each_use(
    ctx: ParallelContext, sequence_parallel: bool, tp: int
) -> None:
    """Two micro-batches, the first passes of both before their backward passes, as in a pipeline."""
    for family, config in ((GPT2, MODEL), (BERT, BERT_MODEL)):
        model = family(config, tp=ctx.tp, dtype=torch.float32, sequence_parallel=sequence_parallel)
        double(model)
        run, casts = layers_of(model), CachedHalfParams(model.modules(), torch.float32)
        found = []
        for held in (False, True):
            torch.manual_seed(1)
            inputs = [torch.randn(8, 2, 16, requires_grad=True) for _ in range(2)]
            with casts.casting(trains=True) if held else nullcontext():
                outputs = [run(x) for x in inputs]
                for y in outputs:
                    y.backward(torch.randn_like(y))
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(grad.dtype == torch.float64 for grad in grads)
            found.append([*outputs, *(x.grad for x in inputs), *grads])
            model.zero_grad()
        assert len(found[0]) == len(found[1])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_layers_and_heads_cast_no_parameter_while_copies_are_held() -> None:
    for family, config in ((GPT2, MODEL), (BERT, BERT_MODEL)):
        model = family(config, dtype=torch.float32)
        double(model)
        run, casts = layers_of(model), CachedHalfParams(model.modules(), torch.float32)
        counts = []
        for held in (False, True):
            with casts.casting(trains=True) if held else nullcontext(), Operators() as seen:
                run(torch.randn(8, 2, 16))
            counts.append(seen.names.count("aten._to_copy.default"))
        ends = 2 if family is GPT2 else 4
        assert counts == [2 * 12 + ends, 0]  # four products and two norms a layer, two parameters each


def test_compiled_layers_get_no_copies_that_they_do_not_read() -> None:
    model = GPT2(MODEL, dtype=torch.float32)
    double(model)
    casts = CachedHalfParams(model.modules(), torch.float32)
    casts.exclude(model.layers.values())
    with casts.casting(trains=True):
        layer = model.layers["0"]
        assert layer.mlp_norm.compute.weight_copy is layer.attention_norm.compute.bias_copy is None
        assert layer.mlp.up.compute.weight_copy is not None
        assert model.final_norm.compute.weight_copy is not None


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
@torch.no_grad()
def test_a_norm_on_a_gpu_does_not_cast_its_parameters(norm: type[LayerNorm] | type[RMSNorm]) -> None:
    """On a CPU its sums are float32, from parameters as they are: no copy is made."""
    assert not norm(16, eps=1e-5).cached_half_params(torch.bfloat16)
    with FakeTensorMode(), torch.device("cuda"):
        module = norm(16, eps=1e-5).requires_grad_(False)  # a gradient needs a device
        casts = CachedHalfParams([module], torch.bfloat16)
        x = torch.randn(4, 16, dtype=torch.bfloat16)
        counts = []
        for held in (False, True):
            with casts.casting(trains=True) if held else nullcontext(), Operators() as seen:
                module(x)
            counts.append(seen.names.count("aten._to_copy.default"))
    assert counts[0] - counts[1] == len(list(module.parameters()))


def test_inputs_of_another_dtype_are_multiplied_by_the_parameter_itself() -> None:
    layer = PlainLinear(4, 3, init_std=1.0)
    init_parameters(layer, 1)
    x = torch.randn(5, 4)
    alone, casts = layer(x), CachedHalfParams([layer], torch.bfloat16)
    with casts.casting(trains=True):
        assert torch.equal(layer(x), alone)


def test_copies_pass_gradients_in_training_alone_and_end_with_their_release() -> None:
    head = MaskedTokenHead(BERT_MODEL, tp=Axis("tp"))
    double(head)
    casts = CachedHalfParams(head.modules(), torch.float32)
    for trains in (False, True):
        with casts.casting(trains=trains):
            assert head.transform.compute.weight_copy is not None
            assert head.norm.compute.weight_copy.requires_grad is trains
        for module in (head.transform, head.norm):
            assert module.compute.weight_copy is module.compute.bias_copy is None
