"""State that a module computes with besides its parameters; parameters cast once a step.

Master weights are float32. Without this each product casts its weight, forward and backward, in every
micro-batch: 6 bytes of traffic a parameter each time, where reading the cast costs 2. A bias or a norm's
weight is little traffic, but a kernel of its own at each use.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class DeferredWeightGrads:
    """Weight-gradient products that a zero-bubble schedule defers (arXiv:2401.10241, section 2).

    While `open`, backward passes queue theirs here; `take` returns those of one backward pass.
    """

    def __init__(self) -> None:
        self.open = False
        self._jobs: list[Callable[[], None]] = []

    def add(self, job: Callable[[], None]) -> None:
        """Defer a product."""
        self._jobs.append(job)

    def take(self) -> list[Callable[[], None]]:
        """The products deferred since the last call; running one adds its gradient to the weight's."""
        jobs, self._jobs = self._jobs, []
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
    fused_grad: Tensor | None = None
    """Sum that the weight's gradient joins inside its product (`FusedAccumulation`)."""
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
        return parameter.to(dtype) if copy is None or copy.dtype != dtype else copy


def copy_of_dtype(copy: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the copy if it is of that dtype: inputs of others are multiplied by the parameter itself."""
    return copy if copy is not None and copy.dtype == dtype else None


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
        self.layers: list[ComputesInHalf] = []
        self.reads: list[tuple[ComputesInHalf, str, bool]] = []
        for module in modules:
            if isinstance(module, ComputesInHalf):
                names = module.cached_half_params(dtype)
                wide = [n for n in names if getattr(module, n, None) is not None]
                wide = [n for n in wide if getattr(module, n).dtype != dtype]
                self.reads += [(module, n, names[n]) for n in wide]
                self.layers += [module] if wide else []
        self.dtype = dtype
        self.copies: list[Tensor] = []
        self.depth = 0
        self.stay = False  # True: CUDA graphs read the copies where they are, which takes a mark

    def leave_to_compiler(self, layers: Iterable[nn.Module]) -> None:
        """Make no copies that only what is not compiled reads (`in_dtype`). Call before the first `hold`."""
        compiled = {module for layer in layers for module in layer.modules()}
        self.reads = [read for read in self.reads if not (read[2] and read[0] in compiled)]

    def hold(self, *, trains: bool) -> None:
        """Cast the parameters now; layers read the copies until the matching `release`.

        Gradients pass through them if it `trains`.
        """
        self.depth += 1
        if self.depth > 1 or not self.reads:
            return
        parameters = [getattr(layer, name) for layer, name, _ in self.reads]
        if not self.copies:
            self.copies = [torch.empty_like(p, dtype=self.dtype, requires_grad=False) for p in parameters]
            for copy in self.copies if self.stay else ():
                torch._dynamo.mark_static_address(copy, guard=False)  # a guard would compile each layer
        torch._foreach_copy_(self.copies, [p.detach() for p in parameters])
        for (layer, name, passes), p, copy in zip(self.reads, parameters, self.copies, strict=True):
            setattr(layer.compute, f"{name}_copy", _passing(p, copy) if passes and trains else copy)

    def release(self) -> None:
        """Parameters may change from here on."""
        self.depth -= 1
        if self.depth == 0:
            for layer, name, _ in self.reads:
                setattr(layer.compute, f"{name}_copy", None)

    @contextmanager
    def held(self, *, trains: bool) -> Iterator[None]:
        """`hold` until the end of the block."""
        self.hold(trains=trains)
        try:
            yield
        finally:
            self.release()


@torch.enable_grad()
def _passing(parameter: Tensor, copy: Tensor) -> Tensor:
    """Return the copy with a gradient's way back: one node a step, which each backward pass goes through."""
    passing: Tensor = _CastWithGrad.apply(parameter, copy)  # type: ignore[no-untyped-call]
    return passing
