"""CUDA graphs of layers, as far as a CPU can tell: what the trainer tells the compiler, and what it keeps."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mlm.data.sampler import Batch
from mlm.models.config import LoraConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.training.kernels import compile_layers, fp8_line, kernels_line, settle_kernels
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from tests.training.test_gradient_sums import MICRO_BATCHES, SPEC, batches
from tests.training.test_trainer import config

GRAPHS = replace(SPEC, cuda_graphs=True, compile=False)  # the same calls, and nothing to compile


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Micro-batches that CUDA graphs hear of."""
    found: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: found.append("begin"))
    return found


def test_each_micro_batch_is_announced_in_training_and_validation(begun: list[str]) -> None:
    trainer: Trainer[Batch] = Trainer(GRAPHS, ParallelContext())
    trainer.compute_gradients(batches(0, 1))
    assert len(begun) == MICRO_BATCHES
    trainer.validate(batches(0, 1))
    assert len(begun) == 2 * MICRO_BATCHES
    Trainer(SPEC, ParallelContext()).compute_gradients(batches(0, 1))
    assert len(begun) == 2 * MICRO_BATCHES


def test_gradients_stay_in_buffers_that_no_graph_overwrites(begun: list[str]) -> None:
    """Of one rank, too: the gradient that backward returns would else become the sum itself."""
    trainer, plain = (Trainer[Batch](spec, ParallelContext()) for spec in (GRAPHS, SPEC))
    weight = trainer.model.chunks[0].layers["0"].mlp.up.weight  # type: ignore[union-attr]
    places = set()
    for _ in range(2):
        for each in (trainer, plain):
            each.compute_gradients(batches(0, 1))
        places.add(weight.grad.data_ptr())  # type: ignore[union-attr]
    assert len(places) == 1
    for a, b in zip(trainer.shards, plain.shards, strict=True):
        assert a.parameter.grad is not None
        torch.testing.assert_close(a.parameter.grad, b.parameter.grad, rtol=0, atol=1e-14)


def test_cast_weights_are_marked_as_staying_where_they_are(begun: list[str]) -> None:
    """Unmarked, a graph would copy each weight before every layer."""
    spec = replace(config(dtype="bf16"), train=SPEC.train)
    for on in (True, False):
        trainer: Trainer[Batch] = Trainer(replace(spec, cuda_graphs=on), ParallelContext())
        trainer.compute_gradients(batches(0, 1))
        marks = {getattr(copy, "_dynamo_static_input_type", None) for copy in trainer.model.casts.copies}
        assert marks == ({"unguarded"} if on else {None})


def test_layers_are_compiled_for_graphs_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    layer = SimpleNamespace(compile=lambda mode: modes.append(mode))
    monkeypatch.setattr("mlm.training.kernels.prepare_to_compile", lambda: None)
    for graphs in (False, True):
        compile_layers([layer], True, torch.device("cpu"), graphs=graphs)  # type: ignore[list-item]
    assert modes == ["default", "reduce-overhead"]


def test_graphs_on_a_gpu_without_a_compiler_are_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(UserError, match="no compiler"):
        compile_layers([nn.Linear(1, 1)], None, torch.device("cuda"), graphs=True)


LARGE = replace(SPEC.model, hidden_size=1 << 16, num_heads=1 << 9)


@pytest.mark.parametrize(
    ("device", "changed", "graphs", "fuses"),
    [
        ("cuda", {}, True, False),
        ("cpu", {}, False, False),
        ("cuda", {"cuda_graphs": False}, False, True),
        ("cuda", {"cuda_graphs": False, "fuse_accumulation": False}, False, False),
        ("cuda", {"compile": False}, False, True),
        ("cuda", {"deterministic": True}, False, True),
        ("cuda", {"model": LARGE}, False, True),
        ("cuda", {"model": LARGE, "precision": PrecisionConfig(dtype="fp8")}, False, False),
        ("cuda", {"model": LARGE, "precision": PrecisionConfig(dtype="fp32")}, False, False),
        ("cuda", {"model": LARGE, "parallel": ParallelConfig(recompute="full")}, False, False),
        ("cuda", {"model": LARGE, "train": replace(SPEC.train, micro_batch_size=8)}, False, False),
        ("cuda", {"lora": LoraConfig(rank=4)}, False, False),
    ],
)
def test_kernels_are_settled_by_the_device_and_the_size_of_a_layer(
    device: str, changed: dict[str, Any], graphs: bool, fuses: bool
) -> None:
    spec = replace(SPEC, compile=True, precision=PrecisionConfig(dtype="bf16"))
    spec = replace(spec, **changed)
    settled = settle_kernels(spec, torch.device(device), replicas=1)
    assert (settled.cuda_graphs, settled.fuse_accumulation) == (graphs, fuses)
    is_said = (graphs and spec.cuda_graphs is None) or (fuses and spec.fuse_accumulation is None)
    assert (kernels_line(spec, settled) is not None) == is_said
    several_shapes = settle_kernels(spec, torch.device(device), replicas=1, one_shape=False)
    assert (several_shapes.cuda_graphs, several_shapes.fuse_accumulation) == (False, False)


@pytest.mark.parametrize(
    ("device", "layout", "parts"),
    [
        ("cuda", ParallelConfig(tp=2, sequence_parallel=True), 2),
        ("cuda", ParallelConfig(tp=2, sequence_parallel=True, tp_overlap=1), 1),
        ("cuda", ParallelConfig(tp=2), 1),
        ("cuda", ParallelConfig(sequence_parallel=True), 1),
        ("cpu", ParallelConfig(tp=2, sequence_parallel=True), 1),
        ("cpu", ParallelConfig(tp=2, sequence_parallel=True, tp_overlap=4), 4),
    ],
)
def test_messages_of_sequence_parallelism_go_in_parts_on_a_gpu(
    device: str, layout: ParallelConfig, parts: int
) -> None:
    settled = settle_kernels(replace(SPEC, parallel=layout), torch.device(device), replicas=1)
    assert settled.parallel == replace(layout, tp_overlap=parts)


@pytest.mark.parametrize(
    ("dtype", "width", "is_said"), [("fp8", 1024, True), ("fp8", 2048, False), ("bf16", 64, False)]
)
def test_narrow_layers_are_advised_against_8_bits(dtype: Any, width: int, is_said: bool) -> None:
    spec = replace(SPEC, model=replace(SPEC.model, hidden_size=width), precision=PrecisionConfig(dtype=dtype))
    assert (fp8_line(spec) is not None) == is_said
