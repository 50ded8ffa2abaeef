"""Choices of kernels that only a GPU runs, and CUDA graphs, as far as a CPU can tell."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from mlm.checkpoint.native import staging
from mlm.checkpoint.native.staging import StagedFile
from mlm.cli.compose.composition import load_config
from mlm.data.sampler import Batch
from mlm.inference import trained
from mlm.models.config import LoraConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel import matmul, mesh
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.training import pipelined
from mlm.training.kernels import (
    choose_attention,
    choose_kernels,
    compile_layers,
    kernels_line,
    settle_kernels,
    should_compile,
    without_cudnn_attention,
)
from mlm.training.memory import torch_errors_as_user_errors
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from tests.operators import Operators
from tests.training.test_gradient_sums import MICRO_BATCHES, SPEC, batches
from tests.training.test_trainer import config

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """PyTorch's switches of attention, noted instead of set."""
    found: dict[str, Any] = {}
    for name in ("cudnn", "flash", "mem_efficient", "math"):
        monkeypatch.setattr(
            torch.backends.cuda, f"enable_{name}_sdp", lambda on, name=name: found.__setitem__(name, on)
        )
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", lambda order: found.__setitem__("order", order))
    return found


EVERY = {"cudnn": True, "flash": True, "mem_efficient": True, "math": True}


@pytest.mark.parametrize(
    ("kind", "capability", "one_shape", "allowed"),
    [
        ("auto", (8, 0), True, EVERY),
        ("auto", (9, 0), True, EVERY),
        ("auto", (9, 0), False, {**EVERY, "cudnn": False}),  # it plans for each new shape, tenths of a second
        ("cudnn", (9, 0), False, {**dict.fromkeys(EVERY, False), "cudnn": True}),
    ],
)
def test_attention_is_by_name_or_the_fastest(
    kind: Any, capability: tuple[int, int], one_shape: bool, allowed: object, switches: dict[str, Any]
) -> None:
    choose_attention(kind, capability, one_shape=one_shape)
    order = switches.pop("order", None)
    assert switches == allowed
    is_hopper = capability == (9, 0) and kind == "auto" and one_shape
    assert (order is not None) == is_hopper
    if order is not None:
        assert order[0] == SDPBackend.CUDNN_ATTENTION.value
        assert len(set(order)) == 4


def test_what_is_compiled_follows_a_later_choice_of_attention() -> None:
    """A CPU has two of the kernels; PyTorch guards no graph on the choice."""
    traced: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        traced.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    attention = torch.compile(
        torch.nn.functional.scaled_dot_product_attention, backend=aot_autograd(fw_compiler=note)
    )
    x = torch.randn(1, 2, 8, 16)
    try:
        for kind, is_fused in (("auto", True), ("math", False), ("math", False), ("auto", True)):
            choose_attention(kind, (8, 0))  # type: ignore[arg-type]
            attention(x, x, x)
            assert any("flash_attention" in name for name in traced) is is_fused
            if kind != "math":
                traced.clear()
    finally:
        choose_attention("auto", (8, 0))


@pytest.mark.parametrize("named", [False, True])
def test_blocks_of_any_shape_leave_cudnn_out_unless_it_is_named(named: bool) -> None:
    """PyTorch's own switches, which a CPU has too."""
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled()
    try:
        cuda.enable_cudnn_sdp(True)
        cuda.enable_flash_sdp(not named)
        with without_cudnn_attention(GPU):
            assert cuda.cudnn_sdp_enabled() is named
            inside = torch.compiler.config.cache_key_tag
        assert cuda.cudnn_sdp_enabled()
        assert named or torch.compiler.config.cache_key_tag != inside
    finally:
        cuda.enable_cudnn_sdp(before[0])
        cuda.enable_flash_sdp(before[1])


