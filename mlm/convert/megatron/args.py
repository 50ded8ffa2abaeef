"""Arguments of a Megatron-LM run (its `args`) as the settings of our model, or why it is not supported.

An argument that a version did not have is absent, and has that version's one behaviour.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlm.convert.dcp.unpickled import PickleError
from mlm.convert.megatron.files import printable
from mlm.convert.megatron.mapping import THROUGH_HF, MegatronMapping
from mlm.convert.megatron.mappings import MAPPINGS
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.util.errors import CorruptFileError, UserError

Sizes = Mapping[str, int]
"""Sizes that the tensors show, by field of ModelConfig. vocab_size is the rows of the token table, padding
included."""


def family_names(last: str = "and") -> str:
    """Return the names of what is imported, for messages."""
    *names, final = (mapping.name for mapping in MAPPINGS.values())
    return f"{', '.join(names)} {last} {final}"


@dataclass(frozen=True, kw_only=True)
class Given:
    """Settings that the files may not record."""

    vocab_size: int | None = None
    """Tokens without padding; None takes `known`, else a published size where it fits."""
    known: int | None = None
    """Tokens of the tokenizer."""
    num_heads: int | None = None
    config: ModelConfig | None = None
    """The model of a folder without arguments."""


class MegatronArgs:
    """The args of one rank file. Values of unexpected types are never read."""

    def __init__(self, args: Any, path: Path) -> None:
        self.path = path
        self.is_known = args is not None
        """True if the file holds any; those of 2019 do not."""
        self.values: Mapping[str, Any] = {}
        if self.is_known:
            try:
                self.values = args.fields("argparse.Namespace")
            except (AttributeError, PickleError):
                raise CorruptFileError(
                    f"{path}: its args are {type(args).__name__}, not a Namespace: copy it again"
                ) from None

    def number(self, *names: str) -> int | None:
        """Return the first of these that is given and not None, a positive whole number.

        Raises CorruptFileError if it is no such number.
        """
        name, value = self._first(names)
        if value is not None and (type(value) is not int or value < 1):
            raise self._out_of_range(name, value)
        return value

    def fraction(self, *names: str, default: float, least: float = 0.0) -> float:
        """Return the first of these that is given, from `least` to below 1. Raises CorruptFileError."""
        name, value = self._first(names)
        if value is None:
            return default
        if type(value) not in (int, float) or not least <= value < 1:
            raise self._out_of_range(name, value)
        return float(value)

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        given = ((name, self.values[name]) for name in names if self.values.get(name) is not None)
        return next(given, ("", None))

    def _out_of_range(self, name: str, value: Any) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path}: args.{name}={describe_value(value)} is out of range: copy it again"
        )


def describe_value(value: Any) -> str:
    """Return a value for a message; one of a type that args do not have is named by its type."""
    if type(value) is int and abs(value) >= 1 << 63:
        return "(a huge number)"
    plain = value is None or type(value) in (bool, int, float, str)
    return printable(str(value)) if plain else f"({type(value).__name__})"


def unsupported_arguments(args: MegatronArgs, mapping: MegatronMapping) -> list[str]:
    """Return a line for each argument that makes a model which the family is not."""
    values = args.values
    names = [
        name
        for name, supported in mapping.args.items()
        if name in values and not any(_equal(values[name], one) for one in supported)
    ]
    if args.is_known or mapping.required:
        names += [name for name in mapping.required if name not in values]
    heads = args.number("num_attention_heads")
    if not _is_usual_softmax_scale(args, heads):
        names.append("softmax_scale")
    is_grouped = values.get("group_query_attention") is True and not mapping.is_grouped
    if is_grouped and args.number("num_query_groups") != heads:
        names.append("group_query_attention")
    summary = f"mlm imports {family_names()}; of {mapping.name}, {mapping.summary}"
    return [
        f"{args.path}: args.{name}={describe_value(values.get(name))}: "
        + (THROUGH_HF if name == "num_experts" else summary)
        for name in names
    ]


def _equal(value: Any, one: Any) -> bool:
    return value is one or (type(value) is type(one) and bool(value == one))


def _is_usual_softmax_scale(args: MegatronArgs, heads: int | None) -> bool:
    """Return True if attention scores are divided by the square root of a head's width, as ours are."""
    scale = args.values.get("softmax_scale")
    if scale is None:
        return True
    hidden = args.number("hidden_size")
    width = args.number("kv_channels") or (hidden // heads if hidden and heads else None)
    return type(scale) is float and width is not None and math.isclose(scale, width**-0.5, rel_tol=1e-6)


def check_recorded(args: MegatronArgs, tp: int, pp: int, sizes: Sizes) -> None:
    """Raise CorruptFileError if the args record another layout or other sizes than the files show."""
    shown = {
        ("tensor_model_parallel_size", "model_parallel_size"): tp,
        ("pipeline_model_parallel_size",): pp,
        ("num_layers", "encoder_num_layers"): sizes["num_layers"],
        ("hidden_size",): sizes["hidden_size"],
        ("ffn_hidden_size",): sizes.get("ffn_hidden_size"),
        ("max_position_embeddings",): sizes.get("max_positions"),
    }
    for names, actual in shown.items():
        recorded = args.number(*names)
        if recorded is not None and actual is not None and recorded != actual:
            raise CorruptFileError(
                f"{args.path}: args.{names[0]}={recorded}, but there are files of {actual}: "
                "copy all files of one save"
            )


def shape_config(args: MegatronArgs, kind: str, sizes: Sizes, heads: int | None) -> ModelConfig:
    """Return a model with all shapes of the files. Raises UserError for one that its family is not."""
    ffn = sizes.get("ffn_hidden_size")
    known = {
        **sizes,
        **MAPPINGS[kind].settings(args.values),
        "ffn_hidden_size": None if ffn == 4 * sizes["hidden_size"] else ffn,
    }
    grouped = MAPPINGS[kind].is_grouped
    shape = ModelConfig(kind=kind, num_heads=heads if grouped and heads else 1, **known)
    if grouped and (problem := family_of(kind).model_problem(shape) or MAPPINGS[kind].problem(shape)):
        raise UserError(f"{args.path}: its args are those of no model of ours: {problem}")
    return shape


def model_config(
    args: MegatronArgs, shape: ModelConfig, tp: int, *, num_heads: int | None, vocab_size: int
) -> ModelConfig:
    """Return the model of `shape`; `num_heads` is for files without args.

    Raises UserError if the number of heads is not known or does not fit.
    """
    recorded, hidden = args.number("num_attention_heads"), shape.hidden_size
    heads = recorded or num_heads
    if heads is None:
        raise UserError(
            f"{args.path}: does not record the number of attention heads: give num_heads=… "
            f"(64 columns each in GPT-2: num_heads={max(1, hidden // 64)})"
        )
    width = args.number("kv_channels") or hidden // heads
    is_square = width * heads == hidden or MAPPINGS[shape.kind].is_grouped
    if num_heads not in (None, heads) or heads % tp or not is_square:
        raise UserError(
            f"num_heads={num_heads or heads} does not fit hidden_size={hidden} at tp={tp}, "
            f"args.num_attention_heads={recorded}, heads of {width} columns: give another num_heads=…"
        )
    return replace(
        shape,
        num_heads=heads,
        vocab_size=vocab_size,
        hidden_dropout=args.fraction("hidden_dropout", default=0.1),
        attention_dropout=args.fraction("attention_dropout", default=0.1),
        init_std=args.fraction("init_method_std", default=0.02),
        layer_norm_eps=args.fraction("norm_epsilon", "layernorm_epsilon", default=1e-5, least=1e-30),
    )


def true_vocabulary(args: MegatronArgs, mapping: MegatronMapping, rows: int, tp: int, given: Given) -> int:
    """Return how many of the token table's rows are tokens.

    Raises UserError if they do not fit the table, or the published would leave out more than padding.
    """
    recorded, vocab_size, known = args.number("vocab_size"), given.vocab_size, given.known
    if vocab_size is None and known is None and recorded is not None and recorded <= rows:
        return recorded
    if vocab_size is None and known is None:
        quantum = (args.number("make_vocab_size_divisible_by") or 128) * tp
        for tokens in mapping.vocabularies:
            if tokens <= rows < tokens + quantum:
                return tokens
        published = " or ".join(map(str, mapping.vocabularies)) or "unknown"
        raise UserError(
            f"vocab_size=null: the token table has {rows} rows, which {mapping.name}'s {published} tokens do "
            "not fill: give vocab_size=… (tokens without padding) or tokenizer=…"
        )
    tokens = vocab_size or known or 0
    if not (known or 0) <= tokens <= rows:
        raise UserError(
            f"vocab_size={tokens}: the token table has {rows} rows, the tokenizer {known or 'no'} tokens: "
            "give the tokenizer of this model, and leave vocab_size out"
        )
    return tokens


def notes(args: MegatronArgs, mapping: MegatronMapping) -> tuple[str, ...]:
    """Return what differs a little from the run that wrote it, one line each."""
    lines = list(mapping.notes(args.values))
    if not args.is_known:
        lines.append("it holds no args: dropout, layer norm epsilon and initial weights take mlm's defaults")
    return tuple(lines)
