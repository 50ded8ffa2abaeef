"""Weights in the dtype of compute, cast once for all micro-batches of a step.

Master weights are float32. Without this each product casts its weight, forward and backward, in every
micro-batch: 6 bytes of traffic a parameter each time, where reading the cast costs 2.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mlm.parallel.layers import Split


class Casts:
    """The weights of layers split over tp, in `dtype`, for as long as they do not change.

    Its copies take 2 bytes a parameter from the first use on.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self.layers = [m for m in modules if isinstance(m, Split) and m.weight.dtype != dtype]
        self.dtype = dtype
        self.copies: list[Tensor] = []
        self.depth = 0
        self.stay = False  # True: CUDA graphs read the copies where they are, which takes a mark

    @torch.no_grad()
    def hold(self) -> None:
        """Cast the weights now; layers read the copies until the matching `release`."""
        self.depth += 1
        if self.depth > 1:
            return
        if not self.copies:
            self.copies = [torch.empty_like(layer.weight, dtype=self.dtype) for layer in self.layers]
            for copy in self.copies if self.stay else ():
                torch._dynamo.mark_static_address(copy, guard=False)  # a guard would compile each layer
        if self.layers:
            torch._foreach_copy_(self.copies, [layer.weight.detach() for layer in self.layers])
        for layer, copy in zip(self.layers, self.copies, strict=True):
            layer.cast = copy

    def release(self) -> None:
        """Weights may change from here on."""
        self.depth -= 1
        if self.depth == 0:
            for layer in self.layers:
                layer.cast = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """`hold` until the end of the block."""
        self.hold()
        try:
            yield
        finally:
            self.release()
