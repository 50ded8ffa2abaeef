"""The model of a Megatron-LM checkpoint: settings, and parameters read one at a time.

Settings come from the arguments of the run (its `args`) and the sizes of the tensors. An argument that a
version did not have is absent, and means the only behaviour of that version.
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
from mlm.convert.dcp.unpickled import DAMAGES, NotDataError, PickleError, SavedFile, read_archive
from mlm.convert.huggingface.mapping import declared_ids
from mlm.convert.locations import CheckpointFiles, ForeignModel, Shape, check_shapes, foreign_tensors
from mlm.convert.megatron.mapping import IN_LAYER, OUTPUT, THROUGH_HF, TOKEN_TABLE, MegatronMapping
from mlm.convert.megatron.mappings import MAPPINGS
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.models.shape import is_tied
from mlm.util.errors import ConfigError, CorruptFileError, UserError, reading_from
from mlm.util.terminal import one_line


class MegatronArgs:
    """The args of a run, empty for a file of 2019. Only values of expected types are read."""

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
        """Return the first argument of `names` that is not None. Raises CorruptFileError if not positive."""
        number: int | None = self._value(names, lambda value: type(value) is int and value >= 1)
        return number

    def fraction(self, *names: str, default: float, least: float = 0.0) -> float:
        """Return the first argument that is set, from `least` to below 1. Raises CorruptFileError."""
        value = self._value(names, lambda value: type(value) in (int, float) and least <= value < 1)
        return default if value is None else float(value)

    def _value(self, names: tuple[str, ...], is_valid: Callable[[Any], bool]) -> Any:
        for name in names:
            value = self.values.get(name)
            if value is not None and not is_valid(value):
                setting = f"args.{name}={describe_value(value)}"
                raise CorruptFileError(f"{self.path}: {setting} is out of range: copy it again")
            if value is not None:
                return value
        return None


@dataclass(frozen=True)
class MegatronTensors:
    """The tensors of a checkpoint, full over all ranks, by Megatron Core's names."""

    path: Path
    format: str
    files: CheckpointFiles
    shapes: Mapping[str, Shape]
    load: Read
    """Returns elements of a tensor, float32 on the CPU, qkv rows as [head][q, k, v][column]."""
    tp: int = 1
    """Tensor-parallel ranks that the token table is padded for."""


