"""A command line of Megatron-LM as settings: `mlm pretrain --from-megatron train_llama.sh`.

config/foreign_options.yaml maps single flags; it also answers a flag typed to `mlm pretrain`. Settings that
depend on several flags are computed here. A script is read, never run.
"""

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mlm.cli.megatron_script import command_in, conditional_flags, read_script
from mlm.config.fields import split_weight
from mlm.config.suggest import foreign_option, megatron_flags, plain_name
from mlm.config.tree import leaves, other_names
from mlm.runs.config import PretrainConfig
from mlm.util.errors import UserError

Flags = dict[str, list[str]]
"""Name of a flag, as config/foreign_options.yaml has it → its values."""


@dataclass
class Translation:
    """Settings, and the flags that are not among them: each as typed, with the reason."""

    settings: dict[str, str] = field(default_factory=dict)
    automatic: dict[str, str] = field(default_factory=dict)
    by_hand: dict[str, str] = field(default_factory=dict)
    not_offered: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    conditional: Sequence[str] = ()
    """Flags inside conditions of the script, which are translated all the same."""

    def lines(self) -> list[str]:
        """The command, followed by comments on the flags that it leaves out."""
        words = [shlex.quote(f"{key}={value}") for key, value in self.settings.items()]
        lines = [" \\\n    ".join(["mlm pretrain", *words])]
        for title, flags in (
            ("to decide", self.by_hand),
            ("not offered", self.not_offered),
            ("unknown to Megatron Core 0.20", self.unknown),
        ):
            lines += [f"# {title}: {flag}{f': {why}' if why else ''}" for flag, why in flags.items()]
        if self.conditional:
            lines.append(f"# in a condition of the script, and taken: {' '.join(self.conditional)}")
        if self.automatic:
            lines.append(f"# automatic here: {' '.join(self.automatic)}")
        return lines


def translate_words(words: Sequence[str]) -> Translation:
    """Translate a script with flags that override its own, or flags alone. Raises UserError."""
    words = words[1:] if words[:1] == ["--"] else words
    script = read_script(words[0]) if words and not words[0].startswith("-") else ""
    command = command_in(script)
    flags = flags_of(command) | flags_of(words)
    if not flags:
        raise UserError(
            "--from-megatron: no flags; give a script that calls pretrain_….py, or flags after --"
        )
    result = translate(flags, program=Path(command[0]).name if command else "")
    result.conditional = conditional_flags(script)
    return result


def flags_of(words: Iterable[str]) -> Flags:
    """Flags with as many values as the parser takes; `--flag=value` counts too."""
    flags: Flags = {}
    values: list[str] | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            values = flags[plain_name(name)] = [value] if equals else []
            max_values = {"": 1, "!": 0}.get(megatron_flags().get(plain_name(name), "*"), math.inf)
        elif values is not None and len(values) < max_values:
            values.append(word)
    return flags


DEFAULTS = {
    "lr_decay_style": "linear",
    "min_lr": "0.0",
    "weight_decay": "0.01",
    "hidden_dropout": "0.1",
    "attention_dropout": "0.1",
    "norm_epsilon": "1e-5",
    "init_method_std": "0.02",
    "eval_interval": "1000",
    "eval_iters": "100",
    "seed": "1234",
}
"""Values of Megatron Core's parser for flags that are left out, where settings' defaults may differ."""


def translate(flags: Flags, *, program: str = "") -> Translation:
    """Translate flags: first those that depend on each other, then each by the table."""
    flags = {name: [value] for name, value in DEFAULTS.items()} | flags
    if not any(name.startswith("lr_warmup_") for name in flags):
        flags["lr_warmup_iters"] = ["0"]
    if first(flags, "lr_decay_style") == "WSD":
        flags.setdefault("lr_wsd_decay_style", ["exponential"])
    result, remaining = Translation(), dict(flags)
    settings, used = translate_family(flags, program, result.not_offered)
    rules = [translate_layout, translate_schedule, translate_optimizer, translate_data]
    if settings.get("model") == "llama":
        rules = [translate_sizes, translate_experts, *rules]
    translated = [(settings, used)]
    for rule in rules:
        with suppress(ValueError, ZeroDivisionError):  # variables that the script does not set
            translated.append(rule(flags))
    for settings, used in translated:
        result.settings |= settings
        remaining = {name: values for name, values in remaining.items() if name not in used}
    for name, values in remaining.items():
        translate_flag(result, name, values)
    for key, value in result.settings.items():
        if re.search(r"[$`]", value):
            result.by_hand[f"{key}={value}"] = "what the script does not set"
    return result


