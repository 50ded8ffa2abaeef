"""A command line of Megatron-LM as settings: `mlm pretrain --from-megatron train_llama.sh`.

What a flag means here is written once, in config/foreign_options.yaml, which also answers a flag typed to
`mlm pretrain`. What depends on several flags is computed here. A script is read, never run.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mlm.config.suggest import foreign_option, plain_name
from mlm.config.tree import leaves, other_names
from mlm.runs.config import PretrainConfig
from mlm.util.errors import UserError

ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[@\])?(?::?-([^}]*))?\}|(\w+))")
PROGRAM = re.compile(r"(?:^|/)\w*train\w*\.py$")
ENDS, PARENTHESES = re.compile(r"[();&|<>]+"), re.compile(r"[()]|[^()]+")
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

    def lines(self) -> list[str]:
        """The command, and below it as comments what is not in it."""
        words = [shlex.quote(f"{key}={value}") for key, value in self.settings.items()]
        lines = [" \\\n    ".join(["mlm pretrain", *words])]
        for title, flags in (
            ("to decide", self.by_hand),
            ("not offered", self.not_offered),
            ("unknown to Megatron Core 0.20", self.unknown),
        ):
            lines += [f"# {title}: {flag}{f': {why}' if why else ''}" for flag, why in flags.items()]
        if self.automatic:
            lines.append(f"# automatic here: {' '.join(self.automatic)}")
        return lines


def translate_words(words: Sequence[str]) -> Translation:
    """Translate a script, if `words` are the path of one, or flags. Raises UserError without either."""
    if words[:1] == ["--"]:
        words = words[1:]
    if len(words) == 1 and not words[0].startswith("-"):
        try:
            words = command_in(Path(words[0]).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text"
            raise UserError(f"--from-megatron {words[0]}: {reason}; give a shell script") from None
    flags = flags_of(words)
    if not flags:
        raise UserError(
            "--from-megatron: no flags; give a script that calls pretrain_….py, or flags after --"
        )
    return translate(flags, is_bert=any("bert" in word for word in words[:1]))


def command_in(script: str) -> list[str]:
    """The words from a training program on in a shell script, variables and arrays filled in.

    What only a shell could compute, such as $(…), stays as it is.
    """
    lexer = shlex.shlex(script.replace("\\\n", " "), posix=True, punctuation_chars="();&|<>")
    lexer.whitespace_split = True
    try:
        tokens = [
            part
            for token in lexer
            for part in (PARENTHESES.findall(token) if ENDS.fullmatch(token) else [token])
        ]
    except ValueError as error:
        raise UserError(f"--from-megatron: the script cannot be read: {error}") from None
    variables: dict[str, list[str]] = {}
    commands, rest = [list[str]()], iter(tokens)
    for token in rest:
        if match := ASSIGNED.fullmatch(token):
            name, operator, value = match.groups()
            values = [value]
            if not value and (following := next(rest, ";")) == "(":
                values = list(iter(lambda: next(rest, ")"), ")"))
            elif not value:
                commands[-1] += [] if ENDS.fullmatch(following) else [following]
            filled = [word for text in values for word in expand(text, variables)]
            variables[name] = variables.get(name, []) * (operator == "+=") + filled
        elif ENDS.fullmatch(token):
            if ">" in token and commands[-1][-1:] in (["1"], ["2"]):  # 2>&1
                commands[-1].pop()
            commands.append([])
        else:
            commands[-1] += expand(token, variables)
    calls = [
        words[number:]
        for words in (*commands, *variables.values())
        for number, word in enumerate(words)
        if PROGRAM.search(word)
    ]
    every_word = [word for values in variables.values() for word in values]
    return max(calls or [every_word], key=lambda words: len(flags_of(words)))


def expand(text: str, variables: Mapping[str, Sequence[str]]) -> list[str]:
    """A word with its variables filled in; one variable alone may be several words."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return " ".join(variables[name]) if name in variables else match[0] if match[2] is None else match[2]

    if (match := VARIABLE.fullmatch(text)) and (match[1] or match[3]) in variables:
        words = variables[match[1] or match[3]]
        return shlex.split(words[0]) if len(words) == 1 and " " in words[0] else list(words)
    filled = VARIABLE.sub(value_of, text)
    return shlex.split(filled) if " --" in filled or (" " in filled and filled.startswith("--")) else [filled]


