"""Llama, Mistral, Qwen 2 and Qwen 3 as `transformers` stores them.

Keys of config.json and their defaults: the documentation of LlamaConfig, MistralConfig, Qwen2Config and
Qwen3Config (https://huggingface.co/docs/transformers/model_doc/llama, …/mistral, …/qwen2, …/qwen3).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mlm.data.tokenizer import Tokenizer
from mlm.models.config import ModelConfig
from mlm.models.gpt2.huggingface import our_outputs, their_outputs
from mlm.models.huggingface import (
    EXACT_GELU,
    JSON,
    NULL,
    SILU,
    TANH_GELU,
    TYPES,
    UNSUPPORTED,
    ConfigKeys,
    FolderContent,
    HuggingFaceMapping,
    Location,
    Note,
    NumberKey,
    SizeKey,
    TokenIds,
    show,
)
from mlm.models.llama.huggingface_rope import read_rope, write_rope
from mlm.models.llama.settings import DEFAULTS, LlamaSettings, model_problem, num_blocks
from mlm.util.errors import ConfigError, UserError

PREFIX = "model."
NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""model_type -> prefix of its classes."""
MOST_LAYERS = 10_000

_NO_BIASES = {"attention_bias": (False,), "mlp_bias": (False,)}
_FIXED = UNSUPPORTED | {
    "is_causal": (True,),
    "hidden_act": (*SILU, *EXACT_GELU, *TANH_GELU),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "logit_scale": (None, 1.0),
    "attention_multiplier": (None,),
}
_TYPES = TYPES | {
    "rope_parameters": (dict, NULL),
    "sliding_window": (int, NULL),
    "use_sliding_window": (bool,),
    "max_window_layers": (int,),
}
_NUMBERS = {
    "rms_norm_eps": NumberKey("layer_norm_eps", 1e-6),
    "initializer_range": NumberKey("init_std", 0.02, below=1e3),
    "attention_dropout": NumberKey("attention_dropout", 0.0),
}


def _keys(
    ffn: int, kv_heads: int | None, positions: int, vocabulary: int, head_dim: int | None
) -> ConfigKeys:
    """Keys of config.json with the defaults of one of the model types."""
    return ConfigKeys(
        activation="hidden_act",
        fixed=_FIXED | _NO_BIASES,
        sizes={
            "vocab_size": SizeKey("vocab_size", vocabulary, 1 << 24),
            "hidden_size": SizeKey("hidden_size", 4096, 1 << 20),
            "num_hidden_layers": SizeKey("num_layers", 32, MOST_LAYERS),
            "num_attention_heads": SizeKey("num_heads", 32, 1 << 20),
            "num_key_value_heads": SizeKey("", kv_heads, 1 << 20),
            "intermediate_size": SizeKey("ffn_hidden_size", ffn, 1 << 24),
            "max_position_embeddings": SizeKey("max_positions", positions, 1 << 30),
            "head_dim": SizeKey("", head_dim, 1 << 16),
        },
        numbers=_NUMBERS,
        types=_TYPES,
    )


_KEYS = {
    "llama": _keys(11008, None, 2048, 32000, None),
    "mistral": _keys(14336, 8, 4096 * 32, 32000, None),
    "qwen2": _keys(22016, 32, 32768, 151936, None),
    "qwen3": _keys(22016, 32, 32768, 151936, 128),
}


def model_type(model: ModelConfig) -> str:
    """Return the model_type that computes a model. One without biases, norms of heads and window is llama."""
    settings = LlamaSettings.of(model)
    if settings.qk_norm:
        return "qwen3"
    if settings.qkv_bias:
        return "qwen2"
    return "mistral" if settings.window else "llama"


def architecture(model: ModelConfig) -> str:
    """Return the class that holds such a model with its head."""
    return NAMES[model_type(model)] + ("ForCausalLM" if model.head == "language_model" else "Model")


