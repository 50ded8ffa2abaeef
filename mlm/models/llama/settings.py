"""Settings of the Llama family alone: model.options.NAME, checked and typed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated

from mlm.config.fields import OnlyIf, exact
from mlm.config.suggest import nearest
from mlm.models.config import ModelConfig
from mlm.models.family import Architecture, option_problem
from mlm.models.gpt2.family import decoder_problem
from mlm.parallel.config import EXPERTS, RouterSettings
from mlm.util.errors import ConfigError, Problem, format_value

MODEL_TYPES = (
    *("llama", "arcee", "ernie4_5", "glm", "helium", "phi3", "seed_oss", "glm4", "granite"),
    *("starcoder2", "stablelm", "nemotron", "cohere", "cohere2", "internlm3", "mistral", "ministral"),
    *("smollm3", "qwen2", "qwen3", "mixtral", "granitemoe", "ernie4_5_moe", "glm4_moe", "qwen3_moe"),
    *("qwen2_moe", "olmoe", "deepseek_v3", "deepseek_v2", "gpt_oss", "olmo2", "olmo3", "gemma"),
    *("gemma2", "gemma3_text"),
)
"""Values of model_type: the rows of VARIANTS (mlm/convert/huggingface/llama_variants.py)."""
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
SCALED = OnlyIf("rope_scaling", *ROPE_TYPES[1:])
LLAMA3, YARN = OnlyIf("rope_scaling", "llama3"), OnlyIf("rope_scaling", "yarn")
LONGROPE = OnlyIf("rope_scaling", "longrope")
LATENT = OnlyIf("kv_lora_rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSettings(RouterSettings):
    """Differences between Llama, Mistral, Qwen 2 and Qwen 3; the defaults are the first Llama's."""

    num_kv_heads: int = 0
    """Heads of keys and values, K, each shared by num_heads / K queries (arXiv:2305.13245); 0 means
    num_heads. Of tp and K one must divide the other: ranks beyond K hold copies."""
    head_dim: int = 0
    """Width of a head, D; 0 means hidden_size / num_heads."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies (arXiv:2104.09864)."""
    rotary_fraction: float = 1.0
    """Share of a head's dimensions that are turned, the first ones."""
    rope_scaling: str = "default"
    """Scaling of the frequencies for longer contexts: default (none), linear (arXiv:2306.15595), dynamic (of
    texts beyond max_positions, which are truncated here, so that it is kept for exports alone), llama3
    (arXiv:2407.21783, section 3.4.2), yarn (arXiv:2309.00071) or longrope (arXiv:2402.13753)."""
    rope_factor: Annotated[float, SCALED] = 1.0
    """Factor by which the context becomes longer."""
    rope_original_positions: Annotated[int, OnlyIf("rope_scaling", "llama3", "yarn", "longrope")] = 0
    """Context before scaling, in tokens, of llama3, yarn and longrope; 0 means max_positions."""
    rope_low_freq_factor: Annotated[float, LLAMA3] = 1.0
    """Of llama3: wavelengths beyond the original context over this are scaled in full."""
    rope_high_freq_factor: Annotated[float, LLAMA3] = 4.0
    """Of llama3: wavelengths below the original context over this stay."""
    rope_beta_fast: Annotated[float, YARN] = 32.0
    """Of yarn: dimensions that turn more often in the original context stay."""
    rope_beta_slow: Annotated[float, YARN] = 1.0
    """Of yarn: dimensions that turn less often are scaled in full."""
    rope_short_factors: Annotated[str, LONGROPE] = ""
    """Of longrope: a divisor of each frequency, separated by spaces, in passes up to the original context."""
    rope_long_factors: Annotated[str, LONGROPE] = ""
    """Of longrope: the same in longer passes."""
    rope_attention_factor: Annotated[float, OnlyIf("rope_scaling", "yarn", "longrope")] = 0.0
    """Of yarn and longrope: factor of cosines and sines; 0 means yarn's 0.1 ln(rope_factor) + 1 or
    longrope's sqrt(1 + ln(rope_factor) / ln(rope_original_positions))."""
    rope_truncate: Annotated[bool, YARN] = True
    """Of yarn: round the dimensions where its ramp begins and ends to whole ones."""
    rope_mscale: Annotated[float, YARN] = 0.0
    """Of yarn and latent attention: scores are multiplied by (0.1 rope_mscale ln(rope_factor) + 1)^2, as
    DeepSeek-V3's mscale_all_dim."""
    window: int = 0
    """Tokens that each attends to, itself included (arXiv:2310.06825, section 2); 0 for all before it."""
    window_layers: Annotated[str, OnlyIf("window")] = ""
    """Of window: the layers that have it, as a pattern of s (sliding) and f (full) that repeats, such as OLMo
    3's sssf; empty for all."""
    window_rope_theta: Annotated[float, OnlyIf("window")] = 0.0
    """Of window: base of the rotary frequencies of layers that have it, which are not scaled (Gemma 3,
    arXiv:2503.19786, section 2); 0 for the other layers'."""
    rotary_layers: str = ""
    """Layers that turn queries and keys, as a pattern of r (rotary) and n (no positions) that repeats, such
    as SmolLM3's rrrn (arXiv:2501.18795); empty for all."""
    attention_multiplier: float = 0.0
    """Factor of attention's scores, in Gemma query_pre_attn_scalar^-0.5; 0 means 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """Bound of attention's scores, softcap * tanh(scores / softcap) (Gemma 2, arXiv:2408.00118, section 2); 0
    for none."""
    attention_sinks: bool = False
    """A learned logit for each head, which takes probability from the tokens that a query attends to and has
    no value, as gpt-oss (arXiv:2309.17453). Without model.attention_dropout."""
    logit_softcap: float = 0.0
    """Bound of the logits, in the same way; 0 for none."""
    embedding_multiplier: float = 1.0
    """Factor of the token table's rows as they enter the first layer, in Gemma sqrt(hidden_size)."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP as they join the residual stream, as Granite."""
    logit_multiplier: float = 1.0
    """Factor of the logits, in Granite 1 / logits_scaling, in Cohere logit_scale."""
    parallel: bool = False
    """Attention and MLP read one norm of the residual stream and are added to it together, as Cohere."""
    layer_norm: bool = False
    """Norms subtract the mean too, as LayerNorm (arXiv:1607.06450), as StableLM, StarCoder 2 and Cohere."""
    norm_bias: Annotated[bool, OnlyIf("layer_norm")] = False
    """Of layer_norm: biases."""
    input_norms: bool = True
    """Norm the inputs of attention and MLP."""
    output_norms: bool = False
    """Norm the outputs of attention and MLP before they join the residual stream: with input_norms as Gemma
    2 (arXiv:2408.00118, section 2), without as OLMo 2 (arXiv:2501.00656, section 3.1)."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight, as Gemma; Megatron-LM's --apply-layernorm-1p."""
    qk_norm: bool = False
    """Norm the queries and keys of each head before they are turned, as Qwen 3 (arXiv:2302.05442)."""
    qk_norm_whole: Annotated[bool, OnlyIf("qk_norm")] = False
    """Of qk_norm: norm all heads together, as OLMoE (arXiv:2409.02060, section 4.2.5)."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, as Qwen 2."""
    bias: bool = False
    """Biases of attention's output, of the MLP and of experts."""
    gated: bool = True
    """Multiply the MLP's input by a gate (arXiv:2002.05202); without, model.activation alone is between two
    matrices, as in Nemotron and StarCoder 2."""
    tied: bool = False
    """Take the token table for the output layer."""
    swiglu_limit: float = 0.0
    """Bound of a clamped SwiGLU, (u + 1) g / (1 + exp(-swiglu_alpha g)), with gates g up to it and u between
    its negative and it, as gpt-oss; 0 for none. Of model.activation=silu."""
    swiglu_alpha: Annotated[float, OnlyIf("swiglu_limit")] = 1.702
    """Of swiglu_limit: factor of the gate in the logistic function."""
    kv_lora_rank: int = 0
    """Width of the latent vector that keys and values come from (arXiv:2405.04434, section 2.1); 0 for the
    usual attention. Then head_dim is the width of queries and keys, rope_head_dim included."""
    q_lora_rank: Annotated[int, LATENT] = 0
    """Of latent attention: width of the latent vector that queries come from; 0 for none."""
    rope_head_dim: Annotated[int, LATENT] = 0
    """Of latent attention: rotary dimensions of a head; the keys' are shared by all heads."""
    v_head_dim: Annotated[int, LATENT] = 0
    """Of latent attention: width of a head's values; 0 means head_dim."""
    expert_ffn_size: Annotated[int, EXPERTS] = 0
    """Width of an expert; 0 means model.ffn_hidden_size. With expert_tp=tp a multiple of tp."""
    shared_experts: Annotated[int, EXPERTS] = 0
    """Further experts that every token goes through (arXiv:2401.06066), as one MLP of their width."""
    shared_gate: Annotated[bool, OnlyIf("shared_experts")] = False
    """Multiply the output of the shared experts by the sigmoid of a learned projection of their input to one
    number, as Qwen2-MoE."""
    dense_layers: Annotated[int, EXPERTS] = 0
    """First layers that have an MLP of model.ffn_hidden_size and no experts."""
    model_type: str = ""
    """The model_type of transformers that it is stored as where several compute the same, such as helium and
    ernie4_5 for llama; empty for the first that does."""

    @classmethod
    def of(cls, model: ModelConfig) -> "LlamaSettings":
        """Settings of a model, with its defaults filled in and values of a wrong type ignored."""
        values = {
            name: type(DEFAULTS[name])(value)
            for name, value in model.options.items()
            if name in DEFAULTS and option_problem(DEFAULTS, name, value) is None
        }
        values["num_kv_heads"] = values.get("num_kv_heads") or model.num_heads
        values["head_dim"] = values.get("head_dim") or model.hidden_size // model.num_heads
        if values.get("kv_lora_rank"):
            values["v_head_dim"] = values.get("v_head_dim") or values["head_dim"]
        values["rope_original_positions"] = values.get("rope_original_positions") or model.max_positions
        if values.get("num_experts"):
            values["expert_ffn_size"] = values.get("expert_ffn_size") or model.ffn_size
        return cls(**values)  # type: ignore[arg-type]

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated, R."""
        return self.rope_head_dim if self.kv_lora_rank else int(self.head_dim * exact(self.rotary_fraction))

    @property
    def score_factor(self) -> float:
        """Factor of attention's scores before the softmax, in addition to 1 / sqrt(head_dim)."""
        is_scaled = self.rope_scaling == "yarn" and self.rope_mscale > 0
        return (0.1 * self.rope_mscale * math.log(self.rope_factor) + 1.0) ** 2 if is_scaled else 1.0

    def is_rotary(self, layer: int) -> bool:
        """True if a layer, by its global number, turns queries and keys."""
        return not self.rotary_layers or self.rotary_layers[layer % len(self.rotary_layers)] == "r"

    @property
    def swiglu_clamp(self) -> tuple[float, float] | None:
        """Limit and alpha of a clamped SwiGLU; None for another gate."""
        return (self.swiglu_limit, self.swiglu_alpha) if self.swiglu_limit else None

    def has_experts(self, layer: int) -> bool:
        """True if a layer, by its global number, has experts in place of its MLP."""
        return self.num_experts > 0 and layer >= self.dense_layers