def read_saved(path: Path) -> SavedFile:
    """Read a file of torch.save with a dict by string keys; nothing in it is executed.

    Raises UserError, CorruptFileError.
    """
    try:
        with reading_from(path, COPY_AGAIN), open(path, "rb") as f:
            saved = read_archive(f)
    except UserError:  # a ValueError, as some of DAMAGES are
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

    `vocabulary` is (vocab_size, tokenizer_size) of `true_vocabulary`, `num_heads` for files without
    arguments. Raises UserError if the model is not supported or a setting is missing; CorruptFileError.
    """
    path, shapes = tensors.path, tensors.shapes
    kind = kind_of(path, shapes, args)
    mapping, sizes = MAPPINGS[kind], tensor_sizes(tensors, MAPPINGS[kind])
    rows, model = sizes["vocab_size"], model_config(args, kind, sizes, num_heads)
    padded = replace(model, vocab_multiple=1)
    entries, locations = parameters(padded), dict(mapping.locations(padded))
    # Parameters that a run of the family may lack are zero or take initial values.
    present = {name for name, location in locations.items() if shapes.keys() >= {*location.names}}
    modules = {name.rpartition(".")[0] for name in present}
    absent = [module for module in mapping.initial_if_absent if module not in modules]
    filled = frozenset(name for name in locations if name.rpartition(".")[0] in absent)
    zeros = frozenset(locations.keys() & mapping.zero_if_absent.keys() - present)
    required = [(name, location) for name, location in locations.items() if name not in filled | zeros]
    expected = {name: tensor.shape for name, tensor in foreign_tensors(required, entries).items()}
    if has_copy := is_tied(model) and OUTPUT in shapes:
        expected[OUTPUT] = expected[TOKEN_TABLE]
    check_shapes(path, shapes, expected, "some files are missing, or of another model; copy all again")
    model = replace(model, vocab_size=true_vocabulary(args, mapping, rows, tensors.tp, *vocabulary))
    if has_copy:
        head, table = (partial(tensors.load, name) for name in (OUTPUT, TOKEN_TABLE))
        if not are_equal(head, table, expected[OUTPUT]):
            raise UserError(f"{path}: the output layer differs from the token table that it is tied to")
    notes = [
        *(mapping.zero_if_absent[name] for name in zeros),
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
        shapes={name: entry.shape for name, entry in entries.items()},
        load=tensors.load,
        origin={"iteration": iteration if type(iteration) is int else None},
        token_ids=declared_ids(args.values, model.vocab_size),
        filled=filled,
        zeros=zeros,
        notes=tuple(notes),
    )


def tensor_sizes(tensors: MegatronTensors, mapping: MegatronMapping) -> dict[str, int]:
    """Return the sizes of the model by its tensors, by field of ModelConfig.

    Raises CorruptFileError if one is missing, or layers are not numbered from 0 without a gap.
    """
    path, shapes = tensors.path, tensors.shapes
    layers = {int(in_layer[2]) for name in shapes if (in_layer := IN_LAYER.fullmatch(name))}
    if layers != set(range(len(layers))):
        raise CorruptFileError(
            f"{path}: its layers are {sorted(layers)[:8]}, not 0, 1, 2, …: copy all files again"
        )
    sizes = {"num_layers": len(layers)}
    for field, (parameter, dim) in mapping.sizes.items():
        if (name := mapping.core_name(parameter)) not in shapes:
            raise CorruptFileError(f"{path}: {name} is missing: copy all files again")
        sizes[field] = shapes[name][dim] if dim < len(shapes[name]) else 0
    return sizes


def kind_of(path: Path, names: Iterable[str], args: MegatronArgs) -> str:
    """Return the kind of model whose family has all these names, and supports the run's arguments.

    `names` are Megatron Core's. Raises ConfigError for arguments, UserError for a name that no family has.
    """
    problems = {kind: unsupported_arguments(args, mapping) for kind, mapping in MAPPINGS.items()}
    if all(problems.values()):
        fewest = min(problems.values(), key=len)
        raise ConfigError(fewest)
    fitting = list(MAPPINGS)
    for core_name in names:
        fitting = [kind for kind in fitting if MAPPINGS[kind].has_name(core_name)]
        if not fitting:
            raise unknown_name(path, core_name)
    best = min(fitting, key=lambda kind: len(problems[kind]))
    if problems[best]:
        raise ConfigError(problems[best])
    return best


def unknown_name(path: Path, core_name: str) -> UserError:
    if ".mlp.router." in core_name or ".mlp.experts." in core_name:
        return UserError(f"{path}: {one_line(core_name)}: {THROUGH_HF}")
    return UserError(
        f"{path}: {one_line(core_name)} is not part of {family_names(last='or')} as mlm has them: only these "
        "are imported, and torchtitan's names by mlm convert"
    )


def describe_value(value: Any) -> str:
    """Return a value for a message; a value of an unexpected type is named by its type."""
    if type(value) is int and abs(value) >= 1 << 63:
        return "(a huge number)"
    is_plain = value is None or type(value) in (bool, int, float, str)
    return one_line(value) if is_plain else f"({type(value).__name__})"


def unsupported_arguments(args: MegatronArgs, mapping: MegatronMapping) -> list[str]:
    """Return a line for each argument that the family does not support."""
    values, heads, hidden = args.values, args.number("num_attention_heads"), args.number("hidden_size")
    names = []
    for name, supported in mapping.args.items():
        value = values.get(name)
        is_supported = any(type(value) is type(option) and value == option for option in supported)
        if name in values and not is_supported:
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

    `sizes` are as in `tensor_sizes`; `num_heads` is for files that do not record it. Raises UserError if the
    number of heads is unknown or does not match, or the family has no such model.
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
    tokenizer_size: int | None,
) -> int:
    """Return the number of the token table's rows that are tokens.

    `vocab_size` is the user's setting, `tokenizer_size` the size of the user's tokenizer. Raises UserError if
    they do not match the table, or the published size would drop more than padding.
    """
    recorded, tokens = args.number("vocab_size"), vocab_size or tokenizer_size
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
    if not (tokenizer_size or 0) <= tokens <= rows:
        raise UserError(
            f"vocab_size={tokens}: the token table has {rows} rows, the tokenizer {tokenizer_size or 'no'} "
            "tokens: give the tokenizer of this model, and leave vocab_size out"
        )
    return tokens
