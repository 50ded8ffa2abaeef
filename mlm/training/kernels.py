"""Choice of kernels before a model is built: attention, compiled layers, TensorFloat32, deterministic ones.

These switches of PyTorch apply to the whole process. A rank trains one model.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from mlm.models.config import KINDS
from mlm.models.documents import pack_sequences
from mlm.models.family import family_of
from mlm.models.shape import layer_weights
from mlm.optim.config import PrecisionConfig
from mlm.parallel.compute_state import prepare_to_compile
from mlm.parallel.matmul import prepare_products
from mlm.runs.checks import conflict
from mlm.runs.config import AttentionKernel, PretrainConfig
from mlm.util.errors import UserError, format_value

ADA, HOPPER = (8, 9), (9, 0)
"""Compute capabilities from which GPUs multiply 8-bit floats, and prefer cuDNN's attention."""
FP8_WIDTH = 2048
"""Width from which 8-bit products save more time than their casts take, by bytes and FLOPs of an H100."""
ATTENTION = {"cudnn": "cudnn", "flash": "flash", "efficient": "mem_efficient", "math": "math"}
"""Attention kernels, fastest first, and their names in PyTorch."""


def choose_kernels(config: PretrainConfig, device: torch.device, *, one_shape: bool = True) -> None:
    """Set PyTorch's switches for a run. On a CPU only `deterministic` has an effect. Raises UserError.

    `one_shape` is True if all micro-batches have one shape.
    """
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU's first product runs
        torch.use_deterministic_algorithms(True)
        # filling would take a pass over each new tensor
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type != "cuda":
        return
    choose_products(config.precision, device)
    choose_attention(config.attention, torch.cuda.get_device_capability(device), one_shape=one_shape)
    pack_sequences(config.attention == "flash" and family_of(config.model.kind).packs)
    prepare_products(device)


def choose_products(precision: PrecisionConfig, device: torch.device) -> None:
    """Set PyTorch's switch for products of float32 on a GPU: TensorFloat32 or all bits. Raises UserError."""
    if device.type != "cuda":
        return
    if precision.dtype == "fp8" and torch.cuda.get_device_capability(device) < ADA:
        raise UserError(
            f"precision.dtype=fp8: {torch.cuda.get_device_name(device)} multiplies no 8-bit floats; use "
            "precision=bf16"
        )
    torch.set_float32_matmul_precision("high" if precision.dtype == "tf32" else "highest")


def choose_attention(kind: AttentionKernel, capability: tuple[int, int], *, one_shape: bool = True) -> None:
    """Allow scaled_dot_product_attention one kernel, or with auto all of them, the fastest first.

    cuDNN plans each new shape, tenths of a second forward and again backward: without `one_shape`, auto
    excludes it. Compiled code keeps the kernel of its compilation without a guard, so it is dropped.
    """
    before = _attention_chosen()
    for name, torch_name in ATTENTION.items():
        is_allowed = kind == name or (kind == "auto" and (one_shape or name != "cudnn"))
        getattr(torch.backends.cuda, f"enable_{torch_name}_sdp")(is_allowed)
    if kind == "auto" and one_shape and capability >= HOPPER:
        backends = torch.nn.attention.SDPBackend
        order = (backends.CUDNN_ATTENTION, backends.FLASH_ATTENTION, backends.EFFICIENT_ATTENTION)
        torch._C._set_sdp_priority_order([backend.value for backend in (*order, backends.MATH)])
    if _attention_chosen() != before and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    _key_compiled_code()


def _key_compiled_code() -> None:
    """Separate code compiled for different attention kernels in PyTorch's caches in memory and on disk."""
    torch.compiler.config.cache_key_tag = repr(_attention_chosen())


def _attention_chosen() -> tuple[object, ...]:
    """The attention kernels that PyTorch may use, and their order."""
    enabled = (getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ATTENTION.values())
    return (*enabled, *torch._C._get_sdp_priority_order())


@contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """Disable cuDNN's attention inside the block, where lengths differ, unless it is the only kernel."""
    cuda = torch.backends.cuda
    if device.type != "cuda" or not (cuda.cudnn_sdp_enabled() and cuda.flash_sdp_enabled()):
        yield
        return
    cuda.enable_cudnn_sdp(False)
    _key_compiled_code()
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(True)
        _key_compiled_code()


def should_compile(choice: bool | None, device: torch.device) -> bool:
    """Resolve the setting `compile`: None means True on a GPU that has a compiler."""
    if choice is not None:
        return choice
    if device.type != "cuda":
        return False
    from torch.utils._triton import has_triton  # loads the compiler

    return bool(has_triton())


