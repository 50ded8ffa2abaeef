"""A Megatron-LM checkpoint of any format as a model of ours: settings, and parameters read one at a time."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.compare import are_equal
from mlm.checkpoint.native.format import TensorEntry
from mlm.checkpoint.native.slices import Region, TensorSplit
from mlm.checkpoint.parameters import parameters
from mlm.convert.dcp.storage import DCPReader
from mlm.convert.megatron.args import (
    MegatronArgs,
    MegatronOverrides,
    family_names,
    model_config,
    shape_config,
    true_vocabulary,
    unsupported_arguments,
)
from mlm.convert.megatron.files import RankFiles, printable
from mlm.convert.megatron.mapping import HEAD, THROUGH_HF
from mlm.convert.megatron.mappings import MAPPINGS
from mlm.convert.row_layouts import RowLayouts, reorder_rows, short_name
from mlm.models.config import ModelConfig
from mlm.models.shape import is_tied
from mlm.models.stage import parameter_home
from mlm.util.errors import ConfigError, CorruptFileError, UserError


class MegatronTensors(ABC):
    """The tensors of a checkpoint, full over tensor-parallel ranks, by our names for Megatron's."""

    files: DCPReader | RankFiles

    def __init__(self, path: Path, names: Iterable[str], *, tp: int = 1, pp: int = 1, vp: int = 1) -> None:
        """Raises CorruptFileError unless layers are numbered without a gap; `path` is for messages."""
        self.path, self.tp, self.pp, self.vp = path, tp, pp, vp
        self.names = {name: name for name in names}
        """Our name -> the one it is stored under."""
        self.tp_dims: dict[str, int | None] = {}
        """Our name -> the dim that tensor-parallel ranks share; None where each holds all of it."""
        layers = {int(name.split(".")[1]) for name in self.names if name.startswith("layers.")}
        self.num_layers = len(layers)
        if layers != set(range(self.num_layers)):
            raise CorruptFileError(
                f"{path}: its layers are {sorted(layers)[:8]}, not 0, 1, 2, …: copy all files again"
            )

    @abstractmethod
    def shape(self, name: str, tp_dim: int | None) -> tuple[int, ...]:
        """Return the shape of a tensor of which tensor-parallel ranks share a dim."""

    @abstractmethod
    def load(self, name: str, region: Region) -> Tensor:
        """Return those elements, float32 on the CPU, qkv rows as [head][q, k, v][column]."""

    def require(self, name: str) -> None:
        """Raise CorruptFileError if a tensor is missing."""
        if name not in self.names:
            raise CorruptFileError(f"{self.path}: {name} is missing: copy all files again")

    def check(self, wanted: Mapping[str, TensorEntry]) -> None:
        """Raise CorruptFileError for a wrong shape, or a tensor that the model does not have."""
        for name in self.names:
            entry = wanted.get("token.weight" if name == HEAD else name)
            dim = self.tp_dims[name] = entry.split.tp_dim if entry else None
            shape, needed = list(self.shape(name, dim)), list(entry.shape) if entry else "none"
            if shape != needed:
                raise CorruptFileError(
                    f"{self.path}: {name} is {shape} in its {self.tp} tensor-parallel ranks, {needed} is "
                    "needed: some files are missing or of another model"
                )

    def check_copies(self) -> None:
        """Raise UserError for an output layer that is not the token table that it is tied to."""
        head, table = (partial(self.load, name) for name in (HEAD, "token.weight"))
        if HEAD in self.names and not are_equal(head, table, self.shape(HEAD, self.tp_dims[HEAD])):
            raise UserError(f"{self.path}: the output layer differs from the token table that it is tied to")


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
        """Return those elements of a parameter, full over tp, float32 on CPU.

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
    overrides: MegatronOverrides,
) -> MegatronModel:
    """Check that the tensors are those of a model of `kind`, and return it.

    Raises UserError for a model that is not supported, or if something has to be specified; CorruptFileError.
    """
    mapping, sizes = MAPPINGS[kind], {"num_layers": tensors.num_layers}
    for field, (name, is_split, dim) in mapping.sizes.items():
        tensors.require(name)
        dims = tensors.shape(name, dim if is_split else None)
        sizes[field] = dims[dim] if dim < len(dims) else 0
    table_rows, model = sizes["vocab_size"], overrides.config
    if model is None:
        heads = args.number("num_attention_heads") or overrides.num_heads
        shape = shape_config(args, kind, sizes, heads)
    else:
        shape = replace(model, vocab_size=table_rows)
    if HEAD in tensors.names and not is_tied(shape):
        tensors.names["output.weight"] = tensors.names.pop(HEAD)
    layouts = mapping.layouts(shape, tensors.tp)
    wanted = stored_parameters(shape, layouts)
    # What a run of the family may lack is zero, or takes initial values.
    modules = {name.rpartition(".")[0] for name in tensors.names}
    absent = [module for module in mapping.initial_if_absent if module not in modules]
    filled = frozenset(name for name in wanted if name.rpartition(".")[0] in absent)
    zeros = frozenset(name for name in mapping.zero_if_absent if name in wanted and name not in tensors.names)
    for name in wanted:
        if name not in filled | zeros:
            tensors.require(name)
    tensors.check(wanted)
    if model is None:
        vocabulary = true_vocabulary(args, mapping, table_rows, tensors.tp, overrides)
        model = model_config(args, shape, tensors.tp, num_heads=overrides.num_heads, vocab_size=vocabulary)
    tensors.check_copies()
    notes = [
        *(mapping.zero_if_absent[name] for name in zeros),
        *(f"no {module} is there: it takes initial values, which training moves" for module in absent),
        *mapping.notes(args.values),
    ]
    if not args.is_known:
        notes.append("it holds no args: dropout, layer norm epsilon and initial weights take mlm's defaults")
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


def kind_of(names: Mapping[Path, Iterable[str]], args: MegatronArgs) -> str:
    """Return the kind of model whose family has all these names, and supports the run's arguments.

    `names` are Megatron's, of each file. Raises ConfigError for arguments that no family supports, UserError
    for a name that none has.
    """
    problems = {kind: unsupported_arguments(args, mapping) for kind, mapping in MAPPINGS.items()}
    if all(problems.values()):
        fewest = min(problems.values(), key=len)
        raise ConfigError(fewest)
    fitting = list(MAPPINGS)
    for path, listed in names.items():
        for theirs in listed:
            fitting = [kind for kind in fitting if MAPPINGS[kind].our_name(theirs) is not None]
            if not fitting:
                raise unknown_name(path, theirs)
    best = min(fitting, key=lambda kind: len(problems[kind]))  # the first that supports the arguments
    if problems[best]:
        raise ConfigError(problems[best])
    return best


def unknown_name(path: Path, theirs: str) -> UserError:
    """Return the error of a name that no family has."""
    if ".mlp.router." in theirs or ".mlp.experts." in theirs:
        return UserError(f"{path}: {printable(theirs)}: {THROUGH_HF}")
    return UserError(
        f"{path}: {printable(theirs)} is no part of {family_names(last='or')} as mlm has them: only these "
        "are imported, and torchtitan's names by mlm convert"
    )
