"""Tokens/s of generation and of scoring, with random weights."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from bench.ranks import synchronise
from bench.shapes import Shape

from gpu.child import Case
from gpu.shapes import freed, gpt2, init_on_device
from gpu.waits import device_of
from mlm.data.config import DataConfig
from mlm.inference.generation import Sampling, generate
from mlm.inference.scoring import rolling_windows, score
from mlm.inference.trained import Trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.training.config import PretrainConfig
from mlm.training.pipelined import PipelinedModel

MODELS = ("124m", "1.2b")
PROMPT, NEW = 128, 128
BATCHES = (1, 16, 64)
SCORED = 64
"""Windows of max_positions tokens that are scored."""


def run(case: Case) -> None:
    """Both models."""
    for name in MODELS:
        with freed(case.device):
            shape = gpt2(name, quick=case.quick)
            trained, ctx = random_model(shape, device_of(case))
            generation(case, shape, trained, ctx)
            evaluation(case, shape, trained, ctx)
            del trained


def random_model(shape: Shape, device: torch.device) -> tuple[Trained, ParallelContext]:
    """A model in bf16 that no checkpoint was read for."""
    ctx, precision = ParallelContext(device=device), PrecisionConfig(dtype="bf16")
    model = PipelinedModel(shape.model(), ParallelConfig(), precision, ctx)
    for chunk in model.chunks:
        init_on_device(chunk)
    model.casts.hold(trains=False)  # as load_trained does
    config = PretrainConfig(
        name="random",
        out="",
        model=shape.model(),
        precision=precision,
        data=DataConfig(kind="synthetic", seq_length=shape.seq_length),
    )
    return Trained(model, config, cast(Any, SimpleNamespace()), Path("random")), ctx


def generation(case: Case, shape: Shape, trained: Trained, ctx: ParallelContext) -> None:
    """Greedy continuations, by prompts at a time; the pass that reads the prompts apart."""
    prompt, new = (8, 4) if case.quick else (PROMPT, NEW)
    for batch in (2,) if case.quick else BATCHES:
        prompts = torch.randint(shape.vocab_size, (batch, prompt)).tolist()

        def seconds(count: int, prompts: list[list[int]] = prompts) -> float:
            options = Sampling(max_new_tokens=count, temperature=0.0, batch_size=len(prompts))
            synchronise(ctx.device)
            begin = time.perf_counter()
            generate(trained, prompts, options, ctx=ctx, eod_id=None)
            synchronise(ctx.device)
            return time.perf_counter() - begin

        seconds(2)
        first, whole = seconds(1), seconds(new)
        each = (whole - first) / (new - 1)
        case.row(
            "generation",
            model=shape.name,
            prompts=batch,
            **{
                "prompt tokens": prompt,
                "new tokens": new,
                "first token ms": 1e3 * first,
                "ms a token": 1e3 * each,
                "tokens/s": batch / each,
            },
        )


def evaluation(case: Case, shape: Shape, trained: Trained, ctx: ParallelContext) -> None:
    """Scoring of one long text in windows, as perplexities are."""
    count = (4 if case.quick else SCORED) * shape.seq_length
    tokens = torch.randint(shape.vocab_size, (count,)).tolist()
    requests = list(rolling_windows(tokens, 0, shape.seq_length))
    for batch in (2,) if case.quick else (8, 32):
        score(trained, requests[:batch], batch_size=batch, ctx=ctx)
        synchronise(ctx.device)
        begin = time.perf_counter()
        score(trained, requests, batch_size=batch, ctx=ctx)
        synchronise(ctx.device)
        seconds = time.perf_counter() - begin
        case.row("scoring", model=shape.name, **{"micro-batch": batch, "tokens/s": count / seconds})