DEFAULTS: dict[str, bool | int | float | str] = {
    field.name: field.default  # type: ignore[misc]
    for field in fields(LlamaSettings)
}
EXPERT_OPTIONS = {
    *(field.name for field in fields(RouterSettings)),
    *("expert_ffn_size", "shared_experts", "shared_gate", "dense_layers"),
}
"""Options that mean nothing without experts."""


LLAMA_FORMS = (
    *("rotary_layers", "attention_multiplier", "attention_softcap", "attention_sinks", "logit_softcap"),
    *("embedding_multiplier", "input_norms", "output_norms", "zero_centered_norms"),
    *("bias", "gated", "residual_multiplier", "logit_multiplier", "parallel", "layer_norm"),
    "swiglu_limit",
)
"""Options that plain Llama implementations lack: converters reject other values than the defaults."""


def unusual_form(settings: LlamaSettings) -> str | None:
    """Return NAME=VALUE of the first of LLAMA_FORMS that is not a plain Llama's; None if there is none."""
    for name in LLAMA_FORMS:
        if (value := getattr(settings, name)) != DEFAULTS[name]:
            return f"{name}={format_value(value)}"
    return None


def architecture(model: ModelConfig) -> Architecture:
    settings = LlamaSettings.of(model)
    return Architecture(
        head_dim=settings.head_dim,
        kv_heads=settings.num_kv_heads,
        value_dim=settings.v_head_dim,
        gated=settings.gated,
        bias=settings.bias,
        learned_positions=False,
        tied=settings.tied,
        window=settings.window,
        window_layers=settings.window_layers,
        attention_scale=settings.attention_multiplier or None,
        attention_softcap=settings.attention_softcap,
        embedding_multiplier=settings.embedding_multiplier,
        changes_positions_after=(
            settings.rope_original_positions if settings.rope_scaling == "longrope" else 0
        ),
        residual_multiplier=settings.residual_multiplier,
        logit_multiplier=settings.logit_multiplier,
        is_parallel=settings.parallel,
        input_norms=settings.input_norms,
        output_norms=settings.output_norms,
        experts=settings.num_experts,
        experts_per_token=settings.experts_per_token if settings.num_experts else 0,
        active_size=(settings.experts_per_token + settings.shared_experts) * settings.expert_ffn_size,
        dense_layers=settings.dense_layers if settings.num_experts else 0,
    )


