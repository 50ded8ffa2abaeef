"""The Llama family in `transformers`: Llama, Mistral, Qwen, OLMoE, DeepSeek-V3 (llama_variants.py).

mlm stores all experts in one tensor, most of these models each expert in its own.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

from mlm.config.tree import leaves
from mlm.convert.huggingface import mapping as hf
from mlm.convert.huggingface.gpt2 import hf_outputs, native_outputs
from mlm.convert.huggingface.llama_layers import read_layers, write_layers
from mlm.convert.huggingface.llama_rope import read_rope, write_rope
from mlm.convert.huggingface.llama_variants import VARIANTS, model_type
from mlm.convert.huggingface.variant import Variant
from mlm.convert.locations import Location
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import ModelConfig
from mlm.models.llama.settings import DEFAULTS, EXPERT_OPTIONS, LlamaSettings, model_problem, num_blocks
from mlm.util.errors import ConfigError, UserError

PREFIX = "model."
NO_LOSS = "output_router_logits=true: a loss of balance is not kept; to train, choose model.options.balance"
QUANTISED = (
    "quantization_config: quantised weights, such as fp8 with block scales, are not supported; save them in "
    "bfloat16, without quantization_config"
)
NOT_COMPUTED = ("balance", "balance_rate", "balance_coefficient", "z_loss", "capacity_factor", "model_type")
"""Settings that do not change what a model computes."""


def architecture(model: ModelConfig) -> str:
    row = VARIANTS[model_type(model)]
    if model.head == "language_model":
        return f"{row.classes}ForCausalLM"
    return row.base or f"{row.classes}Model"


def problem(model: ModelConfig, tokenizer: Tokenizer | None = None) -> str | None:
    """Return why `transformers` has no such model: an option that does not survive in config.json."""
    if model.head not in ("language_model", "none"):
        return f"its head={model.head} has a bias, which theirs lack: only a language model is exported"
    restored, _ = read_config(write_config(model, hf.TokenIds()), "config.json")
    name = changed_option(model, restored)
    if name is None:
        return None
    value, restored_value = (_option(LlamaSettings.of(config), name) for config in (model, restored))
    return (
        f"its model.options.{name}={hf.show(value)} is not what {model_type(model)} of transformers "
        f"computes, which has {hf.show(restored_value)}"
    )


def changed_option(model: ModelConfig, other_model: ModelConfig) -> str | None:
    """Return the first option that makes two models compute differently, or None."""
    settings, other_settings = LlamaSettings.of(model), LlamaSettings.of(other_model)
    for name, leaf in leaves(LlamaSettings).items():
        is_read = leaf.only_if is None or leaf.only_if.holds(getattr(settings, leaf.only_if.key))
        if is_read and name not in NOT_COMPUTED and _option(settings, name) != _option(other_settings, name):
            return name
    return None


def _option(settings: LlamaSettings, name: str) -> hf.JSON:
    if name == "router_bias":
        return settings.has_router_bias
    if name == "router_group_best" and settings.router_top_groups == settings.router_groups:
        return None  # no group is ranked
    return getattr(settings, name)


Locations = Iterator[tuple[str, Location]]
"""(our name, location) of parameters."""


def locations(model: ModelConfig, row: Variant | None = None) -> Locations:
    """Yield all locations; another library's names or row orders are described by a custom `row`."""
    settings, row = LlamaSettings.of(model), row or VARIANTS[model_type(model)]
    yield _weight("token", "embed_tokens")
    for number in range(model.num_layers):
        layer = f"layers.{number}"  # in both
        attention, hf_attention = f"{layer}.attention", f"{layer}.self_attn"
        if settings.kv_lora_rank:
            yield from _latent_locations(attention, hf_attention, settings)
        else:
            yield from _query_locations(attention, hf_attention, model, settings, row)
        yield from _weight_and_bias(f"{attention}.out", f"{hf_attention}.o_proj", settings.bias)
        if settings.attention_sinks:
            yield f"{attention}.sinks.bias", Location((f"{hf_attention}.sinks",))
        for name, hf_norm in row.norms.items():
            if not (settings.parallel and name == "mlp_norm"):
                yield from _weight_and_bias(f"{layer}.{name}", f"{layer}.{hf_norm}", settings.norm_bias)
        if settings.has_experts(number):
            yield from _expert_locations(f"{layer}.mlp", f"{layer}.{row.block}", model, settings, row)
        else:
            yield from _mlp_locations(f"{layer}.mlp", f"{layer}.mlp", num_blocks(model), settings, row)
    yield from _weight_and_bias("final_norm", "norm", settings.norm_bias)
    if model.head == "language_model" and not settings.tied:
        yield _weight("output", "lm_head")


def _weight(module: str, hf_module: str) -> tuple[str, Location]:
    return f"{module}.weight", Location((f"{hf_module}.weight",))


