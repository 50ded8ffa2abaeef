"""Weight gradients that join the sum over micro-batches inside their own product.

A product that writes a gradient and a pass that adds it to the sum move 16 bytes a weight and micro-batch and
hold a second matrix; a product that adds moves 8. The first micro-batch has no sum to join where gradients
begin as None.

The loss computes the gradient of its table in the forward pass. Kept until the backward pass, it is a matrix
for each micro-batch in flight; added to the sum at once, it is none.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


class FusedAccumulation:
    """The linear layers of a model chunk, and the sums that their weight gradients join."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers = [m for m in modules if isinstance(m, ColumnParallelLinear | RowParallelLinear)]

    def start(self) -> None:
        """Let the next forward pass's gradients join the sums that exist."""
        for layer in self.layers:
            layer.compute.fused_grad = layer.weight.grad

    def stop(self) -> None:
        """Let them go through autograd, and hold no sum."""
        for layer in self.layers:
            layer.compute.fused_grad = None


@contextmanager
def fuse_embedding_grad(tables: Iterable[VocabParallelEmbedding]) -> Iterator[None]:
    """In the block, let the loss add the gradients of these tables in its forward passes.

    For cleared gradients, and passes that are each followed by one backward pass from a seed of 1. A
    reduction may start in a chunk's last backward pass: all its forward passes are over then, and autograd
    calls the hooks of a weight for which a backward pass returns nothing.
    """
    tables = list(tables)
    for table in tables:
        table.fuses_grad = True
    try:
        yield
    finally:
        for table in tables:
            table.fuses_grad = False
