"""Tiny models of the families that mlm reads, of random weights, with what their folders hold beside them."""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from conversions.styles import write_tokenizer

SHAPE: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 96, "initializer_range": 0.2},
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "initializer_range": 0.2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 1e4}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
OLMOE = {"num_experts": 5, "num_experts_per_tok": 2, "num_key_value_heads": 4}
LATENT = {"kv_lora_rank": 9, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 5}
LATENT |= {"num_key_value_heads": 4, "moe_intermediate_size": 12, "n_routed_experts": 8, "n_group": 4}
LATENT |= {"num_experts_per_tok": 3, "topk_group": 2, "q_lora_rank": 14, "first_k_dense_replace": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", {}),
    "GPT-2, exact GELU, 52 inner": ("GPT2LMHeadModel", {"activation_function": "gelu", "n_inner": 52}),
    "GPT-2, bfloat16": ("GPT2LMHeadModel", {"dtype": torch.bfloat16}),
    "BERT": ("BertForPreTraining", {}),
    "BERT, tanh GELU, a token type": ("BertForPreTraining", {"hidden_act": "gelu_new", "type_vocab_size": 1}),
    "Megatron-BERT": ("MegatronBertForPreTraining", {}),
    "Llama": ("LlamaForCausalLM", {}),
    "Llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "Llama, one KV head of 16": ("LlamaForCausalLM", {"num_key_value_heads": 1, "head_dim": 16}),
    "Llama, GeGLU, 4 KV heads": ("LlamaForCausalLM", {"hidden_act": "gelu", "num_key_value_heads": 4}),
    "Llama, rotary llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "Llama, rotary linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "Llama, rotary yarn": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "Llama, yarn, other betas": ("LlamaForCausalLM", {"rope_parameters": {**YARN, "beta_fast": 4.0}}),
    "Llama, rotary dynamic": ("LlamaForCausalLM", {"rope_parameters": {**YARN, "rope_type": "dynamic"}}),
    "Llama, half of a head turned": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "Llama, biases": ("LlamaForCausalLM", {"attention_bias": True}),
    "Llama, bfloat16 in 6 files": ("LlamaForCausalLM", {"dtype": torch.bfloat16, "max_shard_size": 12_000}),
    "Mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "Mistral, window 24": ("MistralForCausalLM", {"sliding_window": 24}),
    "Qwen 2": ("Qwen2ForCausalLM", {}),
    "Qwen 2, tied, yarn": (
        "Qwen2ForCausalLM",
        {"tie_word_embeddings": True, "rope_parameters": {**YARN, "attention_factor": 1.3}},
    ),
    "Qwen 2, window in a layer": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "Qwen 3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "Qwen 3, tied, window 24": (
        "Qwen3ForCausalLM",
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 0,
        },
    ),
    "Mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "Mixtral, window 24": ("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": 24}),
    "Qwen 3 MoE": ("Qwen3MoeForCausalLM", {**QWEN_MOE, "norm_topk_prob": True}),
    "Qwen 3 MoE, sums not 1, a dense layer": ("Qwen3MoeForCausalLM", {**QWEN_MOE, "mlp_only_layers": [0]}),
    "OLMoE": ("OlmoeForCausalLM", OLMOE),
    "OLMoE, sums 1": ("OlmoeForCausalLM", {**OLMOE, "norm_topk_prob": True}),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", LATENT),
    "DeepSeek-V3, dense, yarn": (
        "DeepseekV3ForCausalLM",
        {**LATENT, "first_k_dense_replace": 2, "q_lora_rank": None}
        | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
}
"""Name -> class of `transformers` and settings."""
STYLE = {"GPT": "GPT-2", "Ber": "BERT", "Meg": "BERT", "Mis": "Llama 2", "Mix": "Llama 2", "Qwe": "Qwen 2"}
STYLE |= {"Dee": "DeepSeek-V3"}
"""First letters of a class -> its tokenizer; else Llama 3's."""


def write_model(folder: Path, kind: str, settings: dict[str, Any], style: str | None = None) -> None:
    """Write a model of random weights, biases and norms too, its tokenizer and generation_config.json.

    `style`: the tokenizer, in place of that of the class.
    """
    folder.mkdir()
    style = style or STYLE.get(kind[:3], "Llama 3")
    size = write_tokenizer(folder, style)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    config = getattr(transformers, f"{re.sub('For.*|LMHead.*', '', kind)}Config")(
        **{**(GPT2 if kind[:3] == "GPT" else SHAPE), **ids, "vocab_size": size + 3, **settings}
    )
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        buffers = (value for name, value in model.named_buffers() if name.endswith("correction_bias"))
        for value in (*model.parameters(), *buffers):
            value.add_(torch.randn_like(value) * 0.1)
    model.to(settings.get("dtype", torch.float32)).save_pretrained(
        folder, max_shard_size=settings.get("max_shard_size", "1GB")
    )
    declared = {"do_sample": False, "eos_token_id": ids["eos_token_id"], "bos_token_id": ids["bos_token_id"]}
    if kind[:3] in ("Qwe", "GPT"):
        declared["repetition_penalty"] = 1.2
    (folder / "generation_config.json").write_text(json.dumps(declared))