def settle_kernels(
    config: PretrainConfig, device: torch.device, *, replicas: int, one_shape: bool = True
) -> PretrainConfig:
    """Resolve settings left to the device: CUDA graphs, fused gradient accumulation, overlap over tp.

    `replicas` is dp; `one_shape` is True if all micro-batches have one shape.
    """
    on_gpu, parallel = device.type == "cuda", config.parallel
    if config.exact:  # none of them keeps its order of sums
        parallel = replace(parallel, tp_overlap=1)
        return replace(config, compile=False, cuda_graphs=False, fuse_accumulation=False, parallel=parallel)
    is_shipped = config.model.kind in KINDS and not config.lora.rank
    train = config.train
    graphs, fuses, parts = config.cuda_graphs, config.fuse_accumulation, parallel.tp_overlap
    if graphs is None:
        replayed = replace(config, cuda_graphs=True)
        # On an H200 replayed graphs gain half the speed at 0.35e12 FLOP of a layer and micro-batch, and
        # nothing at 1.4e12 (scripts/results/gpu).
        graphs = on_gpu and one_shape and is_shipped and layer_flops(config) < 1e12
        graphs = (
            graphs and conflict("cuda_graphs", replayed) is None and should_compile(config.compile, device)
        )
    if fuses is None:
        fused = replace(config, fuse_accumulation=True)
        fuses = (
            on_gpu and one_shape and is_shipped and not graphs and config.precision.dtype in ("bf16", "fp16")
        )
        fuses = fuses and train.global_batch_size > replicas * train.micro_batch_size
        fuses = fuses and conflict("fuse_accumulation", fused) is None
    if parts is None:  # plans of GPUs are on meta
        parts = 2 if device.type in ("cuda", "meta") and parallel.sequence_parallel and parallel.tp > 1 else 1
    return replace(
        config,
        cuda_graphs=graphs,
        fuse_accumulation=fuses,
        parallel=replace(parallel, tp_overlap=parts),
    )


def layer_flops(config: PretrainConfig) -> float:
    """FLOP of a layer's products in a micro-batch, forward and backward."""
    tokens = config.train.micro_batch_size * config.data.seq_length
    return 6 * layer_weights(config.model) * tokens


def kernels_line(config: PretrainConfig, settled: PretrainConfig, device: torch.device) -> str | None:
    """A line on what `settle_kernels` turned on, or on a switch without effect; None if neither."""
    if config.cuda_graphs and device.type != "cuda":
        return f"cuda_graphs={format_value(config.cuda_graphs)} has no effect on a CPU"
    chosen = []
    if config.cuda_graphs is None and settled.cuda_graphs:
        small = f"a layer takes {layer_flops(config) / 1e12:.2g} TFLOP of a micro-batch"
        chosen.append(f"cuda_graphs=true, as {small}, so that the GPU would wait for the host")
    if config.fuse_accumulation is None and settled.fuse_accumulation:
        chosen.append("fuse_accumulation=true, as a step has several micro-batches")
    return f"by default {'; '.join(chosen)}" if chosen else None


def fp8_line(config: PretrainConfig) -> str | None:
    """A line that advises against 8-bit products of narrow layers."""
    width = config.model.hidden_size
    if config.precision.dtype != "fp8" or width >= FP8_WIDTH:
        return None
    slow = f"slower than bf16 below model.hidden_size={FP8_WIDTH}, and this is {width}"
    return f"precision=fp8: {slow}; use precision=bf16"


def compile_layers(
    layers: Iterable[nn.Module],
    choice: bool | None,
    device: torch.device,
    *,
    graphs: bool = False,
    budget: float = 1.0,
) -> None:
    """torch.compile each layer: one graph serves all, where compiling whole models took minutes.

    If the compiler is a default and fails, the layer runs eagerly, with a warning. `graphs` replays the
    launches of each layer. `budget` is the share of inner activations that a layer keeps; the compiler
    recomputes the cheapest. Raises UserError.
    """
    if not should_compile(choice, device):
        if graphs and device.type == "cuda":
            raise UserError("cuda_graphs=true: this host has no compiler for its GPU; use cuda_graphs=false")
        return
    prepare_to_compile()
    keep_activations(budget)
    if choice is None:
        torch._dynamo.config.suppress_errors = True
    for layer in layers:
        layer.compile(mode="reduce-overhead" if graphs else "default")


def keep_activations(budget: float) -> None:
    """Set the share of activations that compiled code keeps. Not guarded, so older code is dropped."""
    from torch._functorch import config

    if config.activation_memory_budget != budget:
        torch._dynamo.reset()
        config.activation_memory_budget = budget
