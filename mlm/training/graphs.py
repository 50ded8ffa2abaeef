"""All layers of a model as two CUDA graphs, one forward and one backward, in place of one for each layer.

PyTorch captures them (torch.cuda.make_graphed_callables) at the first pass that needs gradients. A replay
copies the hidden states and the keys of dropout masks to where the graphs read them. Weights, their copies in
half precision and the sums of gradients stay where they are. What a replay returns is overwritten by the
next, so that a micro-batch's backward pass must end before another's forward pass.
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
    """`run_layers` of a model, from its next training pass on replayed where a pass is as the captured one.

    The numbers may differ. Other passes run as they would: without gradients, of another shape, with
    documents or positions.
    """

    def __init__(self, chunk: Transformer) -> None:
        self.chunk, self.run = chunk, chunk.run_layers
        self.replay: Callable[..., Tensor] | None = None
        self.captured: list[object] = []
        """Shape, dtype and need of a gradient of each input."""
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
        described: list[object] = [(each.shape, each.dtype, each.requires_grad) for each in inputs]
        if self.replay is None:
            self.captured = described
            examples = tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in inputs)
            layers = _Layers(self.chunk, self.run, stream)
            self.replay = cast(RunLayers, torch.cuda.make_graphed_callables(layers, examples))
        return self.replay(*inputs) if described == self.captured else self.run(x, stream, None)


@contextmanager
def layers_called(chunks: Iterable[Transformer]) -> Iterator[None]:
    """Call the layers inside the block, where hooks look at them."""
    replayed = [chunk.run_layers for chunk in chunks if isinstance(chunk.run_layers, ReplayedLayers)]
    for layers in replayed:
        layers.is_paused = True
    try:
        yield
    finally:
        for layers in replayed:
            layers.is_paused = False
