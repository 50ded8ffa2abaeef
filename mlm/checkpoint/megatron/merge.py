"""Weights of Megatron-LM's GPT-2 and BERT in this project's names and order, merged from the files of all
ranks.

A rank file holds "model", or with virtual pipeline stages "model0", "model1", …: part v of pipeline rank p is
stage v * pp + p (arXiv:2104.04473, section 2.2). Layers are numbered from 0 in each. The order of the fused
qkv rows goes by checkpoint_version: NVIDIA/Megatron-LM, megatron/checkpointing.py,
fix_query_key_value_ordering.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.megatron.args import (
    TOKEN_TYPES,
    Settings,
    check_layout,
    check_ours,
    model_config,
    notes,
    say,
    true_vocabulary,
)
from mlm.checkpoint.megatron.files import RankFiles, read_file, shown
from mlm.checkpoint.megatron.names import HEAD, is_bert, our_names, tp_dim
from mlm.checkpoint.megatron.sizes import check_replicas, shapes_of
from mlm.checkpoint.native.slices import Region
from mlm.errors import CorruptFileError, UserError
from mlm.models.config import ModelConfig

_PER_LAYER = tuple(
    f"{module}.{kind}"
    for module in ("attention_norm", "attention.qkv", "attention.out", "mlp_norm", "mlp.up", "mlp.down")
    for kind in ("weight", "bias")
)
_OUTER = ("token.weight", "position.weight", "final_norm.weight", "final_norm.bias")
_BERT_OUTER = (
    *(f"mlm_head.{module}.{kind}" for module in ("transform", "norm") for kind in ("weight", "bias")),
    "mlm_head.vocabulary.bias",
)
_BINARY_HEAD = ("pooler", "sop_head")
"""What a BERT trained with --bert-no-binary-head does not have; nor has it token types."""
_VERSIONS = (0, 1.0, 2.0, 3.0)


@dataclass(frozen=True)
class MegatronModel:
    """A checkpoint, opened: tensors stay in their files until they are read."""

    files: RankFiles
    model: ModelConfig
    parts: Mapping[str, tuple[Tensor, ...]]
    """Our name -> what each tensor-parallel rank holds."""
    version: float
    """Order of the qkv rows."""
    vp: int
    iteration: int | None
    table_rows: int
    filled: frozenset[str]
    """Parameters that are not there: they take initial values."""
    notes: tuple[str, ...]
    """Remarks for the user, one line each."""

    def read(self, name: str, region: Region) -> Tensor:
        """Those elements of a parameter, whole over tp, float32 on CPU.

        Raises CorruptFileError when some are not finite.
        """
        parts, dim = self.parts[name], tp_dim(name)
        if dim is None:
            whole = parts[0].to(torch.float32)
        else:
            shape = list(parts[0].shape)
            shape[dim] *= len(parts)
            whole = torch.empty(shape)
            for part, place in zip(parts, whole.chunk(len(parts), dim), strict=True):
                place.copy_(self._ordered(name, part))
        wanted = whole[region.within(Region((0,) * whole.ndim, tuple(whole.shape)))]
        if not torch.isfinite(wanted).all():
            raise CorruptFileError(
                f"{self.files.path}: {name} is not finite everywhere: take another iteration"
            )
        return wanted.contiguous()

    def _ordered(self, name: str, part: Tensor) -> Tensor:
        """A rank's part with the rows of the fused qkv as [head][q, k, v][column].

        Version 0 has [q, k, v][head][column], 1.0 has [head][column][q, k, v], later ones are as ours.
        """
        if ".attention.qkv." not in name or self.version >= 2:
            return part
        heads = self.model.num_heads // self.files.tp
        if self.version == 0:
            return part.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
        return part.unflatten(0, (heads, -1, 3)).transpose(1, 2).flatten(0, 2)


def open_checkpoint(
    files: RankFiles, *, vocab_size: int | None = None, known: int | None = None, num_heads: int | None = None
) -> MegatronModel:
    """Open and check every rank file: names, shapes, replicas and the tied head equal, settings ours.

    Args:
        vocab_size: tokens without padding; None takes `known`, the tokenizer's, else GPT-2's where it fits.
        num_heads: for a file that does not say.

    Raises UserError for a model that is not ours or what is left to say, CorruptFileError for bad files.
    """
    ranks = {rank: read_file(path) for rank, path in sorted(files.files.items())}
    first = files.files[0, 0]
    settings = Settings(ranks[0, 0].get("args"), first)
    check_ours(settings)
    check_layout(settings, files.tp, files.pp)
    version = _check_one_run(files, ranks)
    parts, num_layers, vp = _merge(files, ranks)
    filled, remarks = _complete(parts, files.tp)
    shapes = shapes_of(files, parts, num_layers)
    vocabulary = true_vocabulary(settings, shapes, vocab_size=vocab_size, known=known)
    model = model_config(settings, shapes, num_heads=num_heads, vocab_size=vocabulary)
    check_replicas(files, parts)
    iteration = ranks[0, 0].get("iteration")
    return MegatronModel(
        files=files,
        model=model,
        parts={name: held for name, held in parts.items() if name != HEAD},
        version=version,
        vp=vp,
        iteration=iteration if type(iteration) is int else None,
        table_rows=shapes.table_rows,
        filled=filled,
        notes=(*remarks, *notes(settings, shapes.kind)),
    )


def _complete(parts: dict[str, tuple[Tensor, ...]], tp: int) -> tuple[frozenset[str], list[str]]:
    """Which parameters of a BERT are not there, and remarks. Token types that are not there become zeros: it
    was trained without."""
    if not is_bert(parts):
        return frozenset(), []
    said = []
    if "token_type.weight" not in parts:
        h = parts["final_norm.weight"][0].shape[0]
        parts["token_type.weight"] = (torch.zeros(TOKEN_TYPES, h),) * tp
        said.append("it knows no token types: their embeddings are zeros, which training moves")
    missing = [module for module in _BINARY_HEAD if f"{module}.weight" not in parts]
    said += [f"no {module} is there: it takes initial values, which training moves" for module in missing]
    filled = frozenset(f"{module}.{kind}" for module in missing for kind in ("weight", "bias"))
    return filled, said


def _check_one_run(files: RankFiles, ranks: Mapping[tuple[int, int], dict[str, Any]]) -> float:
    """The version of all files. Raises CorruptFileError when they are not of one save."""
    for key in ("iteration", "checkpoint_version"):
        found = {rank: content.get(key) for rank, content in ranks.items()}
        for rank, value in found.items():
            if type(value) not in (int, float, type(None)) or value != found[0, 0]:
                raise CorruptFileError(
                    f"{files.files[rank]}: {key}={say(value)}, but {say(found[0, 0])} in "
                    f"{files.files[0, 0].parent.name}: files of different saves, copy them again"
                )
    version = ranks[0, 0].get("checkpoint_version") or 0
    if version not in _VERSIONS:
        raise UserError(
            f"{files.files[0, 0]}: checkpoint_version={say(version)}: 0, 1.0, 2.0 and 3.0 are known"
        )
    return float(version)


def _merge(
    files: RankFiles, ranks: Mapping[tuple[int, int], dict[str, Any]]
) -> tuple[dict[str, tuple[Tensor, ...]], int, int]:
    """Our name -> each tp rank's tensor; the number of layers; the virtual stages of a pipeline rank."""
    merged: dict[str, list[Tensor]] = {}
    vp = _chunks(files.files[0, 0], ranks[0, 0])
    num_layers = 0
    for v in range(vp):
        for p in range(files.pp):
            counts = set()
            for t in range(files.tp):
                path = files.files[t, p]
                if _chunks(path, ranks[t, p]) != vp:
                    raise CorruptFileError(
                        f"{path}: has other model parts than {files.files[0, 0]}: copy it again"
                    )
                chunk = ranks[t, p]["model" if "model" in ranks[t, p] else f"model{v}"]
                named, count = our_names(path, chunk, num_layers)
                counts.add(count)
                for name, tensor in named.items():
                    held = merged.setdefault(name, [])
                    if len(held) != t:
                        raise CorruptFileError(
                            f"{path}: {name} is in too few or too many ranks: copy all again"
                        )
                    held.append(tensor)
            if len(counts) > 1:
                raise CorruptFileError(f"{files.path}: ranks of stage {p} differ in layers: copy all again")
            num_layers += counts.pop()
    for name in _expected(num_layers, merged):
        if len(merged.get(name, [])) != files.tp:
            raise CorruptFileError(
                f"{files.path}: {name} is not in every rank that should hold it: copy all again"
            )
    return {name: tuple(held) for name, held in merged.items()}, num_layers, vp


def _expected(num_layers: int, merged: Iterable[str]) -> Iterator[str]:
    """What must be there. Of a BERT's pooler and sentence-order head both parameters, or none."""
    yield from _OUTER
    if is_bert(merged):
        yield from _BERT_OUTER
        there = {name.rpartition(".")[0] for name in merged}
        yield from (f"{m}.{kind}" for m in _BINARY_HEAD if m in there for kind in ("weight", "bias"))
    yield from (f"layers.{n}.{name}" for n in range(num_layers) for name in _PER_LAYER)


def _chunks(path: Path, content: Mapping[str, Any]) -> int:
    """How many model parts a file holds: 1, or its virtual stages."""
    if "model" in content:
        return 1
    count = 0
    while f"model{count}" in content:
        count += 1
    if not count:
        keys = ", ".join(sorted(content)[:6])
        raise CorruptFileError(
            f"{path}: holds no model (it has {shown(keys) or 'nothing'}): name another iteration"
        )
    return count
