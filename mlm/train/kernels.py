"""Choice of kernels, before a model is built: attention, compiled layers, TensorFloat32, reproducible ones.

These are switches of PyTorch for the whole process. A rank trains one model.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mlm.errors import UserError
from mlm.models.packed import pack_sequences
from mlm.parallel.fused_loss import use_compiler
from mlm.parallel.matmul import prepare_products
from mlm.parallel.uncompiled import prepare_to_compile
from mlm.train.config import AttentionKernel, PretrainConfig

ADA, HOPPER = (8, 9), (9, 0)
"""Compute capabilities from which 8-bit floats are multiplied, and cuDNN's attention comes first."""
MISSING = {
    "No available kernel": "attention={attention} serves no such attention on this GPU; use attention=auto",
    "FlashAttention only supports": (
        "attention={attention}: this GPU has no flash kernel for packed sequences; use attention=auto"
    ),
    "does not have a deterministic implementation": (
        "deterministic={deterministic}: PyTorch has no kernel that repeats every bit for this run; use "
        "deterministic=false"
    ),
}
"""Words of PyTorch's errors for a kernel that it lacks, and what to say instead."""


def choose_kernels(config: PretrainConfig, device: torch.device) -> None:
    """Set PyTorch's switches for a run. On a CPU only `deterministic` has an effect. Raises UserError."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU's first product runs
        torch.use_deterministic_algorithms(True)
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if config.precision.dtype == "fp8" and capability < ADA:
        raise UserError(
            f"precision.dtype=fp8: {torch.cuda.get_device_name(device)} multiplies no 8-bit floats; use "
            "precision=bf16"
        )
    torch.set_float32_matmul_precision("high" if config.precision.dtype == "tf32" else "highest")
    choose_attention(config.attention, capability)
    pack_sequences(config.attention == "flash" and config.model.family.packs)
    prepare_products(device)


def choose_attention(kind: AttentionKernel, capability: tuple[int, int]) -> None:
    """Let scaled_dot_product_attention use one kernel, or with auto each that can, the fastest first."""
    cuda = torch.backends.cuda
    switches: dict[str, Callable[[bool], None]] = {
        "cudnn": cuda.enable_cudnn_sdp,
        "flash": cuda.enable_flash_sdp,
        "efficient": cuda.enable_mem_efficient_sdp,
        "math": cuda.enable_math_sdp,
    }
    for name, switch in switches.items():
        switch(kind in ("auto", name))
    set_order = getattr(torch._C, "_set_sdp_priority_order", None)
    if kind == "auto" and capability >= HOPPER and set_order is not None:
        backends = torch.nn.attention.SDPBackend
        order = (
            backends.CUDNN_ATTENTION,
            backends.FLASH_ATTENTION,
            backends.EFFICIENT_ATTENTION,
            backends.MATH,
        )
        set_order([backend.value for backend in order])


@contextmanager
def missing_kernel_as_user_error(config: PretrainConfig) -> Iterator[None]:
    """Turn PyTorch's errors for a kernel that it lacks into a UserError with a fix."""
    try:
        yield
    except RuntimeError as error:
        for words, problem in MISSING.items():
            if words in str(error):
                said = problem.format(
                    attention=config.attention, deterministic=str(config.deterministic).lower()
                )
                raise UserError(f"{said} ({str(error).splitlines()[0]})") from error
        raise


def compiles(choice: bool | None, device: torch.device) -> bool:
    """`compile` of the configuration, decided: by default on a GPU that has a compiler."""
    if choice is not None:
        return choice
    if device.type != "cuda":
        return False
    from torch.utils._triton import has_triton  # loads the compiler

    return bool(has_triton())


def compile_layers(
    layers: Iterable[nn.Module], choice: bool | None, device: torch.device, *, graphs: bool = False
) -> None:
    """torch.compile each layer: one graph serves all, where compiling whole models took minutes.

    Where the compiler was not asked for and fails, the layer runs as it is, with a warning. With `graphs` the
    launches of each are replayed. Raises UserError.
    """
    if not compiles(choice, device):
        if graphs and device.type == "cuda":
            raise UserError("cuda_graphs=true: this host has no compiler for its GPU; use cuda_graphs=false")
        return
    prepare_to_compile()
    use_compiler()
    if choice is None:
        torch._dynamo.config.suppress_errors = True
    for layer in layers:
        layer.compile(mode="reduce-overhead" if graphs else "default")
