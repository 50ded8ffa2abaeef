"""Tiny Llamas, Mistrals, Qwens and mixtures of experts of `transformers`, and our settings of them."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from mlm.convert.huggingface.llama import MAPPING
from mlm.models.config import ModelConfig

VOCAB, SEQ, BATCH = 97, 21, 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 48,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12, "rope_theta": 100.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied, one kv head, geglu": (
        "Llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "llama of as many kv heads": ("Llama", {"num_key_value_heads": 4, "head_dim": None, "hidden_size": 40}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}}),
    "yarn": ("Qwen2", {"rope_parameters": YARN, "head_dim": None, "hidden_size": 40}),
    "yarn with an attention factor": (
        "Llama",
        {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 4, "truncate": False}},
    ),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"head_dim": None, "hidden_size": 40, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3 with a window": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "num_key_value_heads": 1},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 1}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
            **{"norm_topk_prob": True, "mlp_only_layers": [0]},
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": None,
            "hidden_size": 40,
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
            **{"moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1},
            **{"q_lora_rank": 14, "kv_lora_rank": 9, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8},
            **{"v_head_dim": 5, "num_key_value_heads": 4, "head_dim": None, "rms_norm_eps": 1e-6},
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3 without experts": (
        "DeepseekV3",
        {
            **{"first_k_dense_replace": 2, "q_lora_rank": None, "kv_lora_rank": 9, "qk_rope_head_dim": 6},
            **{"qk_nope_head_dim": 8, "v_head_dim": 14, "num_key_value_heads": 4, "head_dim": None},
        },
    ),
}
"""Name -> class of `transformers` and settings besides SHAPE."""


def their_model(name: str) -> Any:
    """A model of random weights, biases and norms too."""
    kind, settings = CASES[name]
    torch.manual_seed(0)
    given = {
        key: value
        for key, value in (SHAPE | settings).items()
        if value is not None or key[-9:] == "_token_id" or key == "q_lora_rank"
    }
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**given)
    ).eval()
    with torch.no_grad():
        for p in (
            *model.parameters(),
            *(b for n, b in model.named_buffers() if n.endswith("correction_bias")),
        ):
            p.add_(torch.randn_like(p) * 0.1)
    return model


def on_disk(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a model, or their gradients, as `save_pretrained` names them: each expert for itself."""
    stored: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return stored


def choices(model: Any, tokens: Tensor) -> list[Tensor]:
    """The experts of each token in each layer that has some, sorted: [B S, k]."""
    found = []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [each.register_forward_hook(lambda _, __, out: found.append(out[2])) for each in routers]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return [each.sort(-1).values for each in found]


def our_config(model: Any) -> ModelConfig:
    """Our settings of a model of `transformers`."""
    return MAPPING.read(model.config.to_dict(), "config.json")[0]


@cache
def reference(name: str) -> dict[str, Any]:
    """A model's weights and gradients under our names, tokens, logits, loss and greedy continuation."""
    model = their_model(name)
    config = our_config(model)
    tokens, labels = torch.randint(0, VOCAB, (2, BATCH, SEQ))
    logits = model(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    grads |= {
        name: torch.zeros_like(state) for name, state in model.state_dict().items() if name not in grads
    }
    prompt = tokens[:, :7]
    mask = torch.ones_like(prompt)  # it takes a 0 for padding otherwise
    written = model.generate(prompt, attention_mask=mask, max_new_tokens=14, do_sample=False, pad_token_id=0)
    return {
        "config": config,
        "weights": MAPPING.to_ours(on_disk(model, model.state_dict()), config),
        "grads": MAPPING.to_ours(on_disk(model, grads), config),
        "choices": choices(model, tokens),
        "tokens": tokens,
        "labels": labels,
        "logits": logits.detach(),
        "loss": loss.detach(),
        "greedy": written,
    }
