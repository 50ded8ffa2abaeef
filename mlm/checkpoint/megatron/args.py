"""What a Megatron-LM run was told (its `args`) as the shape of our model, or why it is no model of ours.

Source: NVIDIA/Megatron-LM, arguments.py from 2020 to 2025. A setting that a version did not have is absent,
and has that version's one behaviour.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlm.checkpoint.megatron.files import shown
from mlm.errors import ConfigError, CorruptFileError, UserError
from mlm.models.config import ModelConfig

VOCABULARIES = {"gpt2": (50257,), "bert": (30522, 28996)}
"""Tokens of the published ones: GPT-2's; BERT's, uncased and cased."""
OURS = "mlm imports GPT-2 and BERT: layer norm first, learned positions, gelu, biases, tied embeddings"

TOKEN_TYPES = 2
"""Rows of BERT's table of token types, where it has one."""

FOREIGN = (
    ("use_rotary_position_embeddings", (None, False)),
    ("position_embedding_type", (None, "learned_absolute")),
    ("add_position_embedding", (None, True)),
    ("normalization", (None, "LayerNorm")),
    ("apply_layernorm_1p", (None, False)),
    ("apply_residual_connection_post_layernorm", (None, False)),
    ("swiglu", (None, False)),
    ("squared_relu", (None, False)),
    ("quick_geglu", (None, False)),
    ("untie_embeddings_and_output_weights", (None, False)),
    ("add_bias_linear", (None, True)),
    ("disable_bias_linear", (None, False)),
    ("num_experts", (None, 0, 1)),
    ("multi_latent_attention", (None, False)),
    ("qk_layernorm", (None, False)),
    ("qk_l2_norm", (None, False)),
    ("softmax_type", (None, "vanilla")),
    ("use_mup", (None, False)),  # multiplies embeddings, logits and attention by widths
    ("scaling_recipe", (None, "none")),
    ("window_size", (None,)),
    ("attention_output_gate", (None, False)),
    ("activation_func_clamp_value", (None,)),
    ("mtp_num_layers", (None, 0)),
    ("retro_add_retriever", (None, False)),
    ("hybrid_override_pattern", (None,)),
)
"""Settings that make another model of it, and the values that do not."""


@dataclass(frozen=True)
class Shapes:
    """What the tensors themselves tell."""

    kind: Literal["gpt2", "bert"]
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    max_positions: int
    table_rows: int
    """Rows of the token table, padding included."""
    tp: int
    pp: int


