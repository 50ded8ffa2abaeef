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
from mlm.convert.megatron.args import (
    Given,
    MegatronArgs,
    check_recorded,
    family_names,
    model_config,
    notes,
    shape_config,
    true_vocabulary,
    unsupported_arguments,
)
from mlm.convert.megatron.files import printable
from mlm.convert.megatron.mapping import HEAD, THROUGH_HF, MegatronMapping
from mlm.convert.megatron.mappings import MAPPINGS
from mlm.convert.row_layouts import RowLayouts, reorder_rows, short_name
from mlm.models.config import ModelConfig
from mlm.models.shape import is_tied
from mlm.models.stage import parameter_home
from mlm.util.errors import ConfigError, CorruptFileError, UserError


class HeldTensors(ABC):
    """The tensors of a checkpoint, whole over tensor-parallel ranks, by our names for Megatron's."""

    def __init__(self, path: Path, names: Iterable[str], *, tp: int = 1, pp: int = 1, vp: int = 1) -> None:
        """Raises CorruptFileError unless layers are numbered without a gap; `path` is for messages."""
        self.path, self.tp, self.pp, self.vp = path, tp, pp, vp
        self.names = {name: name for name in names}
        """Our name -> the one it is held under."""
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

    def check(self, wanted: Mapping[str, TensorEntry]) -> None:
        """Raise CorruptFileError for a wrong shape, or a tensor that the model does not have."""
        for name in self.names:
            tensor = wanted.get("token.weight" if name == HEAD else name)
            dim = self.tp_dims[name] = tensor.split.tp_dim if tensor else None
            found, needed = list(self.shape(name, dim)), list(tensor.shape) if tensor else "none"
            if found != needed:
                raise CorruptFileError(
                    f"{self.path}: {name} is {found} in its {self.tp} tensor-parallel ranks, {needed} is "
                    "needed: some files are missing or of another model"
                )

    def check_copies(self) -> None:
        """Raise UserError for an output layer that is not the token table that it is tied to."""
        head, table = (partial(self.load, name) for name in (HEAD, "token.weight"))
        if HEAD in self.names and not are_equal(head, table, self.shape(HEAD, self.tp_dims[HEAD])):
            raise UserError(f"{self.path}: the output layer differs from the token table that it is tied to")


@dataclass(frozen=True)
class MegatronModel:
    """A checkpoint, opened: tensors stay in their files until they are read."""

    held: HeldTensors
    model: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    """Those of `held` that a model needs."""
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
        """Return those elements of a parameter, whole over tp, float32 on CPU.

        Raises CorruptFileError if some are not finite.
        """
        if name in self.zeros:
            return torch.zeros(region.size)
        wanted = self._read(name, region)
        if wanted.numel() and not torch.stack(wanted.aminmax()).isfinite().all():
            raise CorruptFileError(
                f"{self.held.path}: {name} is not finite everywhere: take another iteration"
            )
        return wanted.contiguous()

    def _read(self, name: str, region: Region) -> Tensor:
        if short_name(name) not in self.layouts.ours:
            return self.held.load(name, region)
        whole = reorder_rows(name, self.layouts.theirs, self.layouts.ours, self._load_whole)
        return whole[region.within(Region.whole(whole.shape))]

    def _load_whole(self, name: str) -> Tensor:
        shape = self.shapes[name]
        return self.held.load(name, Region.whole(shape))


def assemble(
    held: HeldTensors, args: MegatronArgs, kind: str, *, iteration: object, given: Given
) -> MegatronModel:
    """Check that the tensors are those of a model of `kind`, and return it.

    Raises UserError for a model that is not supported, or if something has to be specified; CorruptFileError.
    """
    mapping, present = MAPPINGS[kind], set(held.names)
    config, num_heads = given.config, given.num_heads
    sizes = _sizes(held, mapping)
    check_recorded(args, held.tp, held.pp, sizes)
    table_rows = sizes["vocab_size"]
    heads = args.number("num_attention_heads") or num_heads
    shape = (
        shape_config(args, kind, sizes, heads) if config is None else replace(config, vocab_size=table_rows)
    )
    if HEAD in present and not is_tied(shape):
        held.names["output.weight"] = held.names.pop(HEAD)
        present = set(held.names)
    layouts = mapping.layouts(shape, held.tp)
    wanted = stored_parameters(shape, layouts)
    filled, zeros, remarks = _absent(held.path, present, wanted, mapping)
    held.check(wanted)
    if config is None:
        vocabulary = true_vocabulary(args, mapping, table_rows, held.tp, given)
        model = model_config(args, shape, held.tp, num_heads=num_heads, vocab_size=vocabulary)
    else:
        model = config
    held.check_copies()
    return MegatronModel(
        held=held,
        model=model,
        shapes={name: tensor.shape for name, tensor in wanted.items()},
        layouts=layouts,
        iteration=iteration if type(iteration) is int else None,
        table_rows=table_rows,
        filled=filled,
        zeros=zeros,
        notes=(*remarks, *notes(args, mapping)),
    )


