"""Rank functions of tests with models of `transformers`, which they do not import: that takes seconds."""

from pathlib import Path

from mlm.convert.source import open_source
from mlm.inference.config import Sampling
from mlm.inference.generation import generate
from mlm.inference.trained import load_trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext


def greedy(ctx: ParallelContext, folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The most probable next tokens of prompts, read from a model folder."""
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size)
    trained = load_trained(open_source(str(folder)), layout, PrecisionConfig(), ctx)
    options = Sampling(max_new_tokens=count, temperature=0.0)
    return generate(trained, prompts, options, ctx=ctx, eod_id=None)
