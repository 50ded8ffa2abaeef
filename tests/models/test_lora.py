"""Adapters against `peft`'s, and at every layout against one process."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DeepseekV3Config, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from mlm.convert.huggingface.families import mapping_of_kind
from mlm.models.config import LoraConfig
from mlm.models.family import family_of
from mlm.models.lora import adapted_on_meta, add_adapters, freeze_base
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import Axis, shape_context
from mlm.parallel.random import init_parameters
from mlm.parallel.sharding import load_full
from mlm.training.pipelined import PipelinedModel
from mlm.util.errors import ConfigError
from tests.models.peft_adapters import adapt, to_ours
from tests.models.tiny import tiny

STEPS = 5
"""Within 1e-6: norms of Llama are computed in float32 in `transformers`."""


def their_model(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "initializer_range": 0.1}
    if kind == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=32, **sizes, **dropout)
        return GPT2LMHeadModel(config).double()
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        **sizes,
    )
    return LlamaForCausalLM(config).double()


CASES = {
    "llama-qv": ("llama", {"targets": ("q_proj", "v_proj")}),
    "gpt2-all": ("gpt2", {"rslora": True}),
    "llama-dora": ("llama", {"dora": True}),
    "gpt2-dora": ("gpt2", {"dora": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_those_of_peft(case: str) -> None:
    kind, changes = CASES[case]
    lora = LoraConfig(rank=3, alpha=5.0, **changes)
    theirs = their_model(kind)
    mapping = mapping_of_kind(kind)
    model, _ = mapping.read(theirs.config.to_dict(), "theirs")
    ours = family_of(model.kind).model(model, dtype=torch.float64).double()
    load_full(ours, mapping.to_parameters(theirs.state_dict(), model), Axis("tp"))
    adapted, stored, mine, values = adapt(ours, theirs, model, lora)
    assert sum(p.numel() for p in mine.values()) == sum(p.numel() for p in values.values())

    def nothing(name: str) -> Tensor:
        return torch.zeros_like(dict(ours.named_parameters())[name])

    # without decay: it would draw our magnitudes to the norms of W, theirs to 0
    optimizers = [torch.optim.AdamW(each.values(), lr=1e-2, weight_decay=0.0) for each in (mine, values)]
    tokens = torch.randint(64, (STEPS, 2, 9))
    for batch in tokens:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = ours(batch[:, :-1], batch[:, 1:])
        their_loss = cross_entropy(adapted(batch[:, :-1]).logits.transpose(1, 2), batch[:, 1:])
        loss.backward()
        their_loss.backward()
        torch.testing.assert_close(loss, their_loss, rtol=0, atol=1e-6)
        for each in stored:
            grads = to_ours(each, lambda name: values[name].grad, nothing)
            for name, grad in grads:
                torch.testing.assert_close(mine[name].grad, grad, rtol=0, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    assert all(p.grad is None for p in ours.parameters() if not p.requires_grad)


def test_routers_beside_adapters_choose_as_those_of_transformers_in_bfloat16() -> None:
    """DeepSeek-V3 has its biases in float32 there, whatever the format: rounded they choose otherwise."""
    settings = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(hidden_size=16, num_hidden_layers=1, first_k_dense_replace=0, **settings)
    theirs = DeepseekV3TopkRouter(config).bfloat16()
    torch.manual_seed(0)
    bias = 1 + 0.001 * torch.randn(8)
    options = {"num_experts": 8, "expert_ffn_size": 8, "router_scores": "sigmoid", "balance": "bias"}
    model = tiny("llama", num_layers=1, num_heads=2, options=options)
    precision = PrecisionConfig(dtype="bf16")
    (ours,) = PipelinedModel(model, ParallelConfig(), precision, shape_context(), LoraConfig(rank=2)).chunks
    router = ours.layers["0"].mlp.router
    x = torch.randn(4, 50, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs.weight.normal_(0, 0.001)
        theirs.e_score_correction_bias = bias
        router.weight.copy_(theirs.weight)
        router.bias.copy_(bias)
        wanted, found = theirs(x)[2], router(x).experts
    assert torch.equal(found.flatten(0, 1).sort(-1).values, wanted.flatten(0, -2).sort(-1).values)


def test_of_a_mixture_all_but_routed_experts_have_adapters() -> None:
    options = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 16, "shared_experts": 1}
    model = tiny("llama", num_layers=1, num_heads=2, ffn_hidden_size=16, vocab_size=64, options=options)
    ours = family_of(model.kind).model(model)
    init_parameters(ours, 0)
    add_adapters(ours, LoraConfig(rank=2), {})
    init_parameters(ours, 0)
    freeze_base(ours, torch.float32)
    tokens = torch.randint(64, (2, 9))
    ours(tokens[:, :-1], tokens[:, 1:]).backward()
    trained = {name for name, p in ours.named_parameters() if p.grad is not None}
    layers = ("attention.query", "attention.kv", "attention.out", "mlp.shared.up", "mlp.shared.down")
    assert trained == {f"layers.0.{layer}.lora.{part}" for layer in layers for part in "ab"}


def test_a_target_that_names_no_layer_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no layer is named proj; use "):
        adapted_on_meta(tiny("llama"), LoraConfig(rank=2, targets=("up", "proj")), {})