def dense_twin(model: ModelConfig) -> ModelConfig | None:
    """Return the dense model to upcycle from; None for a dense model. Raises ConfigError if it differs."""
    settings = LlamaSettings.of(model)
    if not settings.num_experts:
        return None
    for name, value, fits in (
        ("expert_ffn_size", settings.expert_ffn_size, model.ffn_size),
        ("shared_experts", settings.shared_experts, 0),
    ):
        if value != fits:
            key = f"model.options.{name}"
            problem = f"{key}={value}: experts that start from a dense model are copies of its MLP"
            raise ConfigError([Problem((key,), problem, f"set {key}={fits}")])
    options = {name: value for name, value in model.options.items() if name not in EXPERT_OPTIONS}
    return replace(model, options=options)


def warning(model: ModelConfig) -> str | None:
    """Return a line on settings by which training depends on the layout."""
    settings = LlamaSettings.of(model)
    if not settings.num_experts or settings.balance != "micro_batch":
        return None
    return (
        "warning: model.options.balance=micro_batch evens loads in a rank's micro-batches: training depends "
        "on the layout; use global_batch, sequence or bias"
    )


def num_blocks(model: ModelConfig) -> int:
    """Number of blocks of the MLP, which every valid tp divides."""
    return math.gcd(model.num_heads, model.ffn_size)


