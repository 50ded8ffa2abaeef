"""Small modules after the last layer, replicated over tp.

With sequence parallelism a tp rank computes them for its rows of the sequence, and their weight gradients are
summed over tp, as for all replicated parameters.

Shapes: S sequence, B micro-batch, H hidden, R rows (tokens), V padded vocabulary, t = tensor-parallel size.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mlm.models.config import ModelConfig
from mlm.models.norms import LayerNorm
from mlm.models.transformer import activate
from mlm.parallel.collectives import gather_rows
from mlm.parallel.compute_state import ComputesInHalf
from mlm.parallel.layers import split
from mlm.parallel.linear import linear
from mlm.parallel.mesh import Axis


class PlainLinear(ComputesInHalf):
    """y = x W^T + b, replicated over tp: [..., I] -> [..., O]."""

    def __init__(self, in_features: int, out_features: int, *, init_std: float, bias: bool = True) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def cached_half_params(self, dtype: torch.dtype) -> dict[str, bool]:
        """Weight and bias, whose gradients the product returns."""
        return {"weight": False, "bias": False}

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.compute)


class VocabularyBias(nn.Module):
    """A number per token of the vocabulary, split like the rows of the token table."""

    tp_dims: ClassVar[dict[str, int]] = {"bias": 0}

    def __init__(self, vocab_size: int, padded_vocab_size: int, *, tp: Axis) -> None:
        super().__init__()
        self.true_rows = vocab_size
        self.bias = nn.Parameter(torch.zeros(split(padded_vocab_size, "padded_vocab_size", tp)))  # [V/t]


class MaskedTokenHead(nn.Module):
    """BERT's output layer up to the projection onto the vocabulary: norm(gelu(W x + b)), and its bias.

    The projection is the token table (as in BERT's code): see `cross_entropy_and_hits`.
    """

    def __init__(self, config: ModelConfig, *, tp: Axis) -> None:
        super().__init__()
        h = config.hidden_size
        self.activation = config.activation
        self.transform = PlainLinear(h, h, init_std=config.init_std)
        self.norm = LayerNorm(h, eps=config.layer_norm_eps)
        self.vocabulary = VocabularyBias(config.vocab_size, config.padded_vocab_size(tp.parts), tp=tp)

    def forward(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        y: Tensor = self.norm(activate(self.transform(x), self.activation))
        return y


class GatherOutputs(torch.autograd.Function):
    """Gather outputs of each tp rank's rows, for a loss that every rank computes: [S/t, …] -> [S, …].

    Each rank keeps the gradient of its rows; `gather_sequence` would count it t times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp, ctx.rows = tp, x.shape[0]
        return gather_rows(x, tp)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy[ctx.tp.rank * ctx.rows : (ctx.tp.rank + 1) * ctx.rows], None
