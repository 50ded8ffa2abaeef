"""Llama, Mistral, Qwen 2, Qwen 3 and mixtures of experts as `transformers` stores them.

Keys of config.json and their defaults: the documentation of LlamaConfig, MistralConfig, Qwen2Config and
Qwen3Config (https://huggingface.co/docs/transformers/model_doc/llama, …/mistral, …/qwen2, …/qwen3). What
mixtures of experts have beyond them: huggingface_moe.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mlm.convert.huggingface import mapping as hf
from mlm.convert.huggingface.gpt2 import hf_outputs, our_outputs
from mlm.convert.huggingface.llama_moe import (
    EXPERT_KEYS,
    expert_problem,
    mlp_locations,
    predictors,
)
from mlm.convert.huggingface.llama_rope import read_rope, write_rope
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import ModelConfig
from mlm.models.llama.settings import DEFAULTS, LlamaSettings, model_problem
from mlm.util.errors import ConfigError, UserError

PREFIX = "model."
NAMES = {
    **{"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"},
    **{"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe", "deepseek_v3": "DeepseekV3"},
}
"""model_type -> prefix of its classes."""
MOST_LAYERS = 10_000
NO_LOSS = "output_router_logits=true: a loss of balance is not kept; to train, choose model.options.balance"
QUANTISED = (
    "quantization_config: quantised weights, such as fp8 with block scales, are not supported; save them in "
    "bfloat16, without quantization_config"
)

_NO_BIASES = {"attention_bias": (False,), "mlp_bias": (False,)}
_NO_EXPERTS = {
    **{"num_experts": (None, 0, 1), "num_local_experts": (None, 0, 1)},
    "n_routed_experts": (None, 0),
}
_FIXED = hf.UNSUPPORTED | {
    "is_causal": (True,),
    "hidden_act": (*hf.SILU, *hf.EXACT_GELU, *hf.TANH_GELU),
    "logit_scale": (None, 1.0),
    "attention_multiplier": (None,),
}
_TYPES = hf.TYPES | {
    "rope_parameters": (dict, hf.NULL),
    "sliding_window": (int, hf.NULL),
    "use_sliding_window": (bool,),
    "max_window_layers": (int,),
    "mlp_only_layers": (list, hf.NULL),
    "norm_topk_prob": (bool,),
}
_NUMBERS = {
    "rms_norm_eps": hf.NumberKey("layer_norm_eps", 1e-6),
    "initializer_range": hf.NumberKey("init_std", 0.02, below=1e3),
    "attention_dropout": hf.NumberKey("attention_dropout", 0.0),
}


def _keys(
    ffn: int,
    kv_heads: int | None,
    positions: int,
    vocabulary: int,
    head_dim: int | None,
    *,
    experts: str | None = None,
) -> hf.ConfigKeys:
    """Keys of config.json with the defaults of one of the model types; `experts` names that of a mixture."""
    more = EXPERT_KEYS[experts] if experts else None
    return hf.ConfigKeys(
        activation="hidden_act",
        fixed={**_FIXED, **_NO_BIASES, **(more.fixed if more else _NO_EXPERTS)},
        sizes={
            "vocab_size": hf.SizeKey("vocab_size", vocabulary, 1 << 24),
            "hidden_size": hf.SizeKey("hidden_size", 4096, 1 << 20),
            "num_hidden_layers": hf.SizeKey("num_layers", 32, MOST_LAYERS),
            "num_attention_heads": hf.SizeKey("num_heads", 32, 1 << 20),
            "num_key_value_heads": hf.SizeKey("", kv_heads, 1 << 20),
            "intermediate_size": hf.SizeKey("ffn_hidden_size", ffn, 1 << 24),
            "max_position_embeddings": hf.SizeKey("max_positions", positions, 1 << 30),
            "head_dim": hf.SizeKey("", head_dim, 1 << 16),
            **({key: size._replace(ours="") for key, size in more.sizes.items()} if more else {}),
        },
        numbers={**_NUMBERS, **(more.numbers if more else {})},
        types=_TYPES,
    )


_KEYS = {
    "llama": _keys(11008, None, 2048, 32000, None),
    "mistral": _keys(14336, 8, 4096 * 32, 32000, None),
    "qwen2": _keys(22016, 32, 32768, 151936, None),
    "qwen3": _keys(22016, 32, 32768, 151936, 128),
    "mixtral": _keys(14336, 8, 4096 * 32, 32000, None, experts="mixtral"),
    "qwen3_moe": _keys(6144, 4, 32768, 151936, None, experts="qwen3_moe"),
    "olmoe": _keys(2048, None, 4096, 50304, None, experts="olmoe"),
    "deepseek_v3": _keys(18432, None, 4096, 129280, None, experts="deepseek_v3"),
}


def model_type(model: ModelConfig) -> str:
    """Return the model_type that computes a model. One without biases, norms of heads and window is llama."""
    settings = LlamaSettings.of(model)
    if settings.kv_lora_rank:
        return "deepseek_v3"
    if settings.num_experts:
        return "olmoe" if settings.qk_norm_whole else "qwen3_moe" if settings.qk_norm else "mixtral"
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
    kind = model_type(model)
    if kind in EXPERT_KEYS:
        again, _ = read_config(write_config(model, hf.TokenIds()), "config.json")
        return expert_problem(model, again, kind)
    if settings.qk_norm_whole:
        return "has model.options.qk_norm_whole without experts, as no model of transformers"
    return None


def locations(model: ModelConfig) -> Iterator[tuple[str, hf.Location]]:
    """Yield (our name, location) of every parameter, in the order of the model."""
    settings, kind = LlamaSettings.of(model), model_type(model)
    yield "token.weight", hf.Location(("embed_tokens.weight",))
    for layer in range(model.num_layers):
        ours, stored = f"layers.{layer}", f"layers.{layer}"
        yield f"{ours}.attention_norm.weight", hf.Location((f"{stored}.input_layernorm.weight",))
        if settings.kv_lora_rank:
            yield from _latent_locations(f"{ours}.attention", f"{stored}.self_attn", settings)
        else:
            yield from _query_locations(f"{ours}.attention", f"{stored}.self_attn", settings)
        yield f"{ours}.attention.out.weight", hf.Location((f"{stored}.self_attn.o_proj.weight",))
        yield f"{ours}.mlp_norm.weight", hf.Location((f"{stored}.post_attention_layernorm.weight",))
        yield from mlp_locations(ours, stored, layer, model, settings, kind)
    yield "final_norm.weight", hf.Location(("norm.weight",))
    if model.head == "language_model" and not settings.tied:
        yield "output.weight", hf.Location(("lm_head.weight",))


def _query_locations(ours: str, stored: str, settings: LlamaSettings) -> Iterator[tuple[str, hf.Location]]:
    """Yield (our name, location) of queries, keys and values, and of their norms."""
    for part in ("weight", "bias") if settings.qkv_bias else ("weight",):
        q, k, v = (f"{stored}.{name}_proj.{part}" for name in "qkv")
        yield f"{ours}.query.{part}", hf.Location((q,))
        yield f"{ours}.kv.{part}", hf.Location((k, v), num_heads=settings.num_kv_heads, parts=2)
    if settings.qk_norm:
        yield f"{ours}.query_norm.weight", hf.Location((f"{stored}.q_norm.weight",))
        yield f"{ours}.key_norm.weight", hf.Location((f"{stored}.k_norm.weight",))


def _latent_locations(ours: str, stored: str, settings: LlamaSettings) -> Iterator[tuple[str, hf.Location]]:
    """Yield (our name, location) of latent attention.

    Turned dimensions are stored in pairs, and after the others of a head; here in halves, and first.
    """
    turned, latent = settings.rope_head_dim, settings.kv_lora_rank
    halves = [*range(0, turned, 2), *range(1, turned, 2)]
    plain = settings.head_dim - turned
    order = (*(plain + place for place in halves), *range(plain))
    query = f"{stored}.q_proj.weight"
    if settings.q_lora_rank:
        yield f"{ours}.query_down.weight", hf.Location((f"{stored}.q_a_proj.weight",))
        yield f"{ours}.query_down_norm.weight", hf.Location((f"{stored}.q_a_layernorm.weight",))
        query = f"{stored}.q_b_proj.weight"
    yield f"{ours}.query.weight", hf.Location((query,), rows=order)
    order = (*range(latent), *(latent + place for place in halves))
    yield f"{ours}.kv_down.weight", hf.Location((f"{stored}.kv_a_proj_with_mqa.weight",), rows=order)
    yield f"{ours}.kv_down_norm.weight", hf.Location((f"{stored}.kv_a_layernorm.weight",))
    yield f"{ours}.kv.weight", hf.Location((f"{stored}.kv_b_proj.weight",))


def read_config(config: Mapping[str, hf.JSON], path: str) -> tuple[ModelConfig, list[str]]:
    """Return our settings for one of the configurations, and notes. Raises ConfigError."""
    kind = str(config["model_type"])
    experts = EXPERT_KEYS.get(kind)
    if kind == "deepseek_v3":
        config = {"q_lora_rank": 1536, **config}  # null is none
    elif kind == "qwen3_moe" and "num_local_experts" in config:  # its name since transformers 5
        config = {"num_experts": config["num_local_experts"], **config}
    if isinstance(config.get("quantization_config"), dict):
        raise ConfigError([f"{path}: {QUANTISED}"])
    values = _KEYS[kind].read(config, path, NAMES[kind])
    theta = 1e6 if kind == "mixtral" else 1e4
    latent = kind == "deepseek_v3"
    options, problems = read_rope(
        config, path, values["max_position_embeddings"], theta, scales_scores=latent
    )
    window, more = _window(config, values["num_hidden_layers"], kind, path)
    if problems or more:
        raise ConfigError([*problems, *more])
    heads, width = values["num_attention_heads"], values["hidden_size"] // values["num_attention_heads"]
    options |= {
        "num_kv_heads": values["num_key_value_heads"] or heads,
        "head_dim": values["head_dim"] or width,
        "qk_norm": kind in ("qwen3", "qwen3_moe", "olmoe"),
        "qkv_bias": kind == "qwen2",
        "tied": config.get("tie_word_embeddings", False) is True,
        "window": window,
    }
    notes = []
    if experts:
        found, more = experts.read(config, values, path)
        if more:
            raise ConfigError(more)
        options |= found
        if config.get("output_router_logits", False):
            notes.append(NO_LOSS)
    usual = DEFAULTS | {"num_kv_heads": heads, "head_dim": width}
    model = ModelConfig(
        **_KEYS[kind].settings(values),
        kind="llama",
        hidden_dropout=0.0,
        options={name: value for name, value in options.items() if value != usual[name]},
    )
    if wrong_model := model_problem(model):
        raise ConfigError([f"{path}: {wrong_model}"])
    return model, notes


def _window(config: Mapping[str, hf.JSON], layers: int, kind: str, path: str) -> tuple[int, list[str]]:
    """Return the sliding window of all layers, 0 for none, and what is wrong with it."""
    is_qwen, has_none = kind.startswith("qwen"), kind in ("llama", "olmoe", "deepseek_v3")
    size = config.get("sliding_window", None if has_none or kind == "mixtral" else 4096)
    if is_qwen and not config.get("use_sliding_window", False):
        size = None
    if size is not None and (not 0 < size < 1 << 31 or has_none):
        name = NAMES[kind]
        return 0, [f"{path}: sliding_window={hf.show(size)} is not what our {name} computes; supported: null"]
    first = config.get("max_window_layers", 28) if is_qwen and kind != "qwen3_moe" else 0
    full = max(first, 0)
    sliding = 0 if size is None else max(layers - full, 0)
    usual = ["full_attention"] * (layers - sliding) + ["sliding_attention"] * sliding
    types = usual if config.get("layer_types") is None else config["layer_types"]
    if types not in (["full_attention"] * layers, ["sliding_attention"] * layers):
        listed = hf.show(types if types != usual else sorted(set(usual)))
        return 0, [f"{path}: layer_types={listed}: supported: one type of attention for all {layers} layers"]
    is_sliding = types[0] == "sliding_attention"
    if (is_sliding and size is None) or (types != usual and not is_qwen):
        return 0, [f"{path}: layer_types={types[0]} does not go with sliding_window={hf.show(size)}; fix one"]
    return size if is_sliding else 0, []


def write_config(model: ModelConfig, ids: hf.TokenIds) -> dict[str, hf.JSON]:
    """Return the config.json that the class of the model's head loads."""
    settings, kind = LlamaSettings.of(model), model_type(model)
    experts = EXPERT_KEYS.get(kind)
    windowed: dict[str, hf.JSON] = {}
    if kind in ("mistral", "mixtral"):
        windowed = {"sliding_window": settings.window or None}
    elif kind.startswith("qwen"):
        windowed = {"use_sliding_window": settings.window > 0, "sliding_window": settings.window or None}
        windowed["max_window_layers"] = 0 if settings.window else model.num_layers
    biases = {} if kind in ("mistral", "qwen2", "mixtral") else {"attention_bias": False}
    biases |= {"mlp_bias": False} if kind == "llama" else {}
    has_usual = settings.head_dim == model.hidden_size // model.num_heads
    leaves_head_dim = kind in ("olmoe", "deepseek_v3") or (kind == "qwen2" and has_usual)
    is_all_experts = kind in ("mixtral", "olmoe")
    return {
        **_KEYS[kind].write(model, architecture(model)),
        "model_type": kind,
        "num_key_value_heads": settings.num_kv_heads,
        **({} if leaves_head_dim else {"head_dim": settings.head_dim}),
        "intermediate_size": settings.expert_ffn_size if is_all_experts else model.ffn_size,
        **(experts.write(model, settings) if experts else {}),
        **write_rope(model, settings),
        **windowed,
        **biases,
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eod,
        "pad_token_id": ids.pad,
        "tie_word_embeddings": settings.tied,
    }