def model_problem(model: ModelConfig) -> Problem | None:
    type_problems = (option_problem(DEFAULTS, name, value) for name, value in model.options.items())
    if first := next(filter(None, (decoder_problem(model), *type_problems)), None):
        return first
    settings = LlamaSettings.of(model)
    if settings.model_type not in ("", *MODEL_TYPES):
        near = nearest(settings.model_type, MODEL_TYPES)
        problem = f"model.options.model_type={format_value(settings.model_type)} is not supported"
        fix = f"use {near}" if near else "see the reference's page Model families, or remove it"
        return Problem(("model.options.model_type",), problem, fix)
    if model.activation == "relu2" and settings.gated:
        problem = "model.activation=relu2 has no gate, and model.options.gated=true gates SiLU or GELU"
        return Problem(("model.activation", "model.options.gated"), problem, "use model.options.gated=false")
    for name, why, fix in _problems(model, settings):
        key = f"model.options.{name}"
        return Problem((key,), f"{key}={format_value(getattr(settings, name))} {why}", fix)
    return None


Problems = Iterator[tuple[str, str, str]]
"""Setting, problem and fix; only the first is asked for."""


def _problems(model: ModelConfig, settings: LlamaSettings) -> Problems:
    heads, kv = model.num_heads, settings.num_kv_heads
    if heads % kv:
        valid = [n for n in range(1, heads + 1) if heads % n == 0]
        nearest = min(valid, key=lambda n: abs(n - kv))
        why = f"does not divide model.num_heads={heads}"
        yield "num_kv_heads", why, f"use model.options.num_kv_heads={nearest}"
    yield from _latent_problems(model, settings)
    yield from _pattern_problems(settings)
    if settings.attention_sinks and model.attention_dropout:
        why = f"does not go with model.attention_dropout={model.attention_dropout:g}"
        yield "attention_sinks", why, "set model.attention_dropout=0"
    if settings.qk_norm_whole and not settings.qk_norm:
        yield "qk_norm_whole", "is a form of qk_norm", "set model.options.qk_norm=true too"
    if settings.qk_norm_whole and settings.zero_centered_norms:
        yield "qk_norm_whole", "has no zero-centered form", "set model.options.zero_centered_norms=false"
    if settings.norm_bias and not settings.layer_norm:
        yield "norm_bias", "is of LayerNorm", "set model.options.layer_norm=true too"
    if settings.parallel and (settings.output_norms or not settings.input_norms):
        yield "parallel", "has one norm, of the input", "remove input_norms and output_norms"
    for name in ("residual_multiplier", "logit_multiplier", "embedding_multiplier"):
        if getattr(settings, name) == 0:
            yield name, "must be above 0", "use 1.0 for none"
    if not settings.input_norms and not settings.output_norms:
        yield "input_norms", "leaves layers without norms", "set model.options.output_norms=true too"
    if settings.window_rope_theta and settings.window_rope_theta <= 1:
        yield "window_rope_theta", "must be greater than 1", "use 10000.0, or 0 for rope_theta"
    if settings.swiglu_limit and model.activation != "silu":
        yield "swiglu_limit", f"is of SiLU, not model.activation={model.activation}", "use 0, or silu"
    if settings.rope_scaling not in ROPE_TYPES:
        yield "rope_scaling", "is not supported", f"use {', '.join(ROPE_TYPES[:-1])} or {ROPE_TYPES[-1]}"
    if not 0 < settings.rotary_fraction <= 1:
        yield "rotary_fraction", "must be above 0 and at most 1", "use 1.0 for all of a head"
    if settings.head_dim > 2**16:
        yield "head_dim", "must be at most 65536", "use the width of one head"
    if settings.rotary_dim < 2 or settings.rotary_dim % 2:
        why = f"is turned in pairs, and rotary_fraction={settings.rotary_fraction:g} of it are "
        why += f"{settings.rotary_dim} dimensions"
        yield "head_dim", why, "use heads of an even width"
    if settings.rope_theta <= 1:
        yield "rope_theta", "must be greater than 1", "use 10000.0"
    if settings.rope_factor < 1:
        yield "rope_factor", "must be 1 or more", "use 1.0 for none"
    if settings.rope_scaling == "longrope":
        yield from _longrope_problems(settings)
    low, high = settings.rope_low_freq_factor, settings.rope_high_freq_factor
    if settings.rope_scaling == "llama3" and not 0 < low < high:
        why = f"must be greater than rope_low_freq_factor={low:g}, and that greater than 0"
        yield "rope_high_freq_factor", why, "use 4.0 and 1.0"
    if settings.rope_scaling == "yarn" and not 0 < settings.rope_beta_slow <= settings.rope_beta_fast:
        why = f"must be at least rope_beta_slow={settings.rope_beta_slow:g}, and that greater than 0"
        yield "rope_beta_fast", why, "use 32.0 and 1.0"
    yield from _mixture_problems(model, settings)


