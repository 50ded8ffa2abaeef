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


@dataclass(frozen=True, kw_only=True)
class MegatronOverrides:
    """Settings that the files may not record."""

    vocab_size: int | None = None
    """Tokens without padding; None takes `tokenizer_size`, else a published size where it fits."""
    tokenizer_size: int | None = None
    num_heads: int | None = None
    config: ModelConfig | None = None
    """The model of a folder without arguments."""


class MegatronArgs:
    """The args of one rank file. Values of unexpected types are never read."""

    def __init__(self, args: Any, path: Path) -> None:
        self.path = path
        self.is_known = args is not None
        """True if the file holds any; files of 2019 do not."""
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
    is_plain = value is None or type(value) in (bool, int, float, str)
    return printable(str(value)) if is_plain else f"({type(value).__name__})"


def unsupported_arguments(args: MegatronArgs, mapping: MegatronMapping) -> list[str]:
    """Return a line for each argument with which the model is not one of the family."""
    values, heads, hidden = args.values, args.number("num_attention_heads"), args.number("hidden_size")

    def is_supported(name: str) -> bool:
        value = values[name]
        return any(value is one or (type(value) is type(one) and value == one) for one in mapping.args[name])

    names = [name for name in mapping.args if name in values and not is_supported(name)]
    if args.is_known or mapping.required:
        names += [name for name in mapping.required if name not in values]
    # Scores are divided by the square root of a head's width.
    width = args.number("kv_channels") or (hidden // heads if hidden and heads else None)
    scale = values.get("softmax_scale")
    is_usual = type(scale) is float and width is not None and math.isclose(scale, width**-0.5, rel_tol=1e-6)
    if scale is not None and not is_usual:
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


def family_names(last: str = "and") -> str:
    *names, final = (mapping.name for mapping in MAPPINGS.values())
    return f"{', '.join(names)} {last} {final}"


def shape_config(
    args: MegatronArgs, kind: str, sizes: Mapping[str, int], num_heads: int | None
) -> ModelConfig:
    """Return a model with all shapes of the files, padding included.

    `sizes` are those that the tensors show, by field of ModelConfig. Raises UserError for a model that its
    family does not have.
    """
    mapping, ffn = MAPPINGS[kind], sizes.get("ffn_hidden_size")
    shapes = {
        **sizes,
        **mapping.settings(args.values),
        "ffn_hidden_size": None if ffn == 4 * sizes["hidden_size"] else ffn,
    }
    heads = num_heads if mapping.is_grouped and num_heads else 1
    shape = ModelConfig(kind=kind, num_heads=heads, **shapes)
    if mapping.is_grouped and (problem := family_of(kind).model_problem(shape) or mapping.problem(shape)):
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


def true_vocabulary(
    args: MegatronArgs, mapping: MegatronMapping, rows: int, tp: int, overrides: MegatronOverrides
) -> int:
    """Return how many of the token table's rows are tokens.

    Raises UserError if they do not fit the table, or the published size would leave out more than padding.
    """
    recorded, known = args.number("vocab_size"), overrides.tokenizer_size
    tokens = overrides.vocab_size or known
    if tokens is None and recorded is not None and recorded <= rows:
        return recorded
    if tokens is None:
        quantum = (args.number("make_vocab_size_divisible_by") or 128) * tp
        for published in mapping.vocabularies:
            if published <= rows < published + quantum:
                return published
        listed = " or ".join(map(str, mapping.vocabularies)) or "unknown"
        raise UserError(
            f"vocab_size=null: the token table has {rows} rows, which {mapping.name}'s {listed} tokens do "
            "not fill: give vocab_size=… (tokens without padding) or tokenizer=…"
        )
    if not (known or 0) <= tokens <= rows:
        raise UserError(
            f"vocab_size={tokens}: the token table has {rows} rows, the tokenizer {known or 'no'} tokens: "
            "give the tokenizer of this model, and leave vocab_size out"
        )
    return tokens