def translate_flag(result: Translation, name: str, values: Sequence[str]) -> None:
    """Add a flag by the table, or under the name of a key."""
    typed = " ".join([f"--{name.replace('_', '-')}", *values])
    value = ",".join(values) if values else "true"
    if name == "lr_wsd_decay_style":  # not in SHAPES
        result.not_offered[typed] = "schedule.cooldown_shape is linear or 1-sqrt"
    elif not values and megatron_flags().get(name, "!") != "!":
        result.by_hand[typed] = "it has no value"
    elif key := key_of(name):
        result.settings[key] = f"[{value}]" if len(values) > 1 else value
    elif option := foreign_option(PretrainConfig, name):
        answer = option.answer_to(value)
        kind, _, why = answer.partition(": ")
        setting = re.fullmatch(r"use ([a-z_.]+)=(\{value\}|[a-z0-9_.-]+)(?:[ ,;(].*)?", option.answer)
        if kind == "leave it out":
            result.automatic[typed] = why
        elif kind == "not offered":
            result.not_offered[typed] = why
        elif setting and option.answer.count("=") == 1 and " or " not in option.answer:
            result.settings[setting[1]] = value if setting[2] == "{value}" else setting[2]
        else:
            result.by_hand[typed] = answer
    else:
        result.unknown[typed] = ""


@cache
def key_of(name: str) -> str | None:
    """The key with a flag's name or alias, if meaning and unit are the same."""
    if foreign_option(PretrainConfig, name):
        return None
    keys, names = leaves(PretrainConfig), other_names(PretrainConfig)
    same_names = [key for key in keys if key.rpartition(".")[2] == name]
    return next(iter(names.get(name, same_names)), None)


Rule = tuple[dict[str, str], set[str]]
"""Settings, and the flags that they translate."""


def first(flags: Flags, name: str) -> str | None:
    return next(iter(flags.get(name, [])), None)


def rename_flags(flags: Flags, keys: Mapping[str, str]) -> dict[str, str]:
    return {key: flags[name][0] for name, key in keys.items() if flags.get(name)}


LLAMA = {"swiglu": "a gated MLP", "disable_bias_linear": "no biases"}
"""Flags that every Llama of mlm implies."""


