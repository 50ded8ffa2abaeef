"""A model family of your own: GPT-2 whose attention and MLP run side by side, with squared ReLU.

    y = x + drop(attention(norm_1(x)) + mlp(norm_2(x)))

Sources: arXiv:2204.06745, section 2.1 (GPT-NeoX); arXiv:2109.08668, section 4.2 (squared ReLU).

    PYTHONPATH=scripts/examples mlm pretrain --config-dir scripts/examples/configs model=own_family \\
        data=synthetic model.options.power=2 tp=2
"""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from mlm.models.cache import Reading
from mlm.models.config import ModelConfig
from mlm.models.documents import Spans
from mlm.models.family import option
from mlm.models.gpt2.family import FAMILY as GPT2_FAMILY
from mlm.models.gpt2.model import GPT2
from mlm.models.transformer import MLP, TransformerLayer
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.mesh import Axis


class PoweredMLP(MLP):
    """y = W2 relu(W1 x)^p, p = model.options.power: W1 split by column, W2 by row."""

    def __init__(self, config: ModelConfig, *, tp: Axis, sequence_parallel: bool = False) -> None:
        super().__init__(config, tp=tp, sequence_parallel=sequence_parallel)
        self.power = float(option(config, "power"))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).pow(self.power))


class ParallelLayer(TransformerLayer):
    """x + drop(attention(norm_1(x)) + mlp(norm_2(x)))."""

    mlp_type = PoweredMLP

    def forward(
        self,
        x: Tensor,
        stream: DropoutStream | None,
        spans: Spans | None = None,
        reading: Reading | None = None,
    ) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        attended = self.attention(self.attention_norm(x), stream, spans, reading)
        y = attended + self.mlp(self.mlp_norm(x))
        return x + (y if stream is None else stream.hidden(y, self.dropout, self.dropout_keys[0]))


class ParallelGPT2(GPT2):
    layer_type = ParallelLayer


FAMILY = replace(GPT2_FAMILY, model=ParallelGPT2, options={"power": 2.0}, converts_as=None)