def _sizes(held: HeldTensors, mapping: MegatronMapping) -> dict[str, int]:
    """Sizes of the model as its tensors show them."""
    sizes, present = {"num_layers": held.num_layers}, set(held.names)
    for field, (name, is_split, dim) in mapping.sizes.items():
        _check_present(held.path, name, present)
        shape = held.shape(name, dim if is_split else None)
        sizes[field] = shape[dim] if dim < len(shape) else 0
    return sizes


def stored_parameters(model: ModelConfig, layouts: RowLayouts) -> dict[str, TensorEntry]:
    """Return the tensors of a model as Megatron has them, whole, under our names for them."""
    ours = parameters(replace(model, vocab_multiple=1))
    kept = {name: one for name, one in ours.items() if short_name(name) not in layouts.ours}
    for layer in range(model.num_layers if layouts.theirs else 0):
        for short, layout in layouts.theirs.items():
            name = f"layers.{layer}.{short}"
            rest = () if short.endswith("bias") else (model.hidden_size,)
            kept[name] = TensorEntry(
                (layout.rows, *rest), torch.float32, TensorSplit(0, parameter_home(name), 1)
            )
    return kept


def _check_present(path: Path, name: str, present: Iterable[str]) -> None:
    if name not in present:
        raise CorruptFileError(f"{path}: {name} is missing: copy all files again")


def _absent(
    path: Path, present: set[str], wanted: Mapping[str, TensorEntry], mapping: MegatronMapping
) -> tuple[frozenset[str], frozenset[str], list[str]]:
    """Return the parameters to fill with initial values, those that are zero, and remarks.

    Raises CorruptFileError if others are missing.
    """
    modules = {name.rpartition(".")[0] for name in present}
    absent = [module for module in mapping.initial_if_absent if module not in modules]
    filled, zeros, remarks = set(), set(), []
    for name in wanted:
        if name not in present and name in mapping.zero_if_absent:
            zeros.add(name)
            remarks.append(mapping.zero_if_absent[name])
        elif name.rpartition(".")[0] in absent:
            filled.add(name)
        else:
            _check_present(path, name, present)
    remarks += [f"no {module} is there: it takes initial values, which training moves" for module in absent]
    return frozenset(filled), frozenset(zeros), remarks


def kind_of(names: Mapping[Path, Iterable[str]], args: MegatronArgs) -> str:
    """Return the kind of model whose family has all these names, and supports the run's arguments.

    `names` are Megatron's, of each file. Raises ConfigError for arguments that no family supports, UserError
    for a name that none has.
    """
    known = MAPPINGS
    problems = {kind: unsupported_arguments(args, mapping) for kind, mapping in known.items()}
    if all(problems.values()):
        fewest = min(problems.values(), key=len)
        raise ConfigError(fewest)
    fitting = list(known)
    for path, listed in names.items():
        for theirs in listed:
            fitting = [kind for kind in fitting if known[kind].our_name(theirs) is not None]
            if not fitting:
                raise no_part(path, theirs)
    best = min(fitting, key=lambda kind: len(problems[kind]))  # the first that supports the arguments
    if problems[best]:
        raise ConfigError(problems[best])
    return best


def no_part(path: Path, theirs: str) -> UserError:
    """Return the error of a name that no family has."""
    if ".mlp.router." in theirs or ".mlp.experts." in theirs:
        return UserError(f"{path}: {printable(theirs)}: {THROUGH_HF}")
    return UserError(
        f"{path}: {printable(theirs)} is no part of {family_names(last='or')} as mlm has them: only these "
        "are imported, and torchtitan's names by mlm convert"
    )
