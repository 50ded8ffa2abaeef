"""The Llama family against `transformers` from the same weights, at tp = 1, 2 and 4."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.models.cache import DecodePass, KeyValueCache, PrefillPass
from mlm.models.llama.model import Llama
from mlm.models.shape import architecture_of
from mlm.parallel.expert.router import routers
from mlm.parallel.gradients import sum_replicated_gradients
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import load_full, parameter_shards
from tests.models.llama.references import BATCH, CASES, SEQ, reference
from tests.ranks import run_on_ranks
from tests.slow import thinned


@pytest.mark.parametrize("tp", thinned([1, 2, 4], 3))
def test_llamas_match_transformers(tp: int) -> None:
    """Logits within 1e-5 absolute in float32, gradients within 1e-4 of their largest, of each of CASES.

    Two or one heads of keys and values are fewer than tp; widths are no powers of two.
    """
    run_on_ranks(check_all, {name: reference(name) for name in CASES}, tp=tp)


def check_all(ctx: ParallelContext, wanted: dict[str, dict[str, Any]]) -> None:
    for name, want in wanted.items():
        try:
            check_against_transformers(ctx, want)
            check_greedy(ctx, want)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def check_against_transformers(ctx: ParallelContext, want: dict[str, Any]) -> None:
    config = want["config"]
    model = Llama(config, tp=ctx.tp)
    load_full(model, want["weights"], ctx.tp)
    chosen: list[Tensor] = []
    for router in routers(model):
        router.register_forward_hook(lambda _, __, routing: chosen.append(routing.experts))
    assert (model.logits(want["tokens"]) - want["logits"]).abs().max() <= 1e-5
    for experts, theirs in zip(chosen, want["choices"], strict=True):  # [S, B, k] and [B S, k]
        assert torch.equal(experts.transpose(0, 1).flatten(0, 1).sort(-1).values, theirs)

    loss = model(want["tokens"], want["labels"], torch.tensor(1.0 / (BATCH * SEQ)))
    loss.backward()
    torch.testing.assert_close(loss.detach(), want["loss"], rtol=1e-6, atol=1e-6)
    shards = list(parameter_shards(model, ctx.tp))
    sum_replicated_gradients(shards, ctx.tp, sequence_parallel=False)
    expected = Llama(config, tp=ctx.tp)
    load_full(expected, want["grads"], ctx.tp)  # the gradients as this rank would hold them
    for mine, theirs in zip(shards, parameter_shards(expected, ctx.tp), strict=True):
        if not mine.is_trained:
            continue
        grad = mine.parameter.grad
        assert grad is not None, mine.name
        largest = want["grads"][mine.name].abs().max()
        assert (grad - theirs.parameter).abs().max() <= 1e-4 * largest, mine.name


def check_greedy(ctx: ParallelContext, want: dict[str, Any]) -> None:
    """The key-value cache gives transformers' tokens, and holds the heads of keys and values once."""
    config, written = want["config"], want["greedy"]
    model = Llama(config, tp=ctx.tp).eval()
    load_full(model, want["weights"], ctx.tp)
    cache, first = KeyValueCache(BATCH, config.max_positions), 6
    model.read(written[:, :first], PrefillPass(cache, range(BATCH)))
    column = first
    token = written[:, first : first + 1]
    while column < written.shape[1] - 1:
        step = DecodePass(cache, [column] * BATCH, dtype=torch.float32, device=ctx.device)
        token = model.read(token, step).argmax(-1, keepdim=True)
        column += 1
        assert torch.equal(token, written[:, column : column + 1]), f"token {column}"
    kv_heads = max(1, architecture_of(config).kv_heads // ctx.tp.size)
    keys, values = next(iter(cache._layers.values()))
    assert keys.shape[1] == (1 if keys is values else kv_heads)  # latents are of all heads
