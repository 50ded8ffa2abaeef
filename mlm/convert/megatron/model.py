"""A Megatron-LM checkpoint as our model: settings, and parameters read one at a time.

The arguments of the run (its `args`) decide the settings, with the sizes that the tensors show. An argument
that a version did not have is absent, and has that version's one behaviour.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.compare import are_equal
from mlm.checkpoint.native.slices import Read
from mlm.checkpoint.parameters import parameters
from mlm.convert.dcp.metadata import COPY_AGAIN
from mlm.convert.dcp.unpickled import DAMAGES, NotDataError, PickleError, Saved, read_archive
from mlm.convert.huggingface.mapping import declared_ids
from mlm.convert.locations import Files, ForeignModel, Shape, check_shapes, foreign_tensors
from mlm.convert.megatron.mapping import IN_LAYER, OUTPUT, THROUGH_HF, TOKEN_TABLE, MegatronMapping
from mlm.convert.megatron.mappings import MAPPINGS
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.models.shape import is_tied
from mlm.util.errors import ConfigError, CorruptFileError, UserError, reading_from
from mlm.util.terminal import one_line


class MegatronArgs:
    """The args of a run, empty for a file of 2019. Values of unexpected types are never read."""

    def __init__(self, args: Any, path: Path, *, may_lack: bool = False) -> None:
        self.path, self.values = path, dict[str, Any]()
        if args is None and may_lack:
            return
        try:
            self.values = args.fields("argparse.Namespace")
        except (AttributeError, PickleError):
            raise CorruptFileError(
                f"{path}: its args are {type(args).__name__}, not a Namespace: copy it again"
            ) from None

    def number(self, *names: str) -> int | None:
        """Return the first of these that is given and not None, a positive whole number.

        Raises CorruptFileError if it is not such a number.
        """
        number: int | None = self._value(names, lambda value: type(value) is int and value >= 1)
        return number

    def fraction(self, *names: str, default: float, least: float = 0.0) -> float:
        """Return the first of these that is given, from `least` to below 1. Raises CorruptFileError."""
        value = self._value(names, lambda value: type(value) in (int, float) and least <= value < 1)
        return default if value is None else float(value)

    def _value(self, names: tuple[str, ...], is_valid: Callable[[Any], bool]) -> Any:
        for name in names:
            value = self.values.get(name)
            if value is not None and not is_valid(value):
                given = f"args.{name}={describe_value(value)}"
                raise CorruptFileError(f"{self.path}: {given} is out of range: copy it again")
            if value is not None:
                return value
        return None


@dataclass(frozen=True)
class MegatronTensors:
    """The tensors of a checkpoint, full over all ranks, by Megatron Core's names."""

    path: Path
    format: str
    files: Files
    shapes: Mapping[str, Shape]
    load: Read
    """Returns elements of a tensor, float32 on the CPU, qkv rows as [head][q, k, v][column]."""
    tp: int = 1
    """Ranks that the token table is padded for."""


def read_saved(path: Path) -> Saved:
    """Read a file of torch.save whose value has names for its parts; nothing in it is executed.

    Raises UserError, CorruptFileError.
    """
    try:
        with reading_from(path, COPY_AGAIN), open(path, "rb") as f:
            saved = read_archive(f)
    except UserError:  # which is a ValueError, as damages are
        raise
    except NotDataError as error:
        raise CorruptFileError(
            f"{path}: {one_line(error)}; nothing was executed: save it again in Megatron-LM with "
            "--no-save-optim --no-save-rng, and trust no file of unknown origin"
        ) from error
    except DAMAGES as error:
        reason = one_line(error) or type(error).__name__
        raise CorruptFileError(
            f"{path}: damaged, or not written by torch.save of PyTorch 1.6 or later ({reason}): copy it again"
        ) from error
    if type(saved.value) is not dict or not all(type(key) is str for key in saved.value):
        raise CorruptFileError(f"{path}: holds no named parts: is it a Megatron-LM checkpoint?")
    return saved