def translate_family(flags: Flags, program: str, not_offered: dict[str, str]) -> Rule:
    if program and not re.search(r"gpt|bert|^train\.py", program):
        not_offered[program] = "models are GPT, Llama and BERT"
    if "bert" in program or "bert_no_binary_head" in flags:
        return {"model": "bert"}, set()
    if not ("use_rotary_position_embeddings" in flags or first(flags, "position_embedding_type") == "rope"):
        defaults = {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
        return {"model.kind": "gpt2"}, {
            name for name, value in defaults.items() if first(flags, name) == value
        }
    for name, part in LLAMA.items():
        if name not in flags:
            not_offered[f"rotary positions without --{name.replace('_', '-')}"] = f"a Llama has {part}"
    if first(flags, "normalization") != "RMSNorm":
        not_offered["rotary positions with LayerNorm"] = "a Llama has RMSNorm"
    if "squared_relu" in flags:
        not_offered["rotary positions with --squared-relu"] = "a Llama has SiLU"
    settings, used = {"model": "llama"}, {*LLAMA, "normalization", "squared_relu", "group_query_attention"}
    used |= {
        "use_rotary_position_embeddings",
        "position_embedding_type",
        "no_position_embedding",  # learned positions, which rotary ones replace
        "untie_embeddings_and_output_weights",
    }
    hidden = first(flags, "hidden_size") or ""
    if "ffn_hidden_size" not in flags and "swiglu" in flags and hidden.isdecimal():
        settings["model.ffn_hidden_size"] = str(int(4 * int(hidden) * 2 / 3 / 64) * 64)
    if "untie_embeddings_and_output_weights" not in flags:
        settings["model.options.tied"] = "true"
    return settings, used


def translate_sizes(flags: Flags) -> Rule:
    keys = {
        "num_query_groups": "model.options.num_kv_heads",
        "kv_channels": "model.options.head_dim",
        "rotary_base": "model.options.rope_theta",
        "rotary_percent": "model.options.rotary_fraction",
    }
    if "group_query_attention" not in flags:  # Megatron-LM ignores it then
        flags = {name: values for name, values in flags.items() if name != "num_query_groups"}
    settings, used = rename_flags(flags, keys), {*keys}
    if "multi_latent_attention" in flags:
        head, rotary = (int(first(flags, name) or least) for name, least in LATENT_HEADS.items())
        settings["model.options.head_dim"] = str(head + rotary)
        settings["model.options.rope_head_dim"] = str(rotary)
        latent = {"kv_lora_rank": "32", "q_lora_rank": "0", "v_head_dim": "128"}
        settings |= {f"model.options.{name}": first(flags, name) or least for name, least in latent.items()}
        used |= {"multi_latent_attention", "qk_layernorm", *LATENT_HEADS, *latent}  # it norms its latents
    if "use_rope_scaling" in flags:
        settings["model.options.rope_scaling"] = "llama3"
        settings["model.options.rope_factor"] = first(flags, "rope_scaling_factor") or "8"
        settings["model.options.rope_original_positions"] = "8192"
        used |= {"use_rope_scaling", "rope_scaling_factor"}
    return settings, used


LATENT_HEADS = {"qk_head_dim": "128", "qk_pos_emb_head_dim": "64"}
"""Widths of latent attention without and with rotation, and Megatron Core's defaults."""
BALANCES = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence", "global_aux_loss": "global_batch"}


def translate_experts(flags: Flags) -> Rule:
    if "num_experts" not in flags:
        return {}, set()
    keys = {
        "num_experts": "model.options.num_experts",
        "moe_router_topk": "model.options.experts_per_token",
        "moe_ffn_hidden_size": "model.options.expert_ffn_size",
        "moe_router_score_function": "model.options.router_scores",
        "moe_router_topk_scaling_factor": "model.options.router_scale",
        "moe_router_num_groups": "model.options.router_groups",
        "moe_router_group_topk": "model.options.router_top_groups",
        "moe_router_bias_update_rate": "model.options.balance_rate",
        "moe_z_loss_coeff": "model.options.z_loss",
        "moe_expert_capacity_factor": "model.options.capacity_factor",
    }
    settings = rename_flags(flags, keys)
    used = {*keys, "moe_router_load_balancing_type", "moe_aux_loss_coeff"}
    if shared := first(flags, "moe_shared_expert_intermediate_size"):
        width = int(first(flags, "moe_ffn_hidden_size") or first(flags, "ffn_hidden_size") or shared)
        if int(shared) % width == 0:
            settings["model.options.shared_experts"] = str(int(shared) // width)
            used |= {"moe_shared_expert_intermediate_size", "moe_shared_expert_gate"}
            if "moe_shared_expert_gate" in flags:
                settings["model.options.shared_gate"] = "true"
    if match := re.fullmatch(
        r"\(?\[0\]\s*\*\s*(\d+)\s*\+\s*\[1\]\s*\*\s*\d+\)?", first(flags, "moe_layer_freq") or ""
    ):
        settings["model.options.dense_layers"] = match[1]
        used.add("moe_layer_freq")
    balance = flags.get("moe_router_load_balancing_type", ["aux_loss"])
    coefficient = first(flags, "moe_aux_loss_coeff")
    has_loss = bool(coefficient and float(coefficient)) and balance != ["none"]
    if "moe_router_enable_expert_bias" in flags:
        settings["model.options.balance"] = "bias"
        used.add("moe_router_enable_expert_bias")
        if has_loss:  # one balance is offered
            used -= {"moe_router_load_balancing_type", "moe_aux_loss_coeff"}
    elif has_loss and len(balance) == 1 and balance[0] in BALANCES:
        assert coefficient is not None
        settings["model.options.balance"] = BALANCES[balance[0]]
        settings["model.options.balance_coefficient"] = coefficient
    elif has_loss:
        used -= {"moe_router_load_balancing_type", "moe_aux_loss_coeff"}
    return settings, used


BACKENDS = {"auto": "auto", "flash": "flash", "fused": "cudnn", "unfused": "math", "local": "math"}


def translate_layout(flags: Flags) -> Rule:
    settings, used = dict[str, str](), set[str]()
    per_chunk = first(flags, "num_layers_per_virtual_pipeline_stage")
    stages = first(flags, "pipeline_model_parallel_size")
    if per_chunk and stages and (layers := first(flags, "num_layers")):
        chunks, remainder = divmod(int(layers), int(stages) * int(per_chunk))
        if not remainder:
            settings["vp"] = str(chunks)
            used.add("num_layers_per_virtual_pipeline_stage")
    if "use_megatron_fsdp" in flags or "use_torch_fsdp2" in flags:
        shards_weights = first(flags, "data_parallel_sharding_strategy") in (None, "optim_grads_params")
        settings["zero"] = "3" if shards_weights else "2"
        used |= {"use_megatron_fsdp", "use_torch_fsdp2", "data_parallel_sharding_strategy"}
        used.add("use_distributed_optimizer")
    if minutes := first(flags, "distributed_timeout_minutes"):
        settings["dist.timeout_s"] = f"{60 * float(minutes):g}"
        used.add("distributed_timeout_minutes")
    if (backend := first(flags, "attention_backend")) in BACKENDS:
        settings["attention"] = BACKENDS[backend]
        used.add("attention_backend")
    return settings, used


SAMPLES = {
    "train_samples": "train.steps",
    "lr_decay_samples": "schedule.decay_steps",
    "lr_warmup_samples": "schedule.warmup_steps",
    "lr_wsd_decay_samples": "schedule.cooldown",
}
DECAYS = {"WSD": "constant", "inverse-square-root": "inverse_sqrt"}
SHAPES = {"minus_sqrt": "1-sqrt", "linear": "linear"}


def translate_schedule(flags: Flags) -> Rule:
    """Numbers of samples as steps, where the batch does not ramp, and the schedule."""
    settings, used = dict[str, str](), set[str]()
    if (batch := first(flags, "global_batch_size")) and "rampup_batch_size" not in flags:
        for name, key in SAMPLES.items():
            if samples := first(flags, name):
                settings[key] = f"{float(samples) // float(batch):.0f}"
                used.add(name)
    if decay := first(flags, "lr_decay_style"):
        settings["schedule.decay"] = DECAYS.get(decay, decay)
        used.add("lr_decay_style")
        if decay == "WSD":  # its cooldown ends with the run
            settings.pop("schedule.decay_steps", None)
            used |= {"lr_decay_iters", "lr_decay_samples"}
            if (shape := first(flags, "lr_wsd_decay_style")) in SHAPES:
                settings["schedule.cooldown_shape"] = SHAPES[shape]
                used.add("lr_wsd_decay_style")
    if first(flags, "eval_iters") == "0":
        settings["train.validate_every"] = "0"
        used |= {"eval_iters", "eval_interval"}
    decay_end = settings.get("schedule.decay_steps") or first(flags, "lr_decay_iters")
    if (fraction := first(flags, "lr_warmup_fraction")) and decay_end:  # a share of the decay, not of the run
        settings["schedule.warmup_steps"] = str(int(float(fraction) * int(decay_end)))
        used.add("lr_warmup_fraction")
    return settings, used


def translate_optimizer(flags: Flags) -> Rule:
    """The optimizer's kind and moments, and the number format."""
    settings, used = dict[str, str](), {"adam_beta1", "adam_beta2"}
    betas = [first(flags, "adam_beta1"), first(flags, "adam_beta2")]
    if any(betas):
        settings["optimizer.betas"] = f"[{betas[0] or 0.9},{betas[1] or 0.999}]"
    if first(flags, "optimizer") in ("adam", "muon", "dist_muon"):
        settings["optimizer.kind"] = "adamw" if first(flags, "optimizer") == "adam" else "muon"
        used.add("optimizer")
        if settings["optimizer.kind"] == "muon":
            settings["optimizer.muon.momentum"] = first(flags, "muon_momentum") or "0.9"
            settings["optimizer.muon.nesterov"] = str("muon_nesterov" in flags).lower()
            used |= {"muon_momentum", "muon_nesterov"}
    if "fp8_format" in flags:
        settings["precision"] = "fp8"
        used |= {"fp8_format", "bf16", "fp16"}
    return settings, used


def translate_data(flags: Flags) -> Rule:
    """Corpora with their weights, and the folder of the run."""
    settings, used = dict[str, str](), set[str]()
    prefixes = flags.get("data_path") or flags.get("train_data_path")
    if "mock_data" in flags:
        settings["data"] = "synthetic"
        used |= {"mock_data", "data_path", "train_data_path"}
    elif prefixes and len(prefixes) == 1:
        settings["data.path"] = prefixes[0]
        used |= {"data_path", "train_data_path"}
    elif prefixes:
        entries = [
            f"{weight} {prefix}" for weight, prefix in zip(prefixes[::2], prefixes[1::2], strict=False)
        ]
        is_weighted = len(prefixes) % 2 == 0 and all(split_weight(entry)[0] for entry in entries)
        blend = entries if is_weighted else prefixes
        settings["data.blend"] = f"[{','.join(blend)}]"
        used |= {"data_path", "train_data_path"}
    if len(flags.get("valid_data_path", [])) == 1:
        settings["data.validation"] = flags["valid_data_path"][0]
        used.add("valid_data_path")
    if flags.get("load") == flags.get("save"):  # an existing run resumes automatically
        used.add("load")
    return settings, used
