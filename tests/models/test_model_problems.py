"""Settings that no model of a family has: each is one line that begins with its key and value."""

from dataclasses import replace
from typing import Any

import pytest

from mlm.models.config import ModelConfig
from mlm.models.family import model_problem
from tests.models.llama.test_parts import MODEL as LLAMA

GPT2 = ModelConfig(num_layers=2, hidden_size=24, num_heads=4)
BERT = replace(GPT2, kind="bert", token_types=2)
ROBERTA = replace(GPT2, kind="roberta", token_types=1, norm="post", activation="gelu", vocab_size=500)
MIXTURE = replace(LLAMA, options={"num_experts": 8, "experts_per_token": 3, "expert_ffn_size": 12})
LATENT = replace(LLAMA, options={"kv_lora_rank": 9, "head_dim": 10, "rope_head_dim": 4, "v_head_dim": 7})
SWIGLU = "options.swiglu_limit=7.0 is of SiLU, not model.activation=gelu"
SINKS = "options.attention_sinks=true does not go with model.attention_dropout=0.1"
KEYS: list[tuple[ModelConfig, dict[str, Any], str]] = [
    (GPT2, {"activation": "silu"}, "activation=silu is llama's, and model.kind=gpt2 has a GELU"),
    (BERT, {"activation": "silu"}, "activation=silu is llama's, and model.kind=bert has a GELU"),
    (BERT, {"activation": "relu2"}, "activation=relu2 is gpt2's, and model.kind=bert has a GELU"),
    (LLAMA, {"activation": "relu2"}, "activation=relu2 has no gate, and model.options.gated=true"),
    (replace(LLAMA, options={"swiglu_limit": 7.0}), {"activation": "gelu"}, SWIGLU),
    (replace(LLAMA, options={"attention_sinks": True}), {"attention_dropout": 0.1}, SINKS),
    (BERT, {"mup_base_width": 8}, "mup_base_width=8: muP is for gpt2 and llama, not bert"),
]
OPTIONS: list[tuple[ModelConfig, dict[str, Any], str]] = [
    (ROBERTA, {"position_offset": 2.5}, "position_offset=2.5 must be a whole number"),
    (ROBERTA, {"position_offset": 512}, "position_offset=512 is one after the id of padding, and model"),
    (ROBERTA, {"pooler_activation": "elu"}, "pooler_activation=elu is not supported; use tanh or relu"),
    (LLAMA, {"num_kv_heads": 3}, "num_kv_heads=3 does not divide model.num_heads=4"),
    (LLAMA, {"num_kv_heads": 2.5}, "num_kv_heads=2.5 must be a whole number"),
    (LLAMA, {"head_dim": 5}, "head_dim=5 is turned in pairs"),
    (LLAMA, {"rope_scaling": "ntk"}, "rope_scaling=ntk is not supported"),
    (LLAMA, {"rope_theta": "big"}, "rope_theta=big must be a number"),
    (LLAMA, {"rope_theta": 0.5}, "rope_theta=0.5 must be greater than 1"),
    (LLAMA, {"rope_factor": 0.5}, "rope_factor=0.5 must be 1 or more"),
    (LLAMA, {"rotary_fraction": 1.5}, "rotary_fraction=1.5 must be above 0"),
    (LLAMA, {"rope_scaling": "llama3", "rope_high_freq_factor": 0.5}, "rope_high_freq_factor=0.5 must be gr"),
    (LLAMA, {"rope_scaling": "yarn", "rope_beta_fast": 0.5}, "rope_beta_fast=0.5 must be at least"),
    (LLAMA, {"window": -1}, "window=-1 must be from 0"),
    (LLAMA, {"qk_norm": 1}, "qk_norm=1 must be true or false"),
    (LLAMA, {"model_type": "heliun"}, "model_type=heliun is not supported; use helium"),
    (LLAMA, {"model_type": "bigbird"}, "model_type=bigbird is not supported; see the reference"),
    (LLAMA, {"windows": 4}, "windows: model.kind=llama has the settings: "),
    (LLAMA, {"norm_bias": True}, "norm_bias=true is of LayerNorm"),
    (LLAMA, {"parallel": True, "output_norms": True}, "parallel=true has one norm, of the input"),
    (LLAMA, {"residual_multiplier": 0.0}, "residual_multiplier=0.0 must be above 0"),
    (LATENT, {"rope_head_dim": 3}, "rope_head_dim=3 does not go with latent attention"),
    (LATENT, {"rope_head_dim": 10}, "rope_head_dim=10 does not go with latent attention"),
    (LATENT, {"v_head_dim": 11}, "v_head_dim=11 must be at most head_dim=10"),
    (LATENT, {"num_kv_heads": 2}, "num_kv_heads=2 does not go with latent attention"),
    (LATENT, {"qk_norm": True}, "qk_norm=true does not go with latent attention"),
    (LATENT, {"window": 3}, "window=3 does not go with latent attention"),
    (MIXTURE, {"experts_per_token": 9}, "experts_per_token=9 must be from 1 to model.options.num_experts=8"),
    (MIXTURE, {"router_groups": 3}, "router_groups=3 does not divide model.options.num_experts=8"),
    (MIXTURE, {"router_groups": 4}, "experts_per_token=3 must be from 1 to the 2 experts of"),
    (
        MIXTURE,
        {"router_top_groups": 2},
        "router_top_groups=2 must be from 1 to model.options.router_groups",
    ),
    (MIXTURE, {"dense_layers": 2}, "dense_layers=2 leaves no layer of model.num_layers=2 to experts"),
    (MIXTURE, {"gated": False}, "gated=false does not go with experts"),
    (MIXTURE, {"shared_gate": True}, "shared_gate=true is of shared experts"),
    (MIXTURE, {"router_group_best": 0}, "router_group_best=0 must be 1 or more"),
    (MIXTURE, {"router_scores": "tanh"}, "router_scores=tanh is not supported"),
    (MIXTURE, {"balance": "batch"}, "balance=batch is not supported"),
]
CASES = [
    *((replace(model, **changes), f"model.{problem}") for model, changes, problem in KEYS),
    *(
        (replace(model, options=model.options | changes), f"model.options.{problem}")
        for model, changes, problem in OPTIONS
    ),
]


@pytest.mark.parametrize(("model", "problem"), CASES, ids=[problem.split()[0] for _, problem in CASES])
def test_a_wrong_setting_is_named(model: ModelConfig, problem: str) -> None:
    found = model_problem(model)
    assert str(found).startswith(problem)