def test_passes_without_gradients_and_tasks_have_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretraining has one: its validation, all evaluation, generation and finetuning may have others."""
    blocks, told = [], []

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        blocks.append(device)
        yield

    monkeypatch.setattr(pipelined, "without_cudnn_attention", noted)
    monkeypatch.setattr(
        "mlm.training.trainer.choose_kernels", lambda config, device, one_shape: told.append(one_shape)
    )
    plain: Trainer[Batch] = Trainer(SPEC, ParallelContext())
    plain.compute_gradients(batches(0, 1))
    assert not blocks
    plain.validate(batches(0, 1))
    assert len(blocks) == MICRO_BATCHES
    Trainer(SPEC, ParallelContext(), plain.objective)
    assert told == [True, False]


@pytest.mark.parametrize("asked", [False, True])
def test_reproducible_kernels_do_not_fill_new_memory(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would write NaN into each new tensor, which is written again right after."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    try:
        choose_kernels(replace(SPEC, deterministic=asked), CPU)
        assert torch.utils.deterministic.fill_uninitialized_memory is not asked
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_run_without_a_compiler_takes_no_compiled_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even after a compiled run in its process."""
    asked: list[bool] = []
    monkeypatch.setattr("mlm.parallel.cross_entropy.compiled_passes", lambda: asked.append(True))
    monkeypatch.setattr("mlm.training.trainer.compile_layers", lambda *_, **__: None)
    spec = replace(SPEC, precision=PrecisionConfig(dtype="bf16"))
    for choice in (True, False):
        Trainer[Batch](replace(spec, compile=choice), ParallelContext()).compute_gradients(batches(0, 1))
        assert len(asked) == MICRO_BATCHES


def test_a_gpu_writes_weight_gradients_in_float32_without_a_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors: the product is of half precision, its result is not, and nothing converts it."""
    monkeypatch.setattr(matmul, "_WIDE_SUMS", {"cuda": True})
    with FakeTensorMode(), Operators() as seen:
        dy, x = (torch.empty(8, n, dtype=torch.bfloat16, device="cuda") for n in (4, 6))
        found = matmul.weight_gradient(dy, x, torch.float32)
    assert (found.dtype, found.shape) == (torch.float32, (4, 6))
    assert [name for name in seen.names if "mm" in name or "_to_copy" in name] == ["aten.mm.dtype"]


def test_a_gpu_adds_weight_gradients_where_their_sum_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors: one product, which gets the sum, and nothing else."""
    products: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(matmul, "_WIDE_ADDS", {"cuda": True})
    monkeypatch.setattr(matmul.torch, "addmm", lambda *args, out, out_dtype: products.append((args[0], out)))
    with FakeTensorMode(), Operators() as seen:
        dy, x = (torch.empty(8, n, dtype=torch.bfloat16, device="cuda") for n in (4, 6))
        total = torch.empty(4, 6, device="cuda")
        seen.names.clear()
        matmul.add_weight_gradient(total, dy, x)
    assert {name for name in seen.names if name.startswith("aten")} <= {"aten.t.default"}
    ((read, written),) = products
    assert read is written is total


@pytest.mark.parametrize("rounds", [False, True])
def test_sums_inside_products_need_a_device_that_keeps_their_bits(
    rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The questions to a GPU before the first step, with the product computed here."""

    def add(total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
        sums = total + dy.float().t() @ x.float()
        total.copy_(sums.bfloat16() if rounds else sums)

    monkeypatch.setattr(matmul, "_add_wide", add)
    assert matmul._adds_in_float32(torch.ones(16, 16, dtype=torch.bfloat16)) is not rounds


@pytest.mark.parametrize("locks", [True, False])
def test_a_checkpoint_of_a_gpu_is_staged_in_page_locked_memory(
    locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered once for all saves of a size, and given back before it is mapped anew."""
    events: list[str] = []

    def register(address: int, size: int, flags: int) -> int:
        events.append(f"lock {size}")
        return 0 if locks else 801

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: events.append("unlock")
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(staging, "_drop_error", lambda: None)
    staged = StagedFile()
    for size in (5000, 4000, 9000):
        staged._allocate(size, page_locked=True)
    assert events == (["lock 8192", "unlock", "lock 12288"] if locks else ["lock 8192", "lock 12288"])
    staged._allocate(20_000, page_locked=False)
    assert staged._locked is None


def test_an_error_of_locking_is_taken_from_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps a failed call's error for the thread's next kernel, which would fail by it."""
    kept: list[int] = []

    def launch(*_: object, device: str) -> None:
        if kept:
            raise RuntimeError(f"CUDA error: {kept.pop()}")

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: kept.append(801) or 801)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", launch)
    assert not staging._lock_pages(4096, 4096)
    assert kept == []


@pytest.mark.parametrize("dtype, expected", [("tf32", "high"), ("bf16", "highest")])
def test_products_of_a_loaded_model_are_of_the_precision_asked_for(
    dtype: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFloat32 is a switch of the process: evaluation and generation set it as training does."""
    set_to: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_to.append)
    monkeypatch.setattr(trained, "PipelinedModel", lambda *_: set_to.append("model"))
    precision, ctx = PrecisionConfig(dtype=dtype), ParallelContext(device=GPU)
    with pytest.raises(AttributeError):  # there is no model
        trained.load_trained(SimpleNamespace(model=0), ParallelConfig(), precision, ctx)  # type: ignore[arg-type]
    assert set_to == [expected, "model"]


