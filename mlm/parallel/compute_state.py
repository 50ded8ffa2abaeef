"""State of computation: parameter copies cast once per step, deferred gradients, code kept uncompiled.

Master weights are float32. Cast for each product, forward and backward, in every micro-batch, they cost 6
bytes of traffic a parameter each time, where reading a copy costs 2. A bias or a norm's weight is little
traffic, but a kernel of its own at each use.
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
    """Running one adds its gradient to the weight's."""

    def take(self) -> list[Callable[[], None]]:
        jobs, self.jobs = self.jobs, []
        return jobs


@dataclass
class ComputeState:
    """State that a module computes with besides its parameters; set and cleared by the trainer."""

    weight_copy: Tensor | None = None
    """The weight in the dtype of compute (`CachedHalfParams`)."""
    bias_copy: Tensor | None = None
    """The bias in the dtype of compute."""
    up_copy: Tensor | None = None
    """W1 of experts in the dtype of compute."""
    down_copy: Tensor | None = None
    """W2 of experts in the dtype of compute."""
    deferred: DeferredWeightGrads | None = None
    """Weight gradients of a zero-bubble schedule. This and the following are of linear layers only."""
    fp8: bool = False
    """True if products are of 8-bit floats (`mlm.parallel.fp8`)."""
    weight_8: Operand | None = None
    """The weight in 8 bits (`CachedHalfParams`)."""
    fused_grad: Tensor | None = None
    """Sum that the weight's gradient joins inside its product (`ChunkGradients`)."""
    overlap_chunks: int = 1
    """Parts of the rows; the communication of one over tp overlaps the products of the next."""

    @property
    def is_plain(self) -> bool:
        """True if the parameter is read as it is kept, and its gradient goes through autograd at once."""
        return self.weight_copy is None and self.deferred is None and self.fused_grad is None and not self.fp8


class ComputesInHalf(nn.Module):
    """A module with a ComputeState, which reads copies of its parameters where there are any."""

    constant_sides: Mapping[str, str]  # of ParameterShard.constant_side

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute = ComputeState()

    def cached_half_params(self, dtype: torch.dtype) -> dict[str, bool]:
        """Names of parameters whose copies are read; True if gradients pass through the copy. None here."""
        return {}

    def in_dtype(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a parameter in a dtype: its copy if there is one, but where a compiler fuses the cast."""
        parameter: Tensor = getattr(self, name)
        copy = None if torch.compiler.is_compiling() else getattr(self.compute, f"{name}_copy")
        return choose_copy(copy, parameter, dtype).to(dtype)


def choose_copy(copy: Tensor | None, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the copy if it is of that dtype, else the parameter: inputs may be of another dtype."""
    return parameter if copy is None or copy.dtype != dtype else copy


def is_cast_to_8_bits(layer: ComputesInHalf, name: str) -> bool:
    """True if an `Operand` of a cached parameter is held too, of 2 bytes an element."""
    return name == "weight" and layer.compute.fp8 and fits(*getattr(layer, name).shape)


class _CastWithGrad(torch.autograd.Function):
    """The copy in place of its parameter, whose gradient it casts as `to` would."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class CachedHalfParams:
    """The parameters of modules that compute in half precision, cast, for as long as they do not change.

    Its copies take 2 bytes a parameter from the first use on.
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
        """True if CUDA graphs read the copies where they are, which takes a mark."""

    def exclude(self, layers: Iterable[nn.Module]) -> None:
        """Make no copies that only what is not compiled reads (`in_dtype`). Call before `cast_for_step`."""
        compiled = {module for layer in layers for module in layer.modules()}
        self.reads = [read for read in self.reads if not (read[2] and read[0] in compiled)]

    def cast_for_step(self, *, trains: bool) -> None:
        """Cast the parameters now; layers read the copies until the matching `release`.

        Gradients pass through them if it `trains`: by one node a step, which each backward pass goes through.
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
                read = _CastWithGrad.apply(p, copy) if passes_grad and trains else copy  # type: ignore[no-untyped-call]
                setattr(layer.compute, f"{name}_copy", read)
                if is_cast_to_8_bits(layer, name):
                    layer.compute.weight_8 = cast(copy, NARROW)

    def release(self) -> None:
        """Drop the copies: parameters may change from here on."""
        self.depth -= 1
        if self.depth == 0:
            for layer, name, _ in self.reads:
                setattr(layer.compute, f"{name}_copy", None)
                layer.compute.weight_8 = None

    @contextmanager
    def held(self, *, trains: bool) -> Iterator[None]:
        """`cast_for_step` until the end of the block."""
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
    chosen: list[Callable[..., R]] = [function]
    _uncompiled.append(chosen)  # type: ignore[arg-type]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return chosen[0](*args, **kwargs)

    return call


def prepare_to_compile() -> None:
    """Keep torch.compile from the functions above. Call before compiling anything."""
    while _uncompiled:
        chosen = _uncompiled.pop()
        chosen[0] = torch.compiler.disable(chosen[0])