def assemble(
    tensors: MegatronTensors,
    args: MegatronArgs,
    *,
    iteration: object,
    vocabulary: tuple[int | None, int | None],
    num_heads: int | None = None,
) -> ForeignModel:
    """Check that the tensors make a model of one family, and return it.

    `vocabulary` is as in `true_vocabulary`, `num_heads` for files without arguments. Raises UserError if it
    is not supported, or if something has to be specified; CorruptFileError.
    """
    path, shapes = tensors.path, tensors.shapes
    kind = kind_of(path, shapes, args)
    mapping, sizes = MAPPINGS[kind], shown_sizes(tensors, MAPPINGS[kind])
    rows, model = sizes["vocab_size"], model_config(args, kind, sizes, num_heads)
    padded = replace(model, vocab_multiple=1)
    entries, locations = parameters(padded), dict(mapping.locations(padded))
    # What a run of the family may lack is zero, or takes initial values.
    held = {ours for ours, location in locations.items() if shapes.keys() >= {*location.names}}
    modules = {ours.rpartition(".")[0] for ours in held}
    absent = [module for module in mapping.initial_if_absent if module not in modules]
    filled = frozenset(ours for ours in locations if ours.rpartition(".")[0] in absent)
    zeros = frozenset(locations.keys() & mapping.zero_if_absent.keys() - held)
    needed = [(ours, location) for ours, location in locations.items() if ours not in filled | zeros]
    wanted = {name: tensor.shape for name, tensor in foreign_tensors(needed, entries).items()}
    if has_copy := is_tied(model) and OUTPUT in shapes:
        wanted[OUTPUT] = wanted[TOKEN_TABLE]
    check_shapes(path, shapes, wanted, "some files are missing, or of another model; copy all again")
    model = replace(model, vocab_size=true_vocabulary(args, mapping, rows, tensors.tp, *vocabulary))
    if has_copy:
        head, table = (partial(tensors.load, name) for name in (OUTPUT, TOKEN_TABLE))
        if not are_equal(head, table, wanted[OUTPUT]):
            raise UserError(f"{path}: the output layer differs from the token table that it is tied to")
    notes = [
        *(mapping.zero_if_absent[ours] for ours in zeros),
        *(f"no {module} is there: it takes initial values, which training moves" for module in absent),
        *mapping.notes(args.values),
    ]
    if padding := rows - model.vocab_size:
        notes.append(f"the last {padding:,} of {rows:,} rows of the token table are padding: left out")
    return ForeignModel(
        format=tensors.format,
        path=path,
        model=model,
        files=tensors.files,
        locations=locations,
        shapes={ours: entry.shape for ours, entry in entries.items()},
        load=tensors.load,
        origin={"iteration": iteration if type(iteration) is int else None},
        token_ids=declared_ids(args.values, model.vocab_size),
        filled=filled,
        zeros=zeros,
        notes=tuple(notes),
    )


def shown_sizes(tensors: MegatronTensors, mapping: MegatronMapping) -> dict[str, int]:
    """Return the sizes that the tensors show, by field of ModelConfig.

    Raises CorruptFileError if one is missing, or layers are not numbered from 0 without a gap.
    """
    path, shapes = tensors.path, tensors.shapes
    layers = {int(in_layer[2]) for name in shapes if (in_layer := IN_LAYER.fullmatch(name))}
    if layers != set(range(len(layers))):
        raise CorruptFileError(
            f"{path}: its layers are {sorted(layers)[:8]}, not 0, 1, 2, …: copy all files again"
        )
    sizes = {"num_layers": len(layers)}
    for field, (ours, dim) in mapping.sizes.items():
        if (name := mapping.core_name(ours)) not in shapes:
            raise CorruptFileError(f"{path}: {name} is missing: copy all files again")
        sizes[field] = shapes[name][dim] if dim < len(shapes[name]) else 0
    return sizes


