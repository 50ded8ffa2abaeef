"""Rank functions of tests with models of `transformers`, which they do not import: that takes seconds."""

from dataclasses import replace
from pathlib import Path

from mlm.convert.source import open_source
from mlm.inference.config import Sampling
from mlm.inference.generation import generate
from mlm.inference.trained import load_trained
from mlm.models.config import ModelConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.verify.parity import compare, judge
from tests.verify.parity_layouts import Layout


def greedy(ctx: ParallelContext, folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The most probable next tokens of prompts, read from a model folder."""
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size)
    trained = load_trained(open_source(str(folder)), layout, PrecisionConfig(), ctx)
    options = Sampling(max_new_tokens=count, temperature=0.0)
    return generate(trained, prompts, options, ctx=ctx)


def check_layout(ctx: ParallelContext, model: ModelConfig, layout: Layout) -> None:
    """Losses and gradients of two steps in float64 are those of one process, to 1e-10."""
    config = layout.config()
    model = replace(model, init_std=0.2)  # softcaps and other curves bend
    config = replace(config, model=model, parallel=replace(config.parallel, ep=layout.ep))
    report = compare(config, ctx)
    if report is None:
        return
    verdict = judge(report)
    assert verdict.equal, f"{layout}: {verdict.sentence}; {verdict.hint}"
    for each in report.differences:
        if each.kind in ("loss", "gradient"):
            error = each.difference if each.kind == "loss" else each.relative
            assert error <= 1e-10, f"{layout}: {each.kind} of {each.name} in step {each.step}: {error:.1e}"
