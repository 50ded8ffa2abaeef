"""Comparison of two checkpoints of any format: every parameter, and outputs computed a layer at a time."""

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

from mlm.checkpoint.native.compare import row_blocks
from mlm.checkpoint.native.slices import Read, Region
from mlm.convert.source import Source
from mlm.models.backbone import Transformer
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.models.shape import is_tied
from mlm.models.stage import PipelineStage
from mlm.parallel.mesh import Axis
from mlm.util.errors import CheckFailedError
from mlm.util.terminal import progress_bar

TOKENS = 64


def compare(source: Source, target: Source, dtype: torch.dtype) -> str:
    """Compare every parameter bit for bit, and the outputs of 64 tokens; return a line on what was compared.

    `dtype` is the target's. Raises CheckFailedError for a difference.
    """
    wanted = {name: one for name, one in source.parameters.items() if name not in source.filled}
    reads: list[tuple[str, Read, Read]] = [("", source.read, target.read)]
    reads += [(f"{name} of ", source.moments[name], read) for name, read in target.moments.items()]
    size = len(reads) * sum(one.num_bytes for one in wanted.values())
    with progress_bar("comparing", size, in_bytes=True) as advance:
        for (kind, read, read_again), (name, one) in product(reads, wanted.items()):
            for region in _blocks(name, one.shape):
                if not torch.equal(read(name, region).to(dtype), read_again(name, region).to(dtype)):
                    raise CheckFailedError(f"{kind}{name} differs from {source.path} after the conversion")
                advance(region.volume * 4)
    names = f"{len(wanted)} parameters are equal bit for bit" + ", their moments too" * bool(target.moments)
    if source.filled:
        return f"compared: {names}"

    def rounded(name: str, region: Region) -> Tensor:
        return source.read(name, region).to(dtype).float()

    before, after = outputs(source.model, rounded), outputs(target.model, target.read)
    if before.shape != after.shape or not torch.equal(before, after):
        raise CheckFailedError(
            f"the outputs of {TOKENS} tokens differ by up to {(before - after).abs().max().item():.3g} after "
            "the conversion, with equal parameters: settings of the model were lost"
        )
    what = "logits" if family_of(source.model.kind).causal else "hidden states"
    return f"compared: {names}, and so are the {what} of {len(before)} tokens"


def _blocks(name: str, shape: tuple[int, ...]) -> list[Region]:
    """Return regions that tile a tensor: of a table, whose rows are read as they lie, rows."""
    return [Region.whole(shape)] if name.startswith("layers.") else list(row_blocks(shape, 4))


@torch.no_grad()
def outputs(model: ModelConfig, read: Read) -> Tensor:
    """Return the logits [tokens, V] of random tokens; of a model that reads both ways, the hidden states.

    One part of the model is in memory at a time: rows of embeddings, a layer, a block of the output layer.
    """
    model = replace(model, vocab_multiple=1, hidden_dropout=0.0, attention_dropout=0.0)
    count = min(TOKENS, model.max_positions)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab_size, (count,), generator=generator)

    def read_rows(name: str, region: Region) -> Tensor:
        if name != "token.weight":
            return read(name, region)
        return torch.cat([read(name, Region((row, 0), (1, model.hidden_size))) for row in tokens.tolist()])

    few = replace(model, vocab_size=count)  # a table of these tokens alone
    x = _stage(few, PipelineStage(range(0), True, False), read_rows).embed(torch.arange(count)[None], None)
    for layer in range(model.num_layers):
        stage = _stage(model, PipelineStage(range(layer, layer + 1), False, False), read)
        x = stage.run_layers(x, None, None)
        del stage  # before the next is read
    last = _stage(model, PipelineStage(range(0), False, True), read, only="final_norm")
    x = last.run_layers(x, None, None).squeeze(1)
    if model.head != "language_model" or not family_of(model.kind).causal:
        return x
    table = "token.weight" if is_tied(model) else "output.weight"
    parts = [x @ read(table, region).t() for region in _blocks(table, (model.vocab_size, model.hidden_size))]
    return torch.cat(parts, 1)


def _stage(model: ModelConfig, stage: PipelineStage, read: Read, only: str = "") -> Transformer:
    """Return a stage with its parameters, or those whose names begin with `only`; the rest stay on meta."""
    with torch.device("meta"):
        built = family_of(model.kind).model(model, tp=Axis("tp"), stage=stage)
    for name, parameter in list(built.named_parameters()):
        if name.startswith(only):
            owner, _, last = name.rpartition(".")
            shape = tuple(parameter.shape)
            value = nn.Parameter(read(name, Region.whole(shape)), requires_grad=False)
            setattr(built.get_submodule(owner), last, value)
    return built.eval()