def _longrope_problems(settings: LlamaSettings) -> Problems:
    count = settings.rotary_dim // 2
    for name in ("rope_short_factors", "rope_long_factors"):
        numbers = getattr(settings, name).split()
        try:
            is_valid = len(numbers) == count and all(0 < float(n) < math.inf for n in numbers)
        except ValueError:
            is_valid = False
        if not is_valid:
            yield name, f"must be {count} numbers above 0", "separate them by spaces"
    if settings.rope_original_positions < 2:
        yield "rope_original_positions", "must be 2 or more", "use the context of pretraining"


def _pattern_problems(settings: LlamaSettings) -> Problems:
    for name, letters, usual in (("window_layers", "sf", "sssf"), ("rotary_layers", "rn", "rrrn")):
        pattern = getattr(settings, name)
        if set(pattern) - set(letters):
            why = f"has other letters than {letters[0]} and {letters[1]}"
            yield name, why, f"use a pattern such as {usual}"


def _latent_problems(model: ModelConfig, settings: LlamaSettings) -> Problems:
    if not settings.kv_lora_rank:
        return
    most = settings.head_dim - 1
    if not 0 < settings.rope_head_dim <= most or settings.rope_head_dim % 2:
        fix = f"of head_dim={settings.head_dim} it takes an even number of dimensions, from 2 to {most}"
        yield "rope_head_dim", "does not go with latent attention", fix
    if settings.v_head_dim > settings.head_dim:
        yield "v_head_dim", f"must be at most head_dim={settings.head_dim}", "use a larger head_dim"
    usual: dict[str, object] = {"qk_norm": False, "qkv_bias": False, "window": 0, "rotary_fraction": 1.0}
    usual |= {"rotary_layers": "", "attention_multiplier": 0.0, "attention_softcap": 0.0}
    usual |= {"attention_sinks": False}
    for name, value in {**usual, "num_kv_heads": model.num_heads}.items():
        if getattr(settings, name) != value:
            yield name, "does not go with latent attention (kv_lora_rank)", "remove it"