def content(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: str) -> hf.FolderContent:
    """Return the model that these tensors make: a language model, or its layers alone.

    Raises UserError for a head that is no output layer.
    """
    other = next((name for name in shapes if name.startswith(("score.", "qa_outputs."))), None)
    if other is not None:
        raise UserError(f"{path}: holds {other}, a head that is not supported. Save the model with lm_head")
    left_out, notes = predictors(model, shapes), tuple[hf.Note, ...]()
    if left_out:
        notes = (hf.Note(f"multi-token prediction is left out: {len(left_out)} tensors"),)
    if "lm_head.weight" in shapes or LlamaSettings.of(model).tied:
        return hf.FolderContent(model, left_out=left_out, notes=notes)
    note = hf.Note(
        "no lm_head.weight is there, nor tie_word_embeddings=true: the layers alone, without output"
    )
    return hf.FolderContent(replace(model, head="none"), left_out=left_out, notes=(*notes, note))


def special_tokens(tokenizer: Tokenizer, model: ModelConfig, ids: hf.TokenIds) -> dict[str, hf.JSON]:
    """Return the end and the beginning of a text, and the padding."""
    named = {"eos": tokenizer.eod_id, "bos": tokenizer.bos_id, "pad": ids.pad}
    return {f"{name}_token": tokenizer.decode([id]) for name, id in named.items() if id is not None}


MAPPING = hf.HuggingFaceMapping(
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
    hf_outputs=hf_outputs,
)
