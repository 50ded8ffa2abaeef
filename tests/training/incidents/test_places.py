"""Errors planted on some ranks, and the place that the repeated step finds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlm.data.sampler import Loader, MicroBatch, SyntheticDataset
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.incidents.probe import StepProbe
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.test_trainer import SEQ, VOCAB, config

NAN = float("nan")


def batches_of(trainer: Trainer) -> list[MicroBatch]:
    """This rank's micro-batches of the first step: samples 0 to 7."""
    spec, ctx = trainer.config, trainer.ctx
    samples = SyntheticDataset(VOCAB, SEQ, 8, spec.seed)
    place = {"rank": ctx.dp.rank, "size": ctx.dp.size, "global_batch_size": 8, "micro_batch_size": 2}
    with Loader(samples, consumed_samples=0, **place) as loader:
        return next(loader)


def found(trainer: Trainer, plant: Callable[[Trainer], None] = lambda trainer: None) -> Any:
    """The findings of a step with a planted error."""
    plant(trainer)
    return StepProbe(trainer).run(batches_of(trainer))[1]


def layer(trainer: Trainer, number: int) -> nn.Module | None:
    """A layer, on the ranks that hold it."""
    layers = [chunk.layers for chunk in trainer.model.chunks]
    return next((each[str(number)] for each in layers if str(number) in each), None)


@contextmanager
def writing(module: nn.Module | None, value: float, *place: int) -> Iterator[None]:
    """Let a module write a number into its output."""

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[place] = value
        return output

    handle = module.register_forward_hook(hook) if module is not None else None
    yield
    if handle is not None:
        handle.remove()


def nan_on_rank_1(ctx: ParallelContext, spec: PretrainConfig, name: str = "mlp.up") -> dict[str, Any]:
    trainer: Trainer = Trainer(spec, ctx)
    module = layer(trainer, 1) if ctx.rank == 1 else None
    with writing(module and module.get_submodule(name), NAN, 3, 1, 0):
        return found(trainer)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2}, {"pp": 2}])
def test_a_nan_that_one_rank_writes_names_module_rank_and_position(layout: dict[str, int]) -> None:
    places = [place["first_not_finite"] for place in run_on_ranks(nan_on_rank_1, config(), **layout)]
    first = places[0]
    assert (first["tensor"], first["name"], first["ranks"]) == ("output", "layers.1.mlp.up", [1])
    assert first["position"] == 3
    assert first["sample"] == (3 if layout == {"dp": 2} else 1)
    assert all(place == first for place in places)


def test_positions_of_split_sequences_are_those_of_the_sample() -> None:
    """By sequence parallelism in halves; rank 1 of 2 over cp holds the second and third quarter."""
    spec = config()
    spec = replace(spec, parallel=replace(spec.parallel, tp=2, sequence_parallel=True))
    first = run_on_ranks(nan_on_rank_1, spec, "mlp_norm", tp=2)[0]["first_not_finite"]
    assert (first["name"], first["ranks"], first["position"]) == ("layers.1.mlp_norm", [1], SEQ // 2 + 3)
    first = run_on_ranks(nan_on_rank_1, config(), cp=2)[0]["first_not_finite"]
    assert (first["name"], first["ranks"], first["position"]) == ("layers.1.mlp.up", [1], SEQ // 4 + 3)


def test_corrupt_weights_of_one_replica_are_the_first_place() -> None:
    first = run_on_ranks(corrupt_weight, config(), dp=2)[0]["first_not_finite"]
    assert (first["tensor"], first["name"], first["ranks"]) == ("weight", "layers.0.mlp.up.weight", [1])


def corrupt_weight(ctx: ParallelContext, spec: PretrainConfig) -> dict[str, Any]:
    trainer: Trainer = Trainer(spec, ctx)
    if ctx.rank == 1:
        module = layer(trainer, 0)
        module.mlp.up.weight.data[5, 5] = NAN
    return found(trainer)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_an_overflow_between_modules_is_at_the_input_of_the_next(recompute: str) -> None:
    """The residual sum overflows: the outputs of both branches are finite."""
    trainer: Trainer = Trainer(config(recompute=recompute), shape_context())
    large = torch.finfo(torch.float64).max
    module = layer(trainer, 0)
    with writing(module.attention.out, large, 0, 1, 2), writing(module.mlp.down, large, 0, 1, 2):
        first = found(trainer)["first_not_finite"]
    assert (first["tensor"], first["name"]) == ("input", "layers.1.attention_norm")
    assert (first["sample"], first["position"]) == (1, 0)


def test_a_gradient_that_is_not_finite_is_found_where_backward_makes_it() -> None:
    trainer: Trainer = Trainer(config(), shape_context())
    module = layer(trainer, 1)
    handle = module.mlp.up.register_full_backward_hook(lambda _m, grads, _out: (grads[0] * NAN,))
    first = found(trainer)["first_not_finite"]
    handle.remove()
    assert (first["tensor"], first["name"]) == ("gradient", "layers.1.mlp_norm")


def test_looking_leaves_the_same_gradients_and_no_hooks() -> None:
    trainer: Trainer = Trainer(config(), shape_context())
    batches = batches_of(trainer)
    trainer.compute_gradients(batches)
    before = [shard.parameter.grad.clone() for shard in trainer.shards]
    assert found(trainer)["first_not_finite"] is None
    assert all(torch.equal(a, s.parameter.grad) for a, s in zip(before, trainer.shards, strict=True))
    assert not any(m._forward_hooks for chunk in trainer.model.chunks for m in chunk.modules())