class Settings:
    """The args of one rank file. Values of kinds that are not asked for are never looked at."""

    def __init__(self, args: Any, path: Path) -> None:
        self.path = path
        self.known = args is not None
        """Whether the file holds any; those of 2019 do not."""
        if self.known and type(args) is not argparse.Namespace:
            raise CorruptFileError(
                f"{path}: its args are {type(args).__name__}, not a Namespace: copy it again"
            )
        self.values: Mapping[str, Any] = vars(args) if self.known else {}

    def number(self, *names: str) -> int | None:
        """The first of these settings that is there and not None, a positive whole number.

        Raises CorruptFileError when it is no such number.
        """
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if type(value) is not int or value < 1:
                    raise self._odd(name, value)
                return value
        return None

    def fraction(self, *names: str, default: float, least: float = 0.0) -> float:
        """The first of these settings that is there, from `least` to below 1. Raises CorruptFileError."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if type(value) not in (int, float) or not least <= value < 1:
                    raise self._odd(name, value)
                return float(value)
        return default

    def _odd(self, name: str, value: Any) -> CorruptFileError:
        return CorruptFileError(f"{self.path}: args.{name}={say(value)} is out of range: copy it again")


def say(value: Any) -> str:
    """A value for a message; one of a kind that args do not have is named by its kind."""
    if type(value) is int and abs(value) >= 1 << 63:
        return "(a huge number)"
    plain = value is None or type(value) in (bool, int, float, str)
    return shown(str(value)) if plain else f"({type(value).__name__})"


def check_ours(settings: Settings) -> None:
    """Raises ConfigError, a line for each setting that makes it a model we do not have."""
    values = settings.values
    faults = [
        f"args.{name}={say(values[name])}: {OURS}"
        for name, ours in FOREIGN
        if name in values and not any(values[name] is one or _equal(values[name], one) for one in ours)
    ]
    heads = settings.number("num_attention_heads")
    if not is_usual_softmax_scale(settings, heads):
        faults.append(f"args.softmax_scale={say(values['softmax_scale'])}, not 1/sqrt(head width): {OURS}")
    if values.get("group_query_attention") is True and settings.number("num_query_groups") != heads:
        faults.append(f"args.group_query_attention=True with fewer groups than heads: {OURS}")
    if faults:
        raise ConfigError([f"{settings.path}: {fault}" for fault in faults])


def is_usual_softmax_scale(settings: Settings, heads: int | None) -> bool:
    """True if attention scores are divided by the square root of a head's width, as ours are."""
    scale = settings.values.get("softmax_scale")
    if scale is None:
        return True
    hidden = settings.number("hidden_size")
    width = settings.number("kv_channels") or (hidden // heads if hidden and heads else None)
    return type(scale) is float and width is not None and math.isclose(scale, width**-0.5, rel_tol=1e-6)


def check_layout(settings: Settings, tp: int, pp: int) -> None:
    """Raises CorruptFileError when the run had more or fewer ranks than there are files."""
    for names, found in (
        (("tensor_model_parallel_size", "model_parallel_size"), tp),
        (("pipeline_model_parallel_size",), pp),
    ):
        said = settings.number(*names)
        if said is not None and said != found:
            raise CorruptFileError(
                f"{settings.path}: args.{names[0]}={said}, but there are files of {found}: "
                f"{'copy the others too' if said > found else 'delete those of another run'}"
            )


def _equal(value: Any, one: Any) -> bool:
    return type(value) is type(one) and bool(value == one)


def model_config(
    settings: Settings, shapes: Shapes, *, num_heads: int | None, vocab_size: int
) -> ModelConfig:
    """The model that settings and tensors agree on; `num_heads` is for files without args.

    Raises CorruptFileError where they disagree, UserError when the number of heads is not known.
    """
    path, h = settings.path, shapes.hidden_size
    pairs = (
        (("num_layers", "encoder_num_layers"), shapes.num_layers),
        (("hidden_size",), h),
        (("ffn_hidden_size",), shapes.ffn_hidden_size),
        (("max_position_embeddings",), shapes.max_positions),
    )
    for names, found in pairs:
        said = settings.number(*names)
        if said is not None and said != found:
            raise CorruptFileError(
                f"{path}: args.{names[0]}={said}, but the files make {found}: they are not of one run"
            )
    said_heads = settings.number("num_attention_heads")
    if said_heads and num_heads and said_heads != num_heads:
        raise UserError(f"num_heads={num_heads}: args.num_attention_heads={said_heads}: leave num_heads out")
    heads = said_heads or num_heads
    if heads is None:
        raise UserError(
            f"{path}: does not say how many attention heads the model has: give num_heads=… "
            f"(64 columns each in GPT-2: num_heads={max(1, h // 64)})"
        )
    width = settings.number("kv_channels") or h // heads
    if h % heads or heads % shapes.tp or width * heads != h:
        raise UserError(
            f"num_heads={heads} does not fit hidden_size={h} at tp={shapes.tp}, heads of {width} columns: "
            f"{'give another num_heads=…' if said_heads is None else OURS}"
        )
    is_bert = shapes.kind == "bert"
    return ModelConfig(
        kind=shapes.kind,
        token_types=TOKEN_TYPES if is_bert else 0,
        activation="gelu_tanh" if is_tanh_gelu(settings) else "gelu",
        num_layers=shapes.num_layers,
        hidden_size=h,
        num_heads=heads,
        ffn_hidden_size=None if shapes.ffn_hidden_size == 4 * h else shapes.ffn_hidden_size,
        max_positions=shapes.max_positions,
        vocab_size=vocab_size,
        hidden_dropout=settings.fraction("hidden_dropout", default=0.1),
        attention_dropout=settings.fraction("attention_dropout", default=0.1),
        init_std=settings.fraction("init_method_std", default=0.02),
        layer_norm_eps=settings.fraction("norm_epsilon", "layernorm_epsilon", default=1e-5, least=1e-30),
    )


def true_vocabulary(settings: Settings, shapes: Shapes, *, vocab_size: int | None, known: int | None) -> int:
    """Rows of the token table that are tokens: `vocab_size`, or the tokenizer's (`known`), or the published.

    Raises UserError when they do not fit the table, or the published would leave out more than padding.
    """
    rows = shapes.table_rows
    if vocab_size is None and known is None:
        quantum = (settings.number("make_vocab_size_divisible_by") or 128) * shapes.tp
        published = VOCABULARIES[shapes.kind]
        for tokens in published:
            if tokens <= rows < tokens + quantum:
                return tokens
        name = "GPT-2" if shapes.kind == "gpt2" else "BERT"
        raise UserError(
            f"vocab_size=null: the token table has {rows} rows, which {name}'s "
            f"{' or '.join(map(str, published))} tokens do not fill: give vocab_size=… (tokens without "
            f"padding) or tokenizer=…"
        )
    if vocab_size is None:
        assert known is not None
        if known > rows:
            raise UserError(
                f"tokenizer: has {known} tokens, the token table {rows} rows: give its own tokenizer"
            )
        return known
    if vocab_size > rows:
        raise UserError(f"vocab_size={vocab_size}: the token table has {rows} rows: use {rows} or less")
    if known is not None and known > vocab_size:
        raise UserError(f"vocab_size={vocab_size}: the tokenizer has {known} tokens: leave vocab_size out")
    return vocab_size


def notes(settings: Settings, kind: str) -> tuple[str, ...]:
    """What differs a little from the run that wrote it, one line each."""
    said = []
    if kind == "bert" and is_tanh_gelu(settings) and not is_tanh_gelu_in_head(settings):
        said.append(
            "its masked-LM head was trained with the exact gelu, its layers with the tanh approximation "
            "(args.bias_gelu_fusion=True); mlm computes the approximation in both, within 5e-4 of the other"
        )
    if not settings.known:
        said.append("it holds no args: dropout, layer norm epsilon and initial weights take mlm's defaults")
    return tuple(said)


def is_tanh_gelu_in_head(settings: Settings) -> bool:
    """Whether BERT's masked-LM head computed the tanh form: the fused kernel is of the layers alone."""
    values = settings.values
    return values.get("openai_gelu") is True or "openai_gelu" not in values


def is_tanh_gelu(settings: Settings) -> bool:
    """Whether it computed gelu by its tanh form. That is Megatron-LM's fused kernel, its openai_gelu, and all
    of it before openai_gelu became a choice (2020); torch's gelu, its other choice, is the exact one.
    """
    values = settings.values
    if values.get("openai_gelu") is True:
        return True
    if values.get("onnx_safe"):
        return False
    return values.get("bias_gelu_fusion", "openai_gelu" not in values) is True
