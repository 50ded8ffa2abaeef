"""State of computation: parameter copies cast once per step, deferred gradients, uncompiled functions.

Master weights are float32. Casting them for each product of each micro-batch moves 6 bytes a parameter,
reading a copy moves 2. Biases and norm weights are small, but each cast launches a kernel.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from mlm.parallel.fp8 import NARROW, Operand, cast, fits

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class DeferredWeightGrads:
    """Weight-gradient products that a zero-bubble schedule defers (arXiv:2401.10241, section 2)."""

    open: bool = False
    """True while backward passes append their products to `jobs`."""
    jobs: list[Callable[[], None]] = field(default_factory=list)
    """Each adds its gradient to the weight's."""

    def take(self) -> list[Callable[[], None]]:
        jobs, self.jobs = self.jobs, []
        return jobs


@dataclass
class ComputeState:
    """Compute state of a module in addition to its parameters; set and cleared by the trainer."""

    weight_copy: Tensor | None = None
    """The weight in the dtype of compute (`CachedHalfParams`)."""
    bias_copy: Tensor | None = None
    """The bias in the dtype of compute."""
    up_copy: Tensor | None = None
    """W1 of experts in the dtype of compute."""
    down_copy: Tensor | None = None
    """W2 of experts in the dtype of compute."""
    deferred: DeferredWeightGrads | None = None
    """Weight gradients of a zero-bubble schedule. This and the following are for linear layers only."""
    fp8: bool = False
    """True if products are of 8-bit floats (`mlm.parallel.fp8`)."""
    weight_8: Operand | None = None
    """The weight in 8 bits (`CachedHalfParams`)."""
    fused_grad: Tensor | None = None
    """Sum that the weight's gradient joins inside its product (`ChunkGradients`)."""
    overlap_chunks: int = 1
    """Chunks of rows; tp communication of one overlaps the products of the next."""

    @property
    def is_plain(self) -> bool:
        """True if products read the parameter itself and autograd adds its gradient at once."""
        return self.weight_copy is None and self.deferred is None and self.fused_grad is None and not self.fp8


class ComputesInHalf(nn.Module):
    """A module with a ComputeState, whose parameter copies it reads if present."""

    constant_sides: Mapping[str, str]  # see ParameterShard.constant_side

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute = ComputeState()

    def cached_half_params(self, dtype: torch.dtype) -> dict[str, bool]:
        """Names of parameters whose copies are read; True if gradients pass through the copy."""
        return {}

    def in_dtype(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a parameter in a dtype, by its copy unless a compiler fuses the cast."""
        parameter: Tensor = getattr(self, name)
        copy = None if torch.compiler.is_compiling() else getattr(self.compute, f"{name}_copy")
        return choose_copy(copy, parameter, dtype).to(dtype)


def choose_copy(copy: Tensor | None, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return parameter if copy is None or copy.dtype != dtype else copy


def is_cast_to_8_bits(layer: ComputesInHalf, name: str) -> bool:
    """True if a cached parameter also has an 8-bit `Operand`, of 2 bytes an element."""
    return name == "weight" and layer.compute.fp8 and fits(*getattr(layer, name).shape)


class _CastWithGrad(torch.autograd.Function):
    """Use a copy in place of its parameter, and cast the gradient as `to` would."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class CachedHalfParams:
    """Half-precision copies of modules' parameters, valid while these do not change.

    The copies take 2 bytes a parameter from the first use on.
    """

    def __init__(self, modules: Iterable[object], dtype: torch.dtype) -> None:
        self.reads: list[tuple[ComputesInHalf, str, bool]] = []
        for module in modules:
            if isinstance(module, ComputesInHalf):
                for name, passes_grad in module.cached_half_params(dtype).items():
                    parameter = getattr(module, name, None)
                    if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                        self.reads.append((module, name, passes_grad))
        self.dtype = dtype
        self.copies: list[Tensor] = []
        self.depth = 0
        self.persistent = False
        """True if CUDA graphs read the copies, which then need static addresses."""

    def exclude(self, layers: Iterable[nn.Module]) -> None:
        """Skip copies that only uncompiled code reads (`in_dtype`). Call before `cast_for_step`."""
        compiled = {module for layer in layers for module in layer.modules()}
        self.reads = [entry for entry in self.reads if not (entry[2] and entry[0] in compiled)]

    def cast_for_step(self, *, trains: bool) -> None:
        """Cast the parameters; layers read the copies until the matching `release`.

        With `trains` gradients pass through the copies: one node per step, shared by its backward passes.
        """
        self.depth += 1
        if self.depth > 1 or not self.reads:
            return
        parameters = [getattr(layer, name) for layer, name, _ in self.reads]
        if not self.copies:
            self.copies = [torch.empty_like(p, dtype=self.dtype, requires_grad=False) for p in parameters]
            for copy in self.copies if self.persistent else ():
                torch._dynamo.mark_static_address(copy, guard=False)  # a guard would compile each layer
        torch._foreach_copy_(self.copies, [p.detach() for p in parameters])
        with torch.enable_grad():
            for (layer, name, passes_grad), p, copy in zip(self.reads, parameters, self.copies, strict=True):
                tensor = _CastWithGrad.apply(p, copy) if passes_grad and trains else copy  # type: ignore[no-untyped-call]
                setattr(layer.compute, f"{name}_copy", tensor)
                if is_cast_to_8_bits(layer, name):
                    layer.compute.weight_8 = cast(copy, NARROW)

    def release(self) -> None:
        """Drop the copies: parameters may change again."""
        self.depth -= 1
        if self.depth == 0:
            for layer, name, _ in self.reads:
                setattr(layer.compute, f"{name}_copy", None)
                layer.compute.weight_8 = None

    @contextmanager
    def casting(self, *, trains: bool) -> Iterator[None]:
        self.cast_for_step(trains=trains)
        try:
            yield
        finally:
            self.release()


_uncompiled: list[list[Callable[..., object]]] = []


def skip_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, which torch.compile does not trace after `prepare_to_compile`.

    torch.compiler.disable at import would load the compiler, 1.6 s of processor time, in every command.
    """
    current: list[Callable[..., R]] = [function]
    _uncompiled.append(current)  # type: ignore[arg-type]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return current[0](*args, **kwargs)

    return call


def prepare_to_compile() -> None:
    """Disable torch.compile for functions of `skip_compile`. Call before any compilation."""
    while _uncompiled:
        current = _uncompiled.pop()
        current[0] = torch.compiler.disable(current[0])