def test_sums_over_tp_go_first_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builds of PyTorch for CPUs have no NCCL."""
    options: list[Any] = []
    monkeypatch.setattr(mesh.dist, "get_backend", lambda *_: "nccl")
    group = SimpleNamespace(group_name="stub")
    record = lambda *_, pg_options, **__: options.append(pg_options) or group  # noqa: E731
    monkeypatch.setattr(mesh.dist, "new_group", record)
    nccl = SimpleNamespace(Options=SimpleNamespace)
    monkeypatch.setattr(mesh.dist, "ProcessGroupNCCL", nccl, raising=False)
    for name, device in (("tp", GPU), ("dp", GPU), ("tp", CPU)):
        mesh._make_axis(name, [[0, 1]], 0, 7.0, mesh.Watch(), device)
    assert options[0].is_high_priority_stream
    assert options[0]._timeout == timedelta(seconds=7)  # PyTorch warns of another than the group's
    assert options[1:] == [None, None]


def test_a_kernel_that_pytorch_lacks_is_a_mistake_in_the_settings() -> None:
    """An error that a CPU can raise: a scatter that has no kernel to repeat every bit."""
    config = load_config("pretrain", ["model=gpt2_tiny", "data=synthetic", "attention=flash"])
    torch.use_deterministic_algorithms(True)
    try:
        with (
            pytest.raises(UserError, match=r"^(attention=flash|deterministic=false)"),
            torch_errors_as_user_errors(config, "data.seq_length"),
        ):
            torch.zeros(4).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    finally:
        torch.use_deterministic_algorithms(False)
    with (
        pytest.raises(RuntimeError, match="sizes differ"),
        torch_errors_as_user_errors(config, "data.seq_length"),
    ):
        raise RuntimeError("sizes differ")


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


LARGE = replace(SPEC.model, hidden_size=1 << 16, num_heads=1 << 9)


@pytest.mark.parametrize(
    ("device", "changed", "graphs", "fuses"),
    [
        ("cuda", {}, True, False),
        ("cpu", {}, False, False),
        ("cuda", {"cuda_graphs": False}, False, True),
        ("cuda", {"compile": False}, False, True),
        ("cuda", {"model": LARGE}, False, True),
        ("cuda", {"model": LARGE, "precision": PrecisionConfig(dtype="fp8")}, False, False),
        ("cuda", {"model": LARGE, "parallel": ParallelConfig(recompute="full")}, False, False),
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
    line = kernels_line(spec, settled, torch.device(device))
    is_idle = spec.cuda_graphs is True and device == "cpu"
    assert (line is not None) == (is_said or is_idle)
    assert not is_idle or line == "cuda_graphs=true has no effect on a CPU"
    several_shapes = settle_kernels(spec, torch.device(device), replicas=1, one_shape=False)
    assert (several_shapes.cuda_graphs, several_shapes.fuse_accumulation) == (False, False)


def test_layers_compile_by_default_where_there_is_a_compiler_and_for_graphs_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, cpu, layer = torch.device("cuda"), torch.device("cpu"), Mock()
    monkeypatch.setattr("mlm.training.kernels.prepare_to_compile", Mock())
    for found in (False, True):
        monkeypatch.setattr("torch.utils._triton.has_triton", lambda found=found: found)
        assert [should_compile(choice, gpu) for choice in (None, True, False)] == [found, True, False]
        assert not should_compile(None, cpu)
        compile_layers([layer], True, cpu, graphs=found)
    assert [call.kwargs["mode"] for call in layer.compile.mock_calls] == ["default", "reduce-overhead"]


@pytest.mark.parametrize(
    ("device", "layout", "parts"),
    [
        ("cuda", ParallelConfig(tp=2, sequence_parallel=True), 2),
        ("cuda", ParallelConfig(tp=2), 1),
        ("cpu", ParallelConfig(tp=2, sequence_parallel=True), 1),
        ("cpu", ParallelConfig(tp=2, sequence_parallel=True, tp_overlap=4), 4),
    ],
)
def test_messages_of_sequence_parallelism_go_in_parts_on_a_gpu(
    device: str, layout: ParallelConfig, parts: int
) -> None:
    settled = settle_kernels(replace(SPEC, parallel=layout), torch.device(device), replicas=1)
    assert settled.parallel == replace(layout, tp_overlap=parts)
