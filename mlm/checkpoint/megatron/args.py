"""Arguments of a Megatron-LM run (its `args`) as the settings of our model, or why it is not supported.

An argument that a version did not have is absent, and has that version's one behaviour.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlm.checkpoint.megatron.files import printable
from mlm.models.config import ModelConfig
from mlm.models.family import SHIPPED, family_of
from mlm.models.megatron import MegatronMapping
from mlm.util.errors import CorruptFileError, UserError


def mappings() -> dict[str, MegatronMapping]:
    """Return kind of model -> its mapping, in the order in which they are tried."""
    known = {kind: family_of(kind).megatron for kind in SHIPPED}
    return {kind: mapping for kind, mapping in known.items() if mapping is not None}


def family_names() -> str:
    """Return the names of what is imported, for messages."""
    return " and ".join(mapping.name for mapping in mappings().values())


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model that the tensors show."""

    fields: Mapping[str, int]
    """Fields of ModelConfig, num_layers among them; vocab_size is the rows of the token table, padding
    included."""
    tp: int


class Settings:
    """The args of one rank file. Values of unexpected types are never read."""

    def __init__(self, args: Any, path: Path) -> None:
        self.path = path
        self.known = args is not None
        """True if the file holds any; those of 2019 do not."""
        if self.known and type(args) is not argparse.Namespace:
            raise CorruptFileError(
                f"{path}: its args are {type(args).__name__}, not a Namespace: copy it again"
            )
        self.values: Mapping[str, Any] = vars(args) if self.known else {}

    def number(self, *names: str) -> int | None:
        """Return the first of these that is given and not None, a positive whole number.

        Raises CorruptFileError if it is no such number.
        """
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if type(value) is not int or value < 1:
                    raise self._odd(name, value)
                return value
        return None

    def fraction(self, *names: str, default: float, least: float = 0.0) -> float:
        """Return the first of these that is given, from `least` to below 1. Raises CorruptFileError."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if type(value) not in (int, float) or not least <= value < 1:
                    raise self._odd(name, value)
                return float(value)
        return default

    def _odd(self, name: str, value: Any) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path}: args.{name}={describe_value(value)} is out of range: copy it again"
        )


def describe_value(value: Any) -> str:
    """Return a value for a message; one of a type that args do not have is named by its type."""
    if type(value) is int and abs(value) >= 1 << 63:
        return "(a huge number)"
    plain = value is None or type(value) in (bool, int, float, str)
    return printable(str(value)) if plain else f"({type(value).__name__})"


def import_summary(mapping: MegatronMapping) -> str:
    """Return what is imported, for a message about something else."""
    return f"mlm imports {family_names()}: {mapping.summary}"


def unsupported_arguments(settings: Settings, mapping: MegatronMapping) -> list[str]:
    """Return a line for each argument that makes a model which the family is not."""
    values, ours = settings.values, import_summary(mapping)
    problems = [
        f"args.{name}={describe_value(values[name])}: {ours}"
        for name, supported in mapping.args.items()
        if name in values and not any(values[name] is one or _equal(values[name], one) for one in supported)
    ]
    heads = settings.number("num_attention_heads")
    if not is_usual_softmax_scale(settings, heads):
        problems.append(
            f"args.softmax_scale={describe_value(values['softmax_scale'])}, not 1/sqrt(head width): {ours}"
        )
    if values.get("group_query_attention") is True and settings.number("num_query_groups") != heads:
        problems.append(f"args.group_query_attention=True with fewer groups than heads: {ours}")
    return [f"{settings.path}: {problem}" for problem in problems]


def is_usual_softmax_scale(settings: Settings, heads: int | None) -> bool:
    """Return True if attention scores are divided by the square root of a head's width, as ours are."""
    scale = settings.values.get("softmax_scale")
    if scale is None:
        return True
    hidden = settings.number("hidden_size")
    width = settings.number("kv_channels") or (hidden // heads if hidden and heads else None)
    return type(scale) is float and width is not None and math.isclose(scale, width**-0.5, rel_tol=1e-6)


def check_layout(settings: Settings, tp: int, pp: int) -> None:
    """Raise CorruptFileError if the run had more or fewer ranks than there are files."""
    for names, count in (
        (("tensor_model_parallel_size", "model_parallel_size"), tp),
        (("pipeline_model_parallel_size",), pp),
    ):
        recorded = settings.number(*names)
        if recorded is not None and recorded != count:
            raise CorruptFileError(
                f"{settings.path}: args.{names[0]}={recorded}, but there are files of {count}: "
                f"{'copy the others too' if recorded > count else 'delete those of another run'}"
            )


def _equal(value: Any, one: Any) -> bool:
    return type(value) is type(one) and bool(value == one)


def shape_config(settings: Settings, kind: str, sizes: Sizes) -> ModelConfig:
    """Return a model with all shapes of the files; the number of heads is none of them."""
    ffn = sizes.fields.get("ffn_hidden_size")
    known = {
        **sizes.fields,
        **mappings()[kind].settings(settings.values),
        "ffn_hidden_size": None if ffn == 4 * sizes.fields["hidden_size"] else ffn,
    }
    return ModelConfig(kind=kind, num_heads=1, **known)


def model_config(
    settings: Settings, kind: str, sizes: Sizes, *, num_heads: int | None, vocab_size: int
) -> ModelConfig:
    """Return the model that arguments and tensors agree on; `num_heads` is for files without args.

    Raises CorruptFileError where they disagree, UserError if the number of heads is not known.
    """
    path, h = settings.path, sizes.fields["hidden_size"]
    pairs = {
        "num_layers": ("num_layers", "encoder_num_layers"),
        "hidden_size": ("hidden_size",),
        "ffn_hidden_size": ("ffn_hidden_size",),
        "max_positions": ("max_position_embeddings",),
    }
    for name, names in pairs.items():
        recorded, actual = settings.number(*names), sizes.fields.get(name)
        if recorded is not None and actual is not None and recorded != actual:
            raise CorruptFileError(
                f"{path}: args.{names[0]}={recorded}, but the files make {actual}: they are not of one run"
            )
    recorded_heads = settings.number("num_attention_heads")
    if recorded_heads and num_heads and recorded_heads != num_heads:
        raise UserError(
            f"num_heads={num_heads}: args.num_attention_heads={recorded_heads}: leave num_heads out"
        )
    heads = recorded_heads or num_heads
    if heads is None:
        raise UserError(
            f"{path}: does not record the number of attention heads: give num_heads=… "
            f"(64 columns each in GPT-2: num_heads={max(1, h // 64)})"
        )
    width = settings.number("kv_channels") or h // heads
    if h % heads or heads % sizes.tp or width * heads != h:
        remedy = "give another num_heads=…" if recorded_heads is None else import_summary(mappings()[kind])
        raise UserError(
            f"num_heads={heads} does not fit hidden_size={h} at tp={sizes.tp}, heads of {width} columns: "
            f"{remedy}"
        )
    return replace(
        shape_config(settings, kind, sizes),
        num_heads=heads,
        vocab_size=vocab_size,
        hidden_dropout=settings.fraction("hidden_dropout", default=0.1),
        attention_dropout=settings.fraction("attention_dropout", default=0.1),
        init_std=settings.fraction("init_method_std", default=0.02),
        layer_norm_eps=settings.fraction("norm_epsilon", "layernorm_epsilon", default=1e-5, least=1e-30),
    )


def true_vocabulary(
    settings: Settings, kind: str, sizes: Sizes, *, vocab_size: int | None, known: int | None
) -> int:
    """Return the rows of the token table that are tokens.

    Those are `vocab_size`, the tokenizer's (`known`), or those of a published tokenizer.

    Raises UserError if they do not fit the table, or the published would leave out more than padding.
    """
    rows, mapping = sizes.fields["vocab_size"], mappings()[kind]
    if vocab_size is None and known is None:
        quantum = (settings.number("make_vocab_size_divisible_by") or 128) * sizes.tp
        published = mapping.vocabularies
        for tokens in published:
            if tokens <= rows < tokens + quantum:
                return tokens
        raise UserError(
            f"vocab_size=null: the token table has {rows} rows, which {mapping.name}'s "
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
    """Return what differs a little from the run that wrote it, one line each."""
    lines = list(mappings()[kind].notes(settings.values))
    if not settings.known:
        lines.append("it holds no args: dropout, layer norm epsilon and initial weights take mlm's defaults")
    return tuple(lines)
