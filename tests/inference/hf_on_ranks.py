"""Rank functions of tests with models of `transformers`, which they do not import: that takes seconds."""

from pathlib import Path

import torch
from torch import Tensor

from mlm.convert.huggingface.mapping import Outputs, ProbeSamples
from mlm.convert.source import open_source
from mlm.inference.trained import load_trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.verify.huggingface import inputs_of, our_outputs


def outputs_on_rank(ctx: ParallelContext, folder: Path) -> Outputs:
    return our_outputs(folder, ctx)


@torch.no_grad()
def states_of_layers(ctx: ParallelContext, folder: Path, tokens: Tensor, mask: Tensor) -> Tensor:
    """[L, R, H]: hidden states of tokens that are no padding, behind each layer."""
    model = load_trained(
        open_source(str(folder)), ParallelConfig(tp=ctx.tp.size), PrecisionConfig(), ctx
    ).model.chunks[0]
    found: list[Tensor] = []
    for layer in model.layers.values():
        layer.register_forward_hook(lambda layer, args, y: found.append(y.transpose(0, 1)[mask.bool()]))
    model.encode(
        inputs_of(
            ProbeSamples(tokens, mask.sum(1), torch.zeros_like(tokens)), ctx.device, reads_both_ways=True
        )
    )
    return torch.stack(found)