def flags_of(words: Iterable[str]) -> Flags:
    """Flags with the words after them, up to the next flag; `--flag=value` counts too."""
    flags: Flags = {}
    values: list[str] | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            values = flags[plain_name(name)] = [value] if equals else []
        elif values is not None:
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
"""Values of Megatron Core's parser for flags that are left out, where those of settings may differ."""


def translate(flags: Flags, *, is_bert: bool = False) -> Translation:
    """Translate flags: first those that several of them decide, then each by the table."""
    flags = {name: [value] for name, value in DEFAULTS.items()} | flags
    if not any(name.startswith("lr_warmup_") for name in flags):
        flags["lr_warmup_iters"] = ["0"]
    result, rest = Translation(), dict(flags)
    rules = [family(flags, is_bert)]
    rules += [rule(flags) for rule in (sizes, experts, layout, lengths, optimizer, data)]
    for settings, read in rules:
        result.settings |= settings
        rest = {name: values for name, values in rest.items() if name not in read}
    for name, values in rest.items():
        typed = " ".join([f"--{name.replace('_', '-')}", *values])
        value = ",".join(values) if values else "true"
        if key := key_of(name):
            result.settings[key] = f"[{value}]" if len(values) > 1 else value
        elif option := foreign_option(PretrainConfig, name):
            answer = option.answer_to(value)
            kind, _, why = answer.partition(": ")
            setting = re.match(r"use ([a-z_.]+)=([\w.-]+)(?![^ ,])", answer)
            if kind == "leave it out":
                result.automatic[typed] = why
            elif kind == "not offered":
                result.not_offered[typed] = why
            elif setting and answer.count("=") == 1 and " or " not in answer and not setting[2].isupper():
                result.settings[setting[1]] = setting[2]
            else:
                result.by_hand[typed] = answer
        else:
            result.unknown[typed] = ""
    for key, value in result.settings.items():
        if "$" in value:
            result.by_hand[f"{key}={value}"] = "a variable that the script does not set"
    return result


@cache
def key_of(name: str) -> str | None:
    """The key that a flag has under its own or another name, with the same meaning and unit."""
    if foreign_option(PretrainConfig, name):
        return None
    keys, names = leaves(PretrainConfig), other_names(PretrainConfig)
    same = [key for key in keys if key.rpartition(".")[2] == name]
    return next(iter(names.get(name, same)), None)


Rule = tuple[dict[str, str], set[str]]
"""Settings, and the flags that they come from."""


def first(flags: Flags, name: str) -> str | None:
    """The first value of a flag; None without it."""
    return next(iter(flags.get(name, [])), None)


def renamed(flags: Flags, keys: Mapping[str, str]) -> dict[str, str]:
    """Settings of flags whose value is a setting's."""
    return {key: flags[name][0] for name, key in keys.items() if flags.get(name)}