def problem(model: ModelConfig) -> str | None:
    """Return why `transformers` has no such model."""
    settings, known = LlamaSettings.of(model), f"supported: {', '.join(NAMES)}"
    if settings.qk_norm and settings.qkv_bias:
        return f"has both model.options.qk_norm and qkv_bias, as no model of transformers; {known}"
    if settings.rotary_fraction != 1:
        fraction = f"its model.options.rotary_fraction={settings.rotary_fraction:g}"
        return f"{fraction}, and theirs turn whole heads; {known}"
    if model.head not in ("language_model", "none"):
        return f"its head={model.head} has a bias, which theirs lack: only a language model is exported"
    return None


def locations(model: ModelConfig) -> Iterator[tuple[str, Location]]:
    """Yield (our name, location) of every parameter, in the order of the model."""
    settings, blocks = LlamaSettings.of(model), num_blocks(model)
    yield "token.weight", Location(("embed_tokens.weight",))
    for layer in range(model.num_layers):
        ours, stored = f"layers.{layer}", f"layers.{layer}"
        yield f"{ours}.attention_norm.weight", Location((f"{stored}.input_layernorm.weight",))
        for part in ("weight", "bias") if settings.qkv_bias else ("weight",):
            q, k, v = (f"{stored}.self_attn.{name}_proj.{part}" for name in "qkv")
            yield f"{ours}.attention.query.{part}", Location((q,))
            pair = Location((k, v), num_heads=settings.num_kv_heads, parts=2)
            yield f"{ours}.attention.kv.{part}", pair
        if settings.qk_norm:
            yield f"{ours}.attention.query_norm.weight", Location((f"{stored}.self_attn.q_norm.weight",))
            yield f"{ours}.attention.key_norm.weight", Location((f"{stored}.self_attn.k_norm.weight",))
        yield f"{ours}.attention.out.weight", Location((f"{stored}.self_attn.o_proj.weight",))
        yield f"{ours}.mlp_norm.weight", Location((f"{stored}.post_attention_layernorm.weight",))
        gate, up = (f"{stored}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        yield f"{ours}.mlp.up.weight", Location((gate, up), num_heads=blocks, parts=2)
        yield f"{ours}.mlp.down.weight", Location((f"{stored}.mlp.down_proj.weight",))
    yield "final_norm.weight", Location(("norm.weight",))
    if model.head == "language_model" and not settings.tied:
        yield "output.weight", Location(("lm_head.weight",))


def read_config(config: Mapping[str, JSON], path: str) -> tuple[ModelConfig, list[str]]:
    """Return our settings for one of the four configurations, and no notes. Raises ConfigError."""
    kind = str(config["model_type"])
    values = _KEYS[kind].read(config, path, NAMES[kind])
    options, problems = read_rope(config, path, values["max_position_embeddings"])
    window, more = _window(config, values["num_hidden_layers"], kind, path)
    if problems or more:
        raise ConfigError([*problems, *more])
    heads, width = values["num_attention_heads"], values["hidden_size"] // values["num_attention_heads"]
    options |= {
        "num_kv_heads": values["num_key_value_heads"] or heads,
        "head_dim": values["head_dim"] or width,
        "qk_norm": kind == "qwen3",
        "qkv_bias": kind == "qwen2",
        "tied": config.get("tie_word_embeddings", False) is True,
        "window": window,
    }
    usual = DEFAULTS | {"num_kv_heads": heads, "head_dim": width}
    model = ModelConfig(
        **_KEYS[kind].settings(values),
        kind="llama",
        hidden_dropout=0.0,
        options={name: value for name, value in options.items() if value != usual[name]},
    )
    if wrong_model := model_problem(model):
        raise ConfigError([f"{path}: {wrong_model}"])
    return model, []


def _window(config: Mapping[str, JSON], layers: int, kind: str, path: str) -> tuple[int, list[str]]:
    """Return the sliding window of all layers, 0 for none, and what is wrong with it."""
    is_qwen = kind.startswith("qwen")
    size = config.get("sliding_window", None if kind == "llama" else 4096)
    if is_qwen and not config.get("use_sliding_window", False):
        size = None
    if size is not None and (not 0 < size < 1 << 31 or kind == "llama"):
        name = NAMES[kind]
        return 0, [f"{path}: sliding_window={show(size)} is not what our {name} computes; supported: null"]
    full = max(config.get("max_window_layers", 28), 0) if is_qwen else 0  # the first ones
    sliding = 0 if size is None else max(layers - full, 0)
    usual = ["full_attention"] * (layers - sliding) + ["sliding_attention"] * sliding
    types = usual if config.get("layer_types") is None else config["layer_types"]
    if types not in (["full_attention"] * layers, ["sliding_attention"] * layers):
        listed = show(types if types != usual else sorted(set(usual)))
        return 0, [f"{path}: layer_types={listed}: supported: one type of attention for all {layers} layers"]
    is_sliding = types[0] == "sliding_attention"
    if (is_sliding and size is None) or (types != usual and not is_qwen):
        return 0, [f"{path}: layer_types={types[0]} does not go with sliding_window={show(size)}; fix one"]
    return size if is_sliding else 0, []


def write_config(model: ModelConfig, ids: TokenIds) -> dict[str, JSON]:
    """Return the config.json that the class of the model's head loads."""
    settings, kind = LlamaSettings.of(model), model_type(model)
    windowed: dict[str, JSON] = {}
    if kind == "mistral":
        windowed = {"sliding_window": settings.window}
    elif kind != "llama":
        windowed = {"use_sliding_window": settings.window > 0, "sliding_window": settings.window or None}
        windowed["max_window_layers"] = 0 if settings.window else model.num_layers
    biases = {"attention_bias": False} if kind in ("llama", "qwen3") else {}
    biases |= {"mlp_bias": False} if kind == "llama" else {}
    usual = model.hidden_size // model.num_heads
    return {
        **_KEYS[kind].write(model, architecture(model)),
        "model_type": kind,
        "num_key_value_heads": settings.num_kv_heads,
        **({} if kind == "qwen2" and settings.head_dim == usual else {"head_dim": settings.head_dim}),
        "intermediate_size": model.ffn_size,
        **write_rope(model, settings),
        **windowed,
        **biases,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eod,
        "pad_token_id": ids.pad,
        "tie_word_embeddings": settings.tied,
    }


def content(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: str) -> FolderContent:
    """Return the model that these tensors make: a language model, or its layers alone.

    Raises UserError for a head that is no output layer.
    """
    other = next((name for name in shapes if name.startswith(("score.", "qa_outputs."))), None)
    if other is not None:
        raise UserError(f"{path}: holds {other}, a head that is not supported. Save the model with lm_head")
    if "lm_head.weight" in shapes or LlamaSettings.of(model).tied:
        return FolderContent(model)
    note = Note("no lm_head.weight is there, nor tie_word_embeddings=true: the layers alone, without output")
    return FolderContent(replace(model, head="none"), notes=(note,))


def special_tokens(tokenizer: Tokenizer, model: ModelConfig, ids: TokenIds) -> dict[str, JSON]:
    """Return the end and the beginning of a text, and the padding."""
    named = {"eos": tokenizer.eod_id, "bos": tokenizer.bos_id, "pad": ids.pad}
    return {f"{name}_token": tokenizer.decode([id]) for name, id in named.items() if id is not None}


MAPPING = HuggingFaceMapping(
    model_types=tuple(NAMES),
    architecture=architecture,
    prefix=PREFIX,
    head_prefixes=("lm_head.",),
    plain=lambda name: name.removeprefix(PREFIX),
    tied={"lm_head.weight": "embed_tokens.weight"},
    ties=lambda model: LlamaSettings.of(model).tied,
    ignored=re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),  # stored by old versions
    read=read_config,
    content=content,
    write=write_config,
    locations=locations,
    problem=problem,
    special_tokens=special_tokens,
    our_outputs=our_outputs,
    their_outputs=their_outputs,
)
