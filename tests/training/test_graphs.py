"""All layers replayed as one CUDA graph for each direction, with capture replaced by calls on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlm.data.sampler import Batch
from mlm.parallel.mesh import ParallelContext
from mlm.training.graphs import ReplayedLayers, eager_layers
from mlm.training.trainer import Trainer
from tests.training.test_gradient_sums import MICRO_BATCHES, SPEC, batches


class Recorded:
    """Capture of PyTorch on a CPU: a replay calls the layers on buffers that the next one overwrites."""

    def __init__(self) -> None:
        self.replays = 0

    def make(self, layers: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[..., Tensor]:
        parameters = tuple(layers.parameters())
        leaves = [each for each in (*inputs, *parameters) if each.requires_grad]
        output = layers(*inputs).detach()
        gradients = [torch.zeros_like(leaf) for leaf in leaves]
        edges: list[Tensor] = []

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Tensor) -> Tensor:
                self.replays += 1
                for target, source in zip(inputs, given, strict=False):
                    target.detach().copy_(source)
                with torch.enable_grad():
                    edges[:] = [layers(*inputs)]
                output.copy_(edges[0])
                return output.detach()

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
                for target, source in zip(gradients, torch.autograd.grad(edges, leaves, dy), strict=True):
                    target.copy_(source)
                found = iter(gradients)
                return tuple(
                    next(found).detach() if each.requires_grad else None for each in (*inputs, *parameters)
                )

        return lambda *given: Replay.apply(*given, *parameters)  # type: ignore[no-any-return]


STACK = replace(SPEC, cuda_graphs="stack", model=replace(SPEC.model, hidden_dropout=0.2))


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> tuple[Trainer[Batch], Recorded]:
    """A trainer whose layers are replayed, and what counts the replays."""
    recorded = Recorded()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", recorded.make)
    trainer: Trainer[Batch] = Trainer(STACK, ParallelContext())
    trainer.model.chunks[0].run_layers = ReplayedLayers(trainer.model.chunks[0])
    return trainer, recorded


def steps() -> list[Batch]:
    """Micro-batches of a step with masks of their own."""
    drawn = batches(0, 1)
    return [replace(batch, first_sample=2 * i) for i, batch in enumerate(drawn)]


def test_a_replayed_stack_trains_as_its_layers_do(stack: tuple[Trainer[Batch], Recorded]) -> None:
    """Inputs, masks, outputs and gradients of four micro-batches go through the same buffers."""
    trainer, recorded = stack
    plain: Trainer[Batch] = Trainer(replace(STACK, cuda_graphs=False), ParallelContext())
    for number in range(1, 4):
        losses = [each.train_step(steps()).parts for each in (trainer, plain)]
        torch.testing.assert_close(*losses, rtol=0, atol=1e-14)
        assert recorded.replays == number * MICRO_BATCHES
    for a, b in zip(trainer.shards, plain.shards, strict=True):
        torch.testing.assert_close(a.parameter, b.parameter, rtol=0, atol=1e-13)


def test_passes_of_another_form_are_not_replayed(stack: tuple[Trainer[Batch], Recorded]) -> None:
    """Validation, sequences of another length, and a step whose modules are looked at."""
    trainer, recorded = stack
    trainer.compute_gradients(steps())
    assert recorded.replays == MICRO_BATCHES
    trainer.validate(steps())
    trainer.compute_gradients([replace(b, tokens=b.tokens[:, :4], labels=b.labels[:, :4]) for b in steps()])
    with eager_layers(trainer.model.chunks):
        trainer.compute_gradients(steps())
    assert recorded.replays == MICRO_BATCHES
    trainer.compute_gradients(steps())
    assert recorded.replays == 2 * MICRO_BATCHES