def family(flags: Flags, is_bert: bool) -> Rule:
    """The family of the model, and the flags that are a part of it."""
    read = {"swiglu", "normalization", "disable_bias_linear", "group_query_attention"}
    read |= {"untie_embeddings_and_output_weights", "use_rotary_position_embeddings", "no_position_embedding"}
    rotary = "use_rotary_position_embeddings" in flags or first(flags, "position_embedding_type") in (
        "rope",
        "yarn",
    )
    if is_bert or "bert_no_binary_head" in flags:
        return {"model": "bert"}, set()
    if not rotary:
        defaults = {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
        return {"model.kind": "gpt2"}, {
            name for name, value in defaults.items() if first(flags, name) == value
        }
    settings = {"model": "llama"}
    if "ffn_hidden_size" not in flags and (hidden := first(flags, "hidden_size")):
        settings["model.ffn_hidden_size"] = str(int(4 * int(hidden) * 2 / 3 / 64) * 64)
    if "untie_embeddings_and_output_weights" not in flags:
        settings["model.options.tied"] = "true"
    return settings, {*read, "position_embedding_type"}


def sizes(flags: Flags) -> Rule:
    """Heads, rotary positions and latent attention of a Llama."""
    keys = {
        "num_query_groups": "model.options.num_kv_heads",
        "kv_channels": "model.options.head_dim",
        "rotary_base": "model.options.rope_theta",
        "rotary_percent": "model.options.rotary_fraction",
    }
    settings, read = renamed(flags, keys), {*keys}
    if "multi_latent_attention" in flags:
        head, rotary = (int(first(flags, name) or least) for name, least in LATENT_HEADS.items())
        settings["model.options.head_dim"] = str(head + rotary)
        settings["model.options.rope_head_dim"] = str(rotary)
        latent = {"kv_lora_rank": "512", "q_lora_rank": "0", "v_head_dim": "128"}
        settings |= {f"model.options.{name}": first(flags, name) or least for name, least in latent.items()}
        read |= {"multi_latent_attention", "qk_layernorm", *LATENT_HEADS, *latent}  # it norms its latents
    if "use_rope_scaling" in flags:
        settings["model.options.rope_scaling"] = "llama3"
        settings["model.options.rope_factor"] = first(flags, "rope_scaling_factor") or "8"
        settings["model.options.rope_original_positions"] = "8192"
        read |= {"use_rope_scaling", "rope_scaling_factor"}
    return settings, read


LATENT_HEADS = {"qk_head_dim": "128", "qk_pos_emb_head_dim": "64"}
"""Widths of latent attention without and with rotation, and Megatron Core's defaults."""
BALANCES = {
    "aux_loss": "micro_batch",
    "seq_aux_loss": "sequence",
    "global_aux_loss": "global_batch",
    "none": "none",
}


def experts(flags: Flags) -> Rule:
    """Experts, their router and its balance."""
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
    settings, read = renamed(flags, keys), {*keys, "moe_router_load_balancing_type", "moe_aux_loss_coeff"}
    if shared := first(flags, "moe_shared_expert_intermediate_size"):
        width = int(first(flags, "moe_ffn_hidden_size") or first(flags, "ffn_hidden_size") or shared)
        settings["model.options.shared_experts"] = f"{int(shared) / width:g}"
        read.add("moe_shared_expert_intermediate_size")
    if match := re.fullmatch(
        r"\(?\[0\]\s*\*\s*(\d+)\s*\+\s*\[1\]\s*\*\s*\d+\)?", first(flags, "moe_layer_freq") or ""
    ):
        settings["model.options.dense_layers"] = match[1]
        read.add("moe_layer_freq")
    if "moe_router_enable_expert_bias" in flags:
        settings["model.options.balance"] = "bias"
        read.add("moe_router_enable_expert_bias")
    elif (balance := first(flags, "moe_router_load_balancing_type") or "aux_loss") in BALANCES:
        coefficient = first(flags, "moe_aux_loss_coeff")
        if coefficient and float(coefficient) and balance != "none":
            settings["model.options.balance"] = BALANCES[balance]
            settings["model.options.balance_coefficient"] = coefficient
    else:
        read.discard("moe_router_load_balancing_type")
    return settings, read


def layout(flags: Flags) -> Rule:
    """Virtual stages, sharding and time limits."""
    settings, read = dict[str, str](), set[str]()
    per_chunk, stages = (
        first(flags, "num_layers_per_virtual_pipeline_stage"),
        first(flags, "pipeline_model_parallel_size"),
    )
    if per_chunk and stages and (layers := first(flags, "num_layers")):
        settings["vp"] = f"{int(layers) / int(stages) / int(per_chunk):g}"
        read.add("num_layers_per_virtual_pipeline_stage")
    if "use_megatron_fsdp" in flags or "use_torch_fsdp2" in flags:
        shards_weights = first(flags, "data_parallel_sharding_strategy") in (None, "optim_grads_params")
        settings["zero"] = "3" if shards_weights else "2"
        read |= {"use_megatron_fsdp", "use_torch_fsdp2", "data_parallel_sharding_strategy"}
        read.add("use_distributed_optimizer")
    if minutes := first(flags, "distributed_timeout_minutes"):
        settings["dist.timeout_s"] = str(60 * int(minutes))
        read.add("distributed_timeout_minutes")
    return settings, read


SAMPLES = {
    "train_samples": "train.steps",
    "lr_decay_samples": "schedule.decay_steps",
    "lr_warmup_samples": "schedule.warmup_steps",
    "lr_wsd_decay_samples": "schedule.cooldown",
}
DECAYS = {"WSD": "constant", "inverse-square-root": "inverse_sqrt"}
SHAPES = {"minus_sqrt": "1-sqrt", "linear": "linear"}


def lengths(flags: Flags) -> Rule:
    """Numbers of samples as steps, where the batch does not ramp, and the schedule."""
    settings, read = dict[str, str](), set[str]()
    if (batch := first(flags, "global_batch_size")) and "rampup_batch_size" not in flags:
        for name, key in SAMPLES.items():
            if samples := first(flags, name):
                settings[key] = str(int(samples) // int(batch))
                read.add(name)
    if decay := first(flags, "lr_decay_style"):
        settings["schedule.decay"] = DECAYS.get(decay, decay)
        read.add("lr_decay_style")
        if decay == "WSD":  # its cooldown ends with the run
            settings.pop("schedule.decay_steps", None)
            read |= {"lr_decay_iters", "lr_decay_samples"}
    if first(flags, "eval_iters") == "0":
        settings["train.validate_every"] = "0"
        read |= {"eval_iters", "eval_interval"}
    if (shape := first(flags, "lr_wsd_decay_style")) in SHAPES:
        settings["schedule.cooldown_shape"] = SHAPES[shape]
        read.add("lr_wsd_decay_style")
    return settings, read


def optimizer(flags: Flags) -> Rule:
    """The optimizer's kind and moments, and the number format."""
    settings, read = dict[str, str](), {"adam_beta1", "adam_beta2"}
    betas = [first(flags, "adam_beta1"), first(flags, "adam_beta2")]
    if any(betas):
        settings["optimizer.betas"] = f"[{betas[0] or 0.9},{betas[1] or 0.999}]"
    if first(flags, "optimizer") in ("adam", "muon", "dist_muon"):
        settings["optimizer.kind"] = "adamw" if first(flags, "optimizer") == "adam" else "muon"
        read.add("optimizer")
    if "fp8_format" in flags:
        settings["precision"] = "fp8"
        read |= {"fp8_format", "bf16"}
    return settings, read


def data(flags: Flags) -> Rule:
    """Corpora with their weights, and the folder of the run."""
    settings, read = dict[str, str](), set[str]()
    for name, key in (
        ("data_path", "data"),
        ("train_data_path", "data"),
        ("valid_data_path", "data.validation"),
    ):
        if prefixes := flags.get(name):
            pairs = zip(prefixes[::2], prefixes[1::2], strict=False)
            is_blend = len(prefixes) > 1 and key == "data"
            blend = ",".join(f"{weight} {prefix}" for weight, prefix in pairs)
            settings["data.blend" if is_blend else "data.path" if key == "data" else key] = (
                f"[{blend}]" if is_blend else prefixes[0]
            )
            read.add(name)
    if "mock_data" in flags:
        settings["data"] = "synthetic"
        read.add("mock_data")
    if flags.get("load") == flags.get("save"):  # a run that is there is continued
        read.add("load")
    return settings, read
