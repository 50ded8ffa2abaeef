"""Weight gradients that join the sum over micro-batches inside their own product.

A product that writes a gradient and a pass that adds it to the sum move 16 bytes a weight and micro-batch and
hold a second matrix; a product that adds moves 8. The first micro-batch has no sum to join where gradients
begin as None.
"""

from collections.abc import Iterable

from torch import nn

from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear


class Totals:
    """The linear layers of a model chunk, and the sums that their weight gradients join."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = [m for m in modules if isinstance(m, ColumnParallelLinear | RowParallelLinear)]

    def join(self) -> None:
        """Let the next forward pass's gradients join the sums that exist."""
        for layer in self.layers:
            layer.total = layer.weight.grad

    def leave(self) -> None:
        """Let them go through autograd, and hold no sum."""
        for layer in self.layers:
            layer.total = None