def _weight_and_bias(module: str, hf_module: str, bias: bool) -> Locations:
    for part in ("weight", "bias") if bias else ("weight",):
        yield f"{module}.{part}", Location((f"{hf_module}.{part}",))


def _query_locations(
    module: str, hf_module: str, model: ModelConfig, settings: LlamaSettings, row: Variant
) -> Locations:
    width, kv, rotary_dim = settings.head_dim, settings.num_kv_heads, settings.rotary_dim
    order, kv_order = (), ()
    if row.rotates_neighbours:
        order = (*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, width))
        kv_order = (*order, *range(width, 2 * width))
    heads, all_rows = model.num_heads * width, (model.num_heads + 2 * kv) * width
    for part in ("weight", "bias") if settings.qkv_bias else ("weight",):
        q, k, v = (f"{hf_module}.{name}_proj.{part}" for name in "qkv")
        query = Location((q,), rows=order)
        pair = Location((k, v), num_heads=kv, parts=2, rows=kv_order)
        if row.fuses_qkv:
            names = (f"{hf_module}.qkv_proj.{part}",)
            query = replace(query, names=names, section=(0, heads, all_rows))
            pair = replace(pair, names=names, section=(heads, all_rows, all_rows))
        yield f"{module}.query.{part}", query
        yield f"{module}.kv.{part}", pair
    if settings.qk_norm:
        yield _weight(f"{module}.query_norm", f"{hf_module}.q_norm")
        yield _weight(f"{module}.key_norm", f"{hf_module}.k_norm")


def _latent_locations(module: str, hf_module: str, settings: LlamaSettings) -> Locations:
    """Yield locations of latent attention.

    `transformers` stores rotary dimensions of a head in pairs, last; mlm in halves, first.
    """
    rotary_dim, latent = settings.rope_head_dim, settings.kv_lora_rank
    halves = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2)]
    plain_dim = settings.head_dim - rotary_dim
    order = (*(plain_dim + dim for dim in halves), *range(plain_dim))
    query = f"{hf_module}.q_proj.weight"
    if settings.q_lora_rank:
        yield _weight(f"{module}.query_down", f"{hf_module}.q_a_proj")
        yield _weight(f"{module}.query_down_norm", f"{hf_module}.q_a_layernorm")
        query = f"{hf_module}.q_b_proj.weight"
    yield f"{module}.query.weight", Location((query,), rows=order)
    order = (*range(latent), *(latent + dim for dim in halves))
    yield f"{module}.kv_down.weight", Location((f"{hf_module}.kv_a_proj_with_mqa.weight",), rows=order)
    yield _weight(f"{module}.kv_down_norm", f"{hf_module}.kv_a_layernorm")
    yield _weight(f"{module}.kv", f"{hf_module}.kv_b_proj")


def _expert_locations(
    module: str, hf_module: str, model: ModelConfig, settings: LlamaSettings, row: Variant
) -> Locations:
    yield _weight(f"{module}.router", f"{hf_module}.{row.router}")
    if settings.has_router_bias:
        is_row = row.router_bias.startswith("moe_statics.")
        yield f"{module}.router.bias", Location((f"{hf_module}.{row.router_bias}",), is_row=is_row)
    if settings.router_logit_bias:
        yield f"{module}.router.logit_bias", Location((f"{hf_module}.{row.router}.bias",))
    for part, (hf_part, rows) in zip(("up", "down"), row.all_experts, strict=False):
        yield f"{module}.experts.{part}", Location((f"{hf_module}.{hf_part}",), experts=rows)
        if settings.bias:
            rows = rows._replace(transposed=False)
            yield f"{module}.experts.{part}_bias", Location((f"{hf_module}.{hf_part}_bias",), experts=rows)
    if not row.all_experts:
        gate, up, down = row.projections
        experts = [f"{hf_module}.experts.{expert}" for expert in range(settings.num_experts)]
        pairs = tuple(f"{expert}.{part}.weight" for expert in experts for part in (gate, up))
        downs = tuple(f"{expert}.{down}.weight" for expert in experts)
        yield f"{module}.experts.up", Location(pairs, stacked=(settings.num_experts, 2))
        yield f"{module}.experts.down", Location(downs, stacked=(settings.num_experts,))
    if settings.shared_experts:
        width = settings.shared_experts * settings.expert_ffn_size
        blocks = num_blocks(replace(model, ffn_hidden_size=width))
        yield from _mlp_locations(f"{module}.shared", f"{hf_module}.{row.shared}", blocks, settings, row)
    if settings.shared_gate:
        yield _weight(f"{module}.shared_gate", f"{hf_module}.{row.shared}_gate")


