"""A Megatron-LM checkpoint as our model: settings, and parameters read one at a time.

The arguments of the run (its `args`) decide the settings, with the sizes that the tensors show. An argument
that a version did not have is absent, and has that version's one behaviour.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mlm.checkpoint.native.compare import are_equal
from mlm.checkpoint.native.format import TensorEntry
from mlm.checkpoint.native.slices import Region, TensorSplit
from mlm.checkpoint.parameters import parameters
from mlm.convert.dcp.metadata import COPY_AGAIN
from mlm.convert.dcp.storage import DCPReader
from mlm.convert.dcp.unpickled import DAMAGES, NotDataError, PickleError, Saved, printable, read_archive
from mlm.convert.megatron.mapping import HEAD, THROUGH_HF, MegatronMapping
from mlm.convert.megatron.mappings import MAPPINGS
from mlm.convert.row_layouts import RowLayouts, reorder_rows, short_name
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.models.shape import is_tied
from mlm.models.stage import parameter_home
from mlm.util.errors import ConfigError, CorruptFileError, UserError, reading_from
from mlm.util.terminal import Advance

Location = tuple[str, tuple[int, ...]]
"""A stored tensor, and an index into its first dims."""


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

        Raises CorruptFileError if it is no such number.
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


class Files(Protocol):
    """The files of a checkpoint."""

    @property
    def num_bytes(self) -> int: ...

    def verify(self, progress: Advance) -> dict[str, str]:
        """Compare what they hold with its checksums; return the digest of each file by its name."""


class MegatronTensors(ABC):
    """The tensors of a checkpoint, full over all ranks, by our names for Megatron's."""

    def __init__(self, path: Path, files: Files, locations: dict[str, Any], *, tp: int = 1) -> None:
        """`locations` say where each is stored; the token table is padded to a multiple of `tp` ranks.

        Raises CorruptFileError unless layers are numbered without a gap.
        """
        self.path, self.files, self.locations, self.tp = path, files, locations, tp
        layers = {int(name.split(".")[1]) for name in locations if name.startswith("layers.")}
        self.num_layers = len(layers)
        if layers != set(range(self.num_layers)):
            raise CorruptFileError(
                f"{self.path}: its layers are {sorted(layers)[:8]}, not 0, 1, 2, …: copy all files again"
            )

    def require(self, name: str) -> None:
        if name not in self.locations:
            raise CorruptFileError(f"{self.path}: {name} is missing: copy all files again")

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises CorruptFileError if it is missing."""

    @abstractmethod
    def load(self, name: str, region: Region) -> Tensor:
        """Return those elements, float32 on the CPU, qkv rows as [head][q, k, v][column]."""


class CoreTensors(MegatronTensors):
    """The tensors of a distributed checkpoint."""

    def __init__(self, reader: DCPReader, locations: dict[str, Location]) -> None:
        super().__init__(reader.folder, reader, locations)
        self.reader = reader

    def shape(self, name: str) -> tuple[int, ...]:
        self.require(name)
        stored, index = self.locations[name]
        return self.reader.tensors[stored].shape[len(index) :]

    def load(self, name: str, region: Region) -> Tensor:
        stored, index = self.locations[name]
        part = Region((*index, *region.offset), (*(1 for _ in index), *region.size))
        return self.reader.read(stored, part, torch.float32).reshape(region.size)


def read_saved(path: Path) -> Saved:
    """Read a file of torch.save whose value has names for its parts; nothing in it is executed.

    Raises UserError, CorruptFileError.
    """
    try:
        with reading_from(path, COPY_AGAIN), open(path, "rb") as f:
            saved = read_archive(f)
    except NotDataError as error:
        raise CorruptFileError(
            f"{path}: {printable(str(error))}; nothing was executed: save it again in Megatron-LM with "
            "--no-save-optim --no-save-rng, and trust no file of unknown origin"
        ) from error
    except DAMAGES as error:
        reason = printable(str(error)) or type(error).__name__
        raise CorruptFileError(
            f"{path}: damaged, or not written by torch.save of PyTorch 1.6 or later ({reason}): copy it again"
        ) from error
    if type(saved.value) is not dict or not all(type(key) is str for key in saved.value):
        raise CorruptFileError(f"{path}: holds no named parts: is it a Megatron-LM checkpoint?")
    return saved


@dataclass(frozen=True)
class MegatronModel:
    """An open checkpoint: tensors stay in their files until they are read."""

    tensors: MegatronTensors
    model: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the tensors that the model needs."""
    layouts: RowLayouts
    iteration: int | None
    table_rows: int
    filled: frozenset[str]
    """Parameters that the files lack: they take initial values."""
    zeros: frozenset[str]
    """Parameters that the files lack, and that are zero."""
    notes: tuple[str, ...]
    """Remarks for the user, one line each."""

    def read(self, name: str, region: Region) -> Tensor:
        """Return those elements of a parameter, float32 on the CPU.

        Raises CorruptFileError if some are not finite.
        """
        if name in self.zeros:
            return torch.zeros(region.size)
        if short_name(name) in self.layouts.ours:
            full = reorder_rows(name, self.layouts.theirs, self.layouts.ours, self._load_full)
            value = full[region.within(Region.whole(full.shape))]
        else:
            value = self.tensors.load(name, region)
        if value.numel() and not torch.stack(value.aminmax()).isfinite().all():
            raise CorruptFileError(
                f"{self.tensors.path}: {name} is not finite everywhere: take another iteration"
            )
        return value.contiguous()

    def _load_full(self, name: str) -> Tensor:
        return self.tensors.load(name, Region.whole(self.shapes[name]))


