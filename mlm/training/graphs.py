"""All layers of a model as two CUDA graphs, one forward and one backward, in place of one for each layer.

PyTorch captures them (torch.cuda.make_graphed_callables) at the first pass that needs gradients. A replay
copies the hidden states and the keys of dropout masks into the graphs' inputs; weights, their half-precision
copies and gradient sums do not move. The next replay overwrites the outputs, so a micro-batch's backward pass
must end before the next forward pass.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from mlm.models.backbone import Transformer
from mlm.models.documents import Spans
from mlm.parallel.dropout import DropoutStream

RunLayers = Callable[..., Tensor]
"""`Transformer.run_layers`."""


class _Layers(nn.Module):
    """The layers of a model as a function of tensors, with their parameters."""

    def __init__(self, chunk: Transformer, run: RunLayers, stream: DropoutStream | None) -> None:
        super().__init__()
        self.layers, self.final_norm = chunk.layers, getattr(chunk, "final_norm", None)
        self.run, self.stream = run, stream

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        stream = None if self.stream is None or keys is None else replace(self.stream, keys=keys)
        return self.run(x, stream, None)


class ReplayedLayers:
    """`run_layers` of a model, captured at its next training pass and replayed for passes of the same inputs.

    The numbers may differ. Passes without gradients, of other shapes, with documents or positions run
    eagerly.
    """

    def __init__(self, chunk: Transformer) -> None:
        self.chunk, self.run = chunk, chunk.run_layers
        self.replay: Callable[..., Tensor] | None = None
        self.captured: list[object] = []
        """Shape, dtype and requires_grad of each input."""
        self.is_paused = False

    def __call__(
        self,
        x: Tensor,
        stream: DropoutStream | None,
        spans: Spans | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        is_plain = torch.is_grad_enabled() and spans is None and positions is None
        if self.is_paused or not is_plain:
            return self.run(x, stream, spans, positions)
        inputs = (x,) if stream is None else (x, stream.keys)
        signature: list[object] = [(t.shape, t.dtype, t.requires_grad) for t in inputs]
        if self.replay is None:
            self.captured = signature
            examples = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)
            layers = _Layers(self.chunk, self.run, stream)
            self.replay = cast(RunLayers, torch.cuda.make_graphed_callables(layers, examples))
        return self.replay(*inputs) if signature == self.captured else self.run(x, stream, None)


@contextmanager
def eager_layers(chunks: Iterable[Transformer]) -> Iterator[None]:
    """Run the layers eagerly inside the block, so that hooks are called."""
    replayed = [chunk.run_layers for chunk in chunks if isinstance(chunk.run_layers, ReplayedLayers)]
    for layers in replayed:
        layers.is_paused = True
    try:
        yield
    finally:
        for layers in replayed:
            layers.is_paused = False