def _mlp_locations(
    module: str, hf_module: str, blocks: int, settings: LlamaSettings, row: Variant
) -> Locations:
    up, down = (f"{hf_module}.{name}" for name in row.mlp)
    if settings.gated:
        hf_modules = (f"{hf_module}.gate_up_proj",) if row.fuses_gate else (f"{hf_module}.gate_proj", up)
        for part in ("weight", "bias") if settings.bias else ("weight",):
            names = tuple(f"{hf_name}.{part}" for hf_name in hf_modules)
            yield f"{module}.up.{part}", Location(names, num_heads=blocks, parts=2)
    else:
        yield from _weight_and_bias(f"{module}.up", up, settings.bias)
    yield from _weight_and_bias(f"{module}.down", down, settings.bias)


def read_config(config: Mapping[str, hf.JSON], path: str) -> tuple[ModelConfig, list[str]]:
    """Return the settings for a config.json of VARIANTS, and notes. Raises ConfigError."""
    row = VARIANTS[str(config["model_type"])]
    renamed = {key: config[alias] for alias, key in row.aliases.items() if alias in config}
    config = {**row.absent, **renamed, **config}
    for key, values in row.meanings.items():
        if isinstance(value := config.get(key), str):
            config[key] = values.get(value, value)
    if isinstance(quantised := config.get("quantization_config"), dict):
        if row.quantised is None or quantised.get("quant_method") != row.quantised:
            raise ConfigError([f"{path}: {QUANTISED}"])
        config["quantization_config"] = None  # read by dequantising
    model, options = row.keys.read(config, path, row.classes, kind="llama", hidden_dropout=0.0)
    usual = DEFAULTS | {"num_kv_heads": model.num_heads, "head_dim": model.hidden_size // model.num_heads}
    if latent := "kv_lora_rank" in options:
        rotated, unrotated = options["rope_head_dim"], options.pop("unrotated_head_dim")
        options["head_dim"] = rotated + unrotated if type(rotated) is type(unrotated) is int else unrotated
    if "bias" in options and options["bias"] != options["qkv_bias"]:
        setting = f"attention_bias={hf.show(options['qkv_bias'])}"
        raise ConfigError([f"{path}: {setting} goes with the same mlp_bias, not {hf.show(options['bias'])}"])
    if "shared_width" in options:
        options["shared_experts"] = _shared_experts(options, path)
    if config.get("topk_method") == "greedy":  # DeepSeek-V2's choice among all experts
        options |= {"router_groups": None, "router_top_groups": None}
    if options.get("swiglu_limit") == 0:
        raise ConfigError([f"{path}: swiglu_limit=0 must be a number above 0"])
    options = {name: usual[name] if value is None else value for name, value in options.items()}
    options |= read_rope(
        config,
        path,
        model.max_positions,
        *row.defaults.rope,
        sliding_theta=row.sliding_theta,
        scales_scores=latent,
    )
    options |= {**read_layers(config, model.num_layers, row, path), **row.options}
    options["tied"] = config.get("tie_word_embeddings", row.tied)
    if (scaling := options.pop("logits_scaling", None)) is not None:
        options["logit_multiplier"] = _inverse("logits_scaling", scaling, path)
    if row.scales_embedding:
        options["embedding_multiplier"] = math.sqrt(model.hidden_size)
    if (scalar := options.pop("query_pre_attn_scalar", None)) is not None:
        scale = _inverse("query_pre_attn_scalar", scalar, path) ** 0.5
        options["attention_multiplier"] = 0.0 if scalar == options["head_dim"] else scale
    if row.normalises is not None:
        options["router_normalise"] = config.get("norm_topk_prob", row.normalises)
    if options["dense_layers"] >= model.num_layers:
        options = {name: value for name, value in options.items() if name not in EXPERT_OPTIONS}
    model = replace(model, options={name: value for name, value in options.items() if value != usual[name]})
    if model_type(model) != config["model_type"]:
        model = replace(model, options={**model.options, "model_type": str(config["model_type"])})
    if wrong_model := model_problem(model):
        raise ConfigError([f"{path}: {wrong_model}"])
    has_loss = row.has_experts and config.get("output_router_logits", False)
    return model, [NO_LOSS] if has_loss else []


def _shared_experts(options: dict[str, hf.JSON], path: str) -> int:
    """Return the width of the shared expert in experts. Raises ConfigError for a fraction."""
    shared, width = options.pop("shared_width"), options["expert_ffn_size"]
    if not (type(shared) is type(width) is int and 0 < width <= shared and shared % width == 0):
        setting = f"shared_expert_intermediate_size={hf.show(shared)}"
        raise ConfigError([f"{path}: {setting} must be a multiple of moe_intermediate_size={hf.show(width)}"])
    return shared // width


def _inverse(key: str, value: hf.JSON, path: str) -> float:
    if type(value) not in (int, float) or not 0 < value < 1 << 31:
        raise ConfigError([f"{path}: {key}={hf.show(value)} must be a number above 0"])
    return 1 / float(value)


def write_config(model: ModelConfig, ids: hf.TokenIds) -> dict[str, hf.JSON]:
    settings, kind = LlamaSettings.of(model), model_type(model)
    row, scale = VARIANTS[kind], settings.attention_multiplier
    ffn = settings.expert_ffn_size if row.is_all_experts else model.ffn_size
    values = {**asdict(model), **asdict(settings), "ffn_hidden_size": ffn}
    values["query_pre_attn_scalar"] = round(scale**-2) if scale else settings.head_dim
    values["attention_multiplier"] = scale or settings.head_dim**-0.5
    values["logits_scaling"] = 1 / settings.logit_multiplier
    config = {
        **row.keys.write(values, architecture(model)),
        **{key: supported[0] for key, supported in row.fixed.items()},
        **row.written,
        "model_type": kind,
        **write_rope(
            settings,
            has_fraction=row.defaults.rotary_fraction is not None,
            differs_by_type=row.sliding_theta is not None,
        ),
        **write_layers(model, settings, row),
        "bos_token_id": ids.bos,
        "eos_token_id": ids.eod,
        "pad_token_id": ids.pad,
        "tie_word_embeddings": settings.tied,
    }
    is_usual = settings.head_dim == model.hidden_size // model.num_heads
    if row.writes_head_dim == "never" or (row.writes_head_dim == "unusual" and is_usual):
        del config["head_dim"]
    if "rope_parameters" in row.absent and settings.rope_scaling == "default":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": settings.rope_theta}
    if settings.kv_lora_rank:
        config["qk_nope_head_dim"] = settings.head_dim - settings.rope_head_dim
    names = hf.ACTIVATIONS[model.activation]
    config[row.activation] = next((name for name in row.activations if name in names), names[0])
    if row.normalises is not None:
        config["norm_topk_prob"] = settings.router_normalise
    if settings.shared_gate:
        config["shared_expert_intermediate_size"] = settings.shared_experts * settings.expert_ffn_size
    if "group_limited_greedy" in row.fixed.get("topk_method", ()) and settings.router_groups > 1:
        config["topk_method"] = "group_limited_greedy"
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in row.fields:
            config[key] = config[key] or None
    return config


def content(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: str) -> hf.FolderContent:
    """Return the model in a folder by its tensors: a language model, or its layers alone.

    Raises UserError for a head other than an output layer.
    """
    head = next((name for name in shapes if name.startswith(("score.", "qa_outputs."))), None)
    if head is not None:
        raise UserError(f"{path}: holds {head}, a head that is not supported. Save the model with lm_head")
    # layers of multi-token prediction come after the model's (arXiv:2412.19437, section 2.2)
    numbers = itertools.takewhile(
        lambda layer: f"layers.{layer}.eh_proj.weight" in shapes, itertools.count(model.num_layers)
    )
    prefixes = tuple(f"layers.{layer}." for layer in numbers)
    unused, notes = frozenset(name for name in shapes if name.startswith(prefixes)), tuple[hf.Note, ...]()
    if unused:
        notes = (hf.Note(f"multi-token prediction is left out: {len(unused)} tensors"),)
    if any(name.endswith("_blocks") for name in shapes):
        notes = (*notes, hf.Note("weights of experts in MXFP4 are read as float32, and exported so"))
    if "lm_head.weight" in shapes or LlamaSettings.of(model).tied:
        return hf.FolderContent(model, unused=unused, notes=notes)
    note = hf.Note(
        "no lm_head.weight is there, nor tie_word_embeddings=true: the layers alone, without output"
    )
    return hf.FolderContent(replace(model, head="none"), unused=unused, notes=(*notes, note))


def special_tokens(tokenizer: Tokenizer, model: ModelConfig, ids: hf.TokenIds) -> dict[str, hf.JSON]:
    ids_by_role = {"eos": tokenizer.eod_id, "bos": tokenizer.bos_id, "pad": ids.pad}
    return {f"{name}_token": tokenizer.decode([id]) for name, id in ids_by_role.items() if id is not None}


MAPPING = hf.HuggingFaceMapping(
    model_types=tuple(VARIANTS),
    architecture=architecture,
    prefix=lambda model: PREFIX,
    head_prefixes=("lm_head.",),
    plain=lambda name: name.removeprefix(PREFIX),
    copies=lambda model: {"lm_head.weight": "embed_tokens.weight"} if LlamaSettings.of(model).tied else {},
    ignored=re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),  # stored by old versions
    read=read_config,
    content=content,
    write=write_config,
    locations=locations,
    problem=problem,
    changed_option=changed_option,
    special_tokens=special_tokens,
    native_outputs=native_outputs,
    hf_outputs=hf_outputs,
)