def assemble(
    tensors: MegatronTensors,
    args: MegatronArgs,
    kind: str,
    *,
    iteration: object,
    vocabulary: tuple[int | None, int | None],
    num_heads: int | None = None,
) -> MegatronModel:
    """Check that the tensors make a model of `kind`, and return it.

    `vocabulary` is as in `true_vocabulary`, `num_heads` for files without arguments. Raises UserError if it
    is not supported, or if something has to be specified; CorruptFileError.
    """
    mapping, sizes = MAPPINGS[kind], {"num_layers": tensors.num_layers}
    for field, (name, dim) in mapping.sizes.items():
        dims = tensors.shape(name)
        sizes[field] = dims[dim] if dim < len(dims) else 0
    table_rows, model = sizes["vocab_size"], model_config(args, kind, sizes, num_heads)
    if HEAD in tensors.locations and not is_tied(model):
        tensors.locations["output.weight"] = tensors.locations.pop(HEAD)
    layouts = mapping.layouts(model)
    wanted = stored_parameters(replace(model, vocab_size=table_rows), layouts)
    # What a run of the family may lack is zero, or takes initial values.
    modules = {name.rpartition(".")[0] for name in tensors.locations}
    absent = [module for module in mapping.initial_if_absent if module not in modules]
    filled = frozenset(name for name in wanted if name.rpartition(".")[0] in absent)
    zeros = frozenset(
        name for name in mapping.zero_if_absent if name in wanted and name not in tensors.locations
    )
    check_shapes(tensors, {name: entry for name, entry in wanted.items() if name not in filled | zeros})
    model = replace(model, vocab_size=true_vocabulary(args, mapping, table_rows, tensors.tp, *vocabulary))
    if HEAD in tensors.locations:
        head, table = (partial(tensors.load, name) for name in (HEAD, "token.weight"))
        if not are_equal(head, table, tensors.shape(HEAD)):
            raise UserError(
                f"{tensors.path}: the output layer differs from the token table that it is tied to"
            )
    notes = [
        *(mapping.zero_if_absent[name] for name in zeros),
        *(f"no {module} is there: it takes initial values, which training moves" for module in absent),
        *mapping.notes(args.values),
    ]
    return MegatronModel(
        tensors=tensors,
        model=model,
        shapes={name: entry.shape for name, entry in wanted.items()},
        layouts=layouts,
        iteration=iteration if type(iteration) is int else None,
        table_rows=table_rows,
        filled=filled,
        zeros=zeros,
        notes=tuple(notes),
    )


def check_shapes(tensors: MegatronTensors, wanted: Mapping[str, TensorEntry]) -> None:
    """Raise CorruptFileError for a tensor of another shape, or that is missing or not wanted."""
    for name in [*wanted, *(name for name in tensors.locations if name not in wanted)]:
        entry = wanted.get("token.weight" if name == HEAD else name)
        needed = list(entry.shape) if entry else "none"
        if (shape := list(tensors.shape(name))) != needed:
            raise CorruptFileError(
                f"{tensors.path}: {name} is {shape}, {needed} is needed: some files are of another model"
            )


def stored_parameters(model: ModelConfig, layouts: RowLayouts) -> dict[str, TensorEntry]:
    """Return the tensors of a model as Megatron has them, full, under our names for them."""
    ours = parameters(replace(model, vocab_multiple=1))
    stored = {name: entry for name, entry in ours.items() if short_name(name) not in layouts.ours}
    for layer in range(model.num_layers if layouts.theirs else 0):
        for short, layout in layouts.theirs.items():
            name = f"layers.{layer}.{short}"
            rest = () if short.endswith("bias") else (model.hidden_size,)
            split = TensorSplit(0, parameter_home(name), 1)
            stored[name] = TensorEntry((layout.rows, *rest), torch.float32, split)
    return stored


def kind_of(path: Path, names: Iterable[str], args: MegatronArgs) -> str:
    """Return the kind of model whose family has all these names, and supports the run's arguments.

    `names` are Megatron's. Raises ConfigError for arguments that no family supports, UserError for a name
    that none has.
    """
    problems = {kind: unsupported_arguments(args, mapping) for kind, mapping in MAPPINGS.items()}
    if all(problems.values()):
        fewest = min(problems.values(), key=len)
        raise ConfigError(fewest)
    fitting = list(MAPPINGS)
    for theirs in names:
        fitting = [kind for kind in fitting if MAPPINGS[kind].our_name(theirs) is not None]
        if not fitting:
            raise unknown_name(path, theirs)
    best = min(fitting, key=lambda kind: len(problems[kind]))  # the first that supports the arguments
    if problems[best]:
        raise ConfigError(problems[best])
    return best


def unknown_name(path: Path, theirs: str) -> UserError:
    if ".mlp.router." in theirs or ".mlp.experts." in theirs:
        return UserError(f"{path}: {printable(theirs)}: {THROUGH_HF}")
    return UserError(
        f"{path}: {printable(theirs)} is no part of {family_names(last='or')} as mlm has them: only these "
        "are imported, and torchtitan's names by mlm convert"
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
        raise UserError(f"{args.path}: its args are those of no model of ours: {problem}")
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
