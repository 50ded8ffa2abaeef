"""Multi-head latent attention against `transformers`, and the cache of its latents."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlm.models.cache import DecodePass, KeyValueCache, PrefillPass
from mlm.models.config import ModelConfig
from mlm.models.llama.latent_attention import LatentAttention
from mlm.models.llama.model import Llama
from mlm.parallel.gradients import sum_replicated_gradients
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.random import init_parameters
from mlm.parallel.sharding import load_full, parameter_shards, shard_of
from tests.ranks import run_on_ranks

S, B, H, N = 12, 2, 20, 4
OPTIONS: dict[str, bool | int | float | str] = {
    **{"kv_lora_rank": 9, "q_lora_rank": 11, "head_dim": 10, "rope_head_dim": 4, "v_head_dim": 7},
    **{"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_positions": 6, "rope_theta": 100.0},
    **{"rope_mscale": 0.7, "rope_attention_factor": 1.2},
}
MODEL = ModelConfig(
    kind="llama",
    num_layers=2,
    hidden_size=H,
    num_heads=N,
    ffn_hidden_size=24,
    max_positions=24,
    vocab_size=31,
    vocab_multiple=8,
    activation="silu",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    options=OPTIONS,
)
PLAIN = replace(MODEL, options={name: OPTIONS[name] for name in list(OPTIONS)[:5] if name != "q_lora_rank"})
MODELS = {"yarn": MODEL, "without latent queries": PLAIN}


def their_attention(model: ModelConfig) -> Any:
    """A DeepseekV3Attention, its norms in float64 instead of float32."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    options = model.options
    rope: dict[str, Any] = {"rope_theta": 100.0, "rope_type": "default"}
    if "rope_mscale" in options:
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6}
        rope["mscale_all_dim"] = options["rope_mscale"]
    config = DeepseekV3Config(
        hidden_size=H,
        num_attention_heads=N,
        num_key_value_heads=N,
        kv_lora_rank=options["kv_lora_rank"],
        q_lora_rank=options.get("q_lora_rank"),
        qk_rope_head_dim=options["rope_head_dim"],
        qk_nope_head_dim=int(options["head_dim"]) - int(options["rope_head_dim"]),
        v_head_dim=options["v_head_dim"],
        rope_parameters=rope,
        attn_implementation="sdpa",
    )
    attention: Any = DeepseekV3Attention(config, layer_idx=0).double()
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        if getattr(attention, name) is not None:
            setattr(attention, name, nn.RMSNorm(getattr(attention, name).weight.shape, eps=1e-6).double())
    with torch.no_grad():
        for p in attention.parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (p.dim() == 1))
    return attention


def reference(name: str) -> dict[str, Any]:
    """Weights, input, output and their gradients; weights and gradients under our names."""
    model = MODELS[name]
    torch.manual_seed(0)
    theirs = their_attention(model)
    x = torch.randn(S, B, H, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(S, B, H, dtype=torch.float64)
    rotary = Llama(model, dtype=torch.float64).rotary(x, None)
    tables = (torch.cat([t, t], -1)[:, :, 0].transpose(0, 1) for t in (rotary.cos, rotary.sin))  # [1, S, R]
    y = theirs(x.transpose(0, 1), position_embeddings=tuple(tables), attention_mask=None)[0].transpose(0, 1)
    y.backward(dy)
    weights = {n: p.detach() for n, p in theirs.named_parameters()}
    grads = {n: p.grad for n, p in theirs.named_parameters()}
    return {
        "model": model,
        "weights": ours(weights, model),
        "grads": ours(grads, model),
        "x": x.detach(),
        "dy": dy,
        "y": y.detach(),
        "dx": x.grad,
    }


def ours(theirs: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Their parameters under our names: turned dimensions in halves rather than pairs, in queries first."""
    turned = int(model.options["rope_head_dim"])
    halves = torch.arange(turned).view(-1, 2).t().flatten()
    names = {
        **{"query_down.weight": "q_a_proj.weight", "query_down_norm.weight": "q_a_layernorm.weight"},
        **{"kv_down_norm.weight": "kv_a_layernorm.weight", "kv.weight": "kv_b_proj.weight"},
        "out.weight": "o_proj.weight",
    }
    found = {mine: theirs[other] for mine, other in names.items() if other in theirs}
    query = theirs["q_b_proj.weight" if "q_b_proj.weight" in theirs else "q_proj.weight"]
    plain, pairs = query.unflatten(0, (N, -1)).split([int(model.options["head_dim"]) - turned, turned], 1)
    latent, key = theirs["kv_a_proj_with_mqa.weight"].split([int(model.options["kv_lora_rank"]), turned])
    found["query.weight"] = torch.cat([pairs[:, halves], plain], 1).flatten(0, 1)
    return found | {"kv_down.weight": torch.cat([latent, key[halves]])}


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_latent_attention_is_that_of_transformers(tp: int, sequence_parallel: bool) -> None:
    """Outputs and all gradients in float64, at tp=2 with and without sequence parallelism."""
    wanted = [reference(name) for name in MODELS]
    run_on_ranks(check_attention, wanted, sequence_parallel, tp=tp)


def check_attention(ctx: ParallelContext, wanted: list[dict[str, Any]], sequence_parallel: bool) -> None:
    for want in wanted:
        attention = LatentAttention(want["model"], layer=0, tp=ctx.tp, sequence_parallel=sequence_parallel)
        load_full(attention.double(), want["weights"], ctx.tp)
        mine = (lambda x: shard_of(x, ctx.tp, 0)) if sequence_parallel else (lambda x: x)
        x = mine(want["x"]).clone().requires_grad_()
        rotary = Llama(want["model"], dtype=torch.float64).rotary(want["x"], None)
        y = attention(x, None, rotary=rotary)
        y.backward(mine(want["dy"]))
        shards = list(parameter_shards(attention, ctx.tp))
        sum_replicated_gradients(shards, ctx.tp, sequence_parallel=sequence_parallel)
        torch.testing.assert_close(y, mine(want["y"]), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(x.grad, mine(want["dx"]), rtol=1e-11, atol=1e-11)
        expected = LatentAttention(want["model"], layer=0, tp=ctx.tp).double()
        load_full(expected, want["grads"], ctx.tp)  # the gradients as this rank would hold them
        for shard, other in zip(shards, parameter_shards(expected, ctx.tp), strict=True):
            torch.testing.assert_close(shard.parameter.grad, other.parameter.data, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tp", [1, 2])
def test_latents_alone_are_cached_and_give_the_same_logits(tp: int) -> None:
    """Texts of two lengths, read at once, then token by token: the logits of a pass over all of a text."""
    run_on_ranks(check_cache, tp=tp)


def check_cache(ctx: ParallelContext) -> None:
    for config in MODELS.values():
        model = Llama(config, tp=ctx.tp, dtype=torch.float64).double()
        init_parameters(model, 1, ctx.tp)
        tokens = torch.randint(31, (B, S), generator=torch.Generator().manual_seed(0))
        want = model.logits(tokens)
        cache, first = KeyValueCache(B, config.max_positions), [5, 3]
        model.read(tokens[:, :5], PrefillPass(cache, range(B)))
        for column in range(S - 5):
            places = [column + begin for begin in first]
            step = DecodePass(cache, places, dtype=torch.float64, device=ctx.device)
            found = model.read(tokens[range(B), places].unsqueeze(1), step)
            torch.testing.assert_close(found, want[range(B), places], rtol=1e-11, atol=1e-11)
        for keys, values in cache._layers.values():
            assert keys is values
            assert keys.shape[1::2] == (1, 4 + 9)  # one head for all: R + C