def _mixture_problems(model: ModelConfig, settings: LlamaSettings) -> Problems:
    experts, groups = settings.num_experts, settings.router_groups
    if not experts:
        return
    if settings.shared_gate and not settings.shared_experts:
        yield "shared_gate", "is of shared experts", "set model.options.shared_experts too"
    if not settings.gated:
        yield "gated", "does not go with experts (num_experts)", "remove it"
    balances = ("none", "bias", "sequence", "global_batch", "micro_batch")
    for name, values in (("router_scores", ("softmax", "sigmoid")), ("balance", balances)):
        if getattr(settings, name) not in values:
            yield name, "is not supported", f"use {', '.join(values[:-1])} or {values[-1]}"
    if settings.dense_layers >= model.num_layers:
        why = f"leaves no layer of model.num_layers={model.num_layers} to experts"
        yield "dense_layers", why, "use fewer, or model.options.num_experts=0"
    if groups < 1 or experts % groups:
        why = f"does not divide model.options.num_experts={experts}"
        yield "router_groups", why, f"use model.options.router_groups={math.gcd(experts, groups)}"
    if not 1 <= settings.router_top_groups <= groups:
        why = f"must be from 1 to model.options.router_groups={groups}"
        yield "router_top_groups", why, f"use model.options.router_top_groups={groups}"
    most = experts // groups * settings.router_top_groups
    if not 1 <= settings.experts_per_token <= most:
        bound = f"model.options.num_experts={experts}"
        if most < experts:
            bound = f"the {most} experts of router_top_groups={settings.router_top_groups} groups"
        fix = f"use model.options.experts_per_token={max(1, min(settings.experts_per_token, most))}"
        yield "experts_per_token", f"must be from 1 to {bound}", fix
    if settings.router_group_best < 1:
        yield "router_group_best", "must be 1 or more", "use 2, or 1 for the best expert alone"
    if not settings.router_scale > 0:
        yield "router_scale", "must be above 0", "use 1.0 for none"
