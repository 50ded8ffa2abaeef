"""GPT-2 against transformers' GPT2LMHeadModel from the same weights, at tp = 1, 2 and 4."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from mlm.convert.huggingface.gpt2 import MAPPING
from mlm.models.config import ModelConfig
from mlm.models.gpt2.model import GPT2
from mlm.parallel.cross_entropy import full_logits
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.random import init_parameters
from mlm.parallel.sharding import load_full, parameter_shards
from tests.ranks import run_on_ranks
from tests.slow import slow_but

VOCAB, SEQ, BATCH = 997, 24, 3
MODEL = ModelConfig(
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    max_positions=32,
    vocab_size=VOCAB,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
ONE = Axis("tp")


@cache
def reference(activation: str = "gelu_new") -> dict[str, Any]:
    """transformers' model of random weights (biases and norms too), its logits, loss and gradients."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=64,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        activation_function=activation,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    tokens, labels = torch.randint(0, VOCAB, (2, BATCH, SEQ))
    logits = model(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {
        "weights": MAPPING.to_ours(model.state_dict(), MODEL),
        "grads": MAPPING.to_ours(grads, MODEL),
        "tokens": tokens,
        "labels": labels,
        "logits": logits.detach(),
        "loss": loss.detach(),
    }


@pytest.mark.parametrize(
    ("tp", "recompute"), slow_but({2, 4}, [(1, "none"), (2, "none"), (4, "none"), (1, "full"), (2, "full")])
)
def test_gpt2_matches_transformers(tp: int, recompute: str) -> None:
    """Logits within 1e-5 absolute in float32; each gradient within 1e-4 of its own largest value."""
    run_on_ranks(check_against_transformers, reference(), recompute, tp=tp)


@pytest.mark.parametrize("tp", [1, 2])
def test_relu_squared_matches_transformers(tp: int) -> None:
    run_on_ranks(check_against_transformers, reference("relu2"), "none", "relu2", tp=tp)


def check_against_transformers(
    ctx: ParallelContext, want: dict[str, Any], recompute: str, activation: Any = "gelu_tanh"
) -> None:
    config = replace(MODEL, activation=activation)
    model = GPT2(config, tp=ctx.tp, recompute=recompute)
    load_full(model, want["weights"], ctx.tp)
    for length in (1, SEQ):
        last = full_logits(model.hidden_states(want["tokens"][:, :length])[-1], model.token)
        assert (last - want["logits"][:, length - 1]).abs().max() <= 1e-5

    loss = model(want["tokens"], want["labels"], torch.tensor(1.0 / (BATCH * SEQ)))
    loss.backward()
    torch.testing.assert_close(loss.detach(), want["loss"], rtol=1e-6, atol=1e-6)
    expected = GPT2(MODEL, tp=ctx.tp)
    load_full(expected, want["grads"], ctx.tp)  # the gradients as this rank would hold them
    for mine, theirs in zip(parameter_shards(model, ctx.tp), parameter_shards(expected, ctx.tp), strict=True):
        grad = mine.parameter.grad
        assert grad is not None, mine.name
        largest = want["grads"][mine.name].abs().max()
        assert (grad - theirs.parameter).abs().max() <= 1e-4 * largest, mine.name


@pytest.mark.parametrize("tp", [2, 4])
def test_initial_weights_are_slices_of_the_one_process_model(tp: int) -> None:
    """Every shard equals the same region of the unsplit model, bit for bit; padding rows are zero."""
    whole = initial(ONE)
    for rank in range(tp):
        axis = Axis("tp", rank, tp)
        model = GPT2(MODEL, tp=axis)
        init_parameters(model, 7, axis)
        for shard in parameter_shards(model, axis):
            part = shard.without_padding(shard.parameter)
            rectangle = tuple(slice(o, o + n) for o, n in zip(shard.offset, part.shape, strict=True))
            assert torch.equal(part, whole[shard.name][rectangle]), shard.name
        padding = model.token.weight[model.token.true_local_rows :]
        assert padding.numel() == 0 or padding.abs().max() == 0


def initial(axis: Axis) -> dict[str, Tensor]:
    model = GPT2(MODEL, tp=axis)
    init_parameters(model, 7, axis)
    return {s.name: s.without_padding(s.parameter.detach()) for s in parameter_shards(model, axis)}


def test_two_all_reduces_forward_and_two_backward_per_layer() -> None:
    """v1, section 3; the embedding adds one forward and the output layer's f one backward."""
    forward, backward, layers = run_on_ranks(count_all_reduces, tp=2)[0]
    assert forward == 2 * layers + 1
    assert backward == 2 * layers + 1


def count_all_reduces(ctx: ParallelContext) -> tuple[int, int, int]:
    tp = replace(ctx.tp, swaps=False)
    model = GPT2(MODEL, tp=tp)
    init_parameters(model, 1, tp)
    calls = 0
    original = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.all_reduce = counted
    try:
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        loss = model(tokens, tokens, torch.tensor(1.0))
        forward, calls = calls, 0
        loss.backward()
        return forward, calls, MODEL.num_layers
    finally:
        dist.all_reduce = original


def dropout_model() -> tuple[GPT2, Tensor, DropoutStream]:
    config = replace(MODEL, hidden_dropout=0.2, attention_dropout=0.2)
    model = GPT2(config, tp=ONE)
    init_parameters(model, 1, ONE)
    tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    return model, tokens, DropoutStream.of_micro_batch(1, 0, 2, torch.device("cpu"))


def gradients(model: GPT2, tokens: Tensor, dropout: DropoutStream | None) -> list[Tensor]:
    model.zero_grad()
    model(tokens, tokens, torch.tensor(1.0), dropout).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_recomputation_repeats_dropout_bit_for_bit() -> None:
    model, tokens, stream = dropout_model()
    kept = gradients(model, tokens, stream)
    model.recompute = "full"
    assert all(torch.equal(a, b) for a, b in zip(kept, gradients(model, tokens, stream), strict=True))
    assert not torch.equal(kept[0], gradients(model, tokens, None)[0])