def kind_of(path: Path, names: Iterable[str], args: MegatronArgs) -> str:
    """Return the kind of model whose family has all these names, and supports the run's arguments.

    `names` are Megatron Core's. Raises ConfigError for arguments that no family supports, UserError for a
    name that none has.
    """
    problems = {kind: unsupported_arguments(args, mapping) for kind, mapping in MAPPINGS.items()}
    if all(problems.values()):
        fewest = min(problems.values(), key=len)
        raise ConfigError(fewest)
    fitting = list(MAPPINGS)
    for theirs in names:
        fitting = [kind for kind in fitting if MAPPINGS[kind].has_name(theirs)]
        if not fitting:
            raise unknown_name(path, theirs)
    best = min(fitting, key=lambda kind: len(problems[kind]))  # the first that supports the arguments
    if problems[best]:
        raise ConfigError(problems[best])
    return best


def unknown_name(path: Path, theirs: str) -> UserError:
    if ".mlp.router." in theirs or ".mlp.experts." in theirs:
        return UserError(f"{path}: {one_line(theirs)}: {THROUGH_HF}")
    return UserError(
        f"{path}: {one_line(theirs)} is no part of {family_names(last='or')} as mlm has them: only these "
        "are imported, and torchtitan's names by mlm convert"
    )


def describe_value(value: Any) -> str:
    """Return a value for a message; one of a type that args do not have is named by its type."""
    if type(value) is int and abs(value) >= 1 << 63:
        return "(a huge number)"
    is_plain = value is None or type(value) in (bool, int, float, str)
    return one_line(value) if is_plain else f"({type(value).__name__})"


def unsupported_arguments(args: MegatronArgs, mapping: MegatronMapping) -> list[str]:
    """Return a line for each argument with which the model is not one of the family."""
    values, heads, hidden = args.values, args.number("num_attention_heads"), args.number("hidden_size")
    names = []
    for name, supported in mapping.args.items():
        value = values.get(name)
        is_same = (value is one or (type(value) is type(one) and value == one) for one in supported)
        if name in values and not any(is_same):
            names.append(name)
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


def model_config(
    args: MegatronArgs, kind: str, sizes: Mapping[str, int], num_heads: int | None
) -> ModelConfig:
    """Return the model of the files, padding of the token table included.

    `sizes` are those that the tensors show, by field of ModelConfig; `num_heads` is for files that do not
    record it. Raises UserError if the number of heads is unknown or does not fit, or the family has no such
    model.
    """
    mapping, hidden = MAPPINGS[kind], sizes["hidden_size"]
    heads = args.number("num_attention_heads") or num_heads
    if heads is None:
        usual = f"64 columns each in GPT-2 and BERT: num_heads={max(1, hidden // 64)}"
        raise UserError(f"{args.path}: does not record args.num_attention_heads: give num_heads=… ({usual})")
    if num_heads not in (None, heads):
        raise UserError(f"num_heads={num_heads}: {args.path} records {heads}: leave it out")
    width = args.number("kv_channels") or hidden // heads
    if width * heads != hidden and not mapping.is_grouped:
        raise UserError(
            f"{args.path}: {heads} heads of {width} columns do not make hidden_size={hidden}: copy it again"
        )
    settings = {
        **sizes,
        "hidden_dropout": args.fraction("hidden_dropout", default=0.1),
        "attention_dropout": args.fraction("attention_dropout", default=0.1),
        "init_std": args.fraction("init_method_std", default=0.02),
        "layer_norm_eps": args.fraction("norm_epsilon", "layernorm_epsilon", default=1e-5, least=1e-30),
        **mapping.settings(args.values),
    }
    if settings.get("ffn_hidden_size") == 4 * hidden:
        settings["ffn_hidden_size"] = None
    model = ModelConfig(kind=kind, num_heads=heads, **settings)
    if mapping.is_grouped and (problem := family_of(kind).model_problem(model) or mapping.problem(model)):
        raise UserError(f"{args.path}: its args describe no model that mlm has: {problem}")
    return model


def true_vocabulary(
    args: MegatronArgs,
    mapping: MegatronMapping,
    rows: int,
    tp: int,
    vocab_size: int | None,
    known: int | None,
) -> int:
    """Return how many of the token table's rows are tokens.

    `vocab_size` is given by the user, `known` is the size of a given tokenizer. Raises UserError if they do
    not fit the table, or the published size would leave out more than padding.
    """
    recorded, tokens = args.number("vocab_size"), vocab_size or known
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
