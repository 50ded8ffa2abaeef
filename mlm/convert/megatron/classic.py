"""Megatron-LM's classic checkpoints: a file of torch.save for each tensor- and pipeline-parallel rank.

    iter_0001000/ or release/
      mp_rank_01/model_optim_rng.pt        tensor-parallel rank 1; where there is pipeline parallelism
      mp_rank_01_002/model_optim_rng.pt    tensor-parallel rank 1 of pipeline rank 2

The distributed optimizer of 2023 puts the model into model_rng.pt. A file holds "model", or with virtual
stages "model0", "model1", …: part v of pipeline rank p is stage v * pp + p (arXiv:2104.04473, section 2.2).
Layers are numbered from 0 in each. Source: NVIDIA/Megatron-LM, megatron/checkpointing.py from 2019 to 2023,
get_checkpoint_name(s) and fix_query_key_value_ordering.

The files are pickles, read as data (mlm/convert/dcp/unpickled.py); tensors are mapped into memory.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.slices import Region
from mlm.convert.dcp.metadata import COPY_AGAIN
from mlm.convert.dcp.unpickled import DAMAGES, check_archive
from mlm.convert.locations import ForeignModel, Shape
from mlm.convert.megatron.mapping import IN_LAYER, TABLES, THROUGH_HF
from mlm.convert.megatron.model import (
    MegatronArgs,
    MegatronTensors,
    assemble,
    describe_value,
    read_saved,
    unknown_name,
)
from mlm.util.errors import CorruptFileError, UserError, reading_from
from mlm.util.files import digest_file
from mlm.util.terminal import Advance, one_line

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
Rank = tuple[int, int]
"""(tensor-parallel rank, pipeline rank)."""
_SPLIT_ROWS = re.compile(r".*\.(linear_qkv|linear_fc1)\.(weight|bias)")
_SPLIT_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
RENAMED = (
    (r"input_(?:layernorm|norm)\.", "self_attention.linear_qkv.layer_norm_"),
    (r"(?:self_)?attention\.query_key_value\.", "self_attention.linear_qkv."),
    (r"(?:self_)?attention\.dense\.", "self_attention.linear_proj."),
    (r"(?:post_attention_(?:layernorm|norm)|pre_mlp_layernorm)\.", "mlp.linear_fc1.layer_norm_"),
    (r"mlp\.dense_h_to_4h\.", "mlp.linear_fc1."),
    (r"mlp\.dense_4h_to_h\.", "mlp.linear_fc2."),
)
"""Pattern of a name in a layer, of 2019 to 2024 -> Megatron Core's name."""
RENAMED_OUTSIDE = (
    (r"(position|tokentype)_embeddings\.weight", r"embedding.\1_embeddings.weight"),
    (r"((?:en|de)coder)\.final_norm\.(.+)", r"\1.final_layernorm.\2"),
    (r"word_embeddings_for_head\.weight", "output_layer.weight"),
    (r"lm_head\.(?:layernorm|norm)\.(.+)", r"lm_head.layer_norm.\1"),
    (r"lm_head\.bias", "output_layer.bias"),
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST_DEPTH, _MOST_NODES = 8, 1 << 17  # of nested dictionaries, which may contain themselves


def is_classic(step: Path) -> bool:
    """True if a folder holds files of ranks. Raises UserError if it cannot be read."""
    with reading_from(step, COPY_AGAIN):
        return any(RANK_FOLDER.fullmatch(folder.name) for folder in step.iterdir())


def open_classic(
    step: Path, vocab_size: int | None, tokenizer_size: int | None, num_heads: int | None
) -> ForeignModel:
    """Open the files of all ranks: names, shapes, equal replicas and tied head, supported arguments.

    `num_heads` is for files of 2019, which do not record it; the sizes are as in `open_distributed`. Raises
    UserError and CorruptFileError.
    """
    files = RankFiles(step)
    args = MegatronArgs(files.contents[0, 0].get("args"), files.paths[0, 0], may_lack=True)
    chunks = dict[Rank, list[dict[str, Any]]]()
    for rank, content in files.contents.items():
        path, keys = files.paths[rank], ["model"]
        if "model" not in content:  # a part for each virtual stage
            keys = [f"model{v}" for v in range(len(content)) if f"model{v}" in content]
        if not keys:
            content_names = one_line(", ".join(sorted(content)[:6])) or "nothing"
            raise CorruptFileError(f"{path}: holds no model (it has {content_names}): name another iteration")
        chunks[rank] = [flatten(path, content[key]) for key in keys]
    version = check_one_save(files, chunks)
    names = [name for parts in chunks.values() for part in parts for name in part]
    is_bert = any(re.match(r"(language_model\.)?(lm_head\.|binary_head\.|.*tokentype_)", n) for n in names)
    merged = merge_stages(files, chunks, "encoder" if is_bert else "decoder")
    parts = {name: tuple(rank[name] for rank in merged) for name in merged[0]}
    heads = args.number("num_attention_heads") or num_heads
    if heads is not None and heads % files.tp:
        raise CorruptFileError(f"{step}: tp={files.tp} does not divide num_heads={heads}: copy all again")
    ranks = RankTensors(files, parts, version, heads, is_gated=args.values.get("swiglu") is True)
    return assemble(
        MegatronTensors(step, "torch", files, ranks.shapes, ranks.load, files.tp),
        args,
        iteration=files.contents[0, 0].get("iteration"),
        vocabulary=(vocab_size, tokenizer_size),
        num_heads=num_heads,
    )


class RankFiles:
    """The files of one iteration, all ranks of tp * pp. Raises CorruptFileError where one is missing."""

    def __init__(self, step: Path) -> None:
        self.step, self.paths = step, dict[Rank, Path]()
        with reading_from(step, COPY_AGAIN):
            folders = sorted(step.iterdir())
        for folder in folders:
            numbers = RANK_FOLDER.fullmatch(folder.name)
            paths = [path for name in MODEL_FILES if (path := folder / name).is_file()]
            if not numbers or not paths:  # optimizer state of data-parallel ranks has separate folders
                continue
            if numbers[3] is not None:
                raise UserError(f"{folder}: of one expert-parallel rank: {THROUGH_HF}")
            rank = int(numbers[1]), int(numbers[2] or 0)
            if rank in self.paths:
                raise CorruptFileError(f"{step}: {folder.name} of two layouts: delete the older")
            self.paths[rank] = paths[0]
        if not self.paths:
            raise UserError(f"{step}: holds no mp_rank_…/{MODEL_FILES[0]}: is it a Megatron-LM checkpoint?")
        self.tp, self.pp = (1 + max(numbers) for numbers in zip(*self.paths, strict=True))
        for t, p in ((t, p) for t in range(self.tp) for p in range(self.pp)):
            if (t, p) not in self.paths:
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if self.pp > 1 else "")
                ranks = f"of tp={self.tp} pp={self.pp} ranks"
                raise CorruptFileError(f"{step}: {name}/{MODEL_FILES[0]} is missing, {ranks}: copy it too")
        self.saved = {rank: read_saved(path) for rank, path in sorted(self.paths.items())}
        self.mapped = {
            rank: torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
            for rank, path in self.paths.items()
        }
        self.contents: dict[Rank, dict[str, Any]] = {rank: saved.value for rank, saved in self.saved.items()}

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths.values())

    def verify(self, progress: Advance) -> dict[str, str]:
        """Compare every record with its checksum; return the digest of each file by its path.

        Raises CorruptFileError where a checksum differs, UserError where a file cannot be read.
        """
        digests = {}
        for path in self.paths.values():
            with reading_from(path, COPY_AGAIN):
                try:
                    with open(path, "rb") as f:
                        check_archive(f)
                except DAMAGES as error:
                    raise CorruptFileError(f"{path}: damaged ({one_line(error)}): copy it again") from error
                digests[path.relative_to(self.step).as_posix()] = digest_file(path, progress)
        return digests


class RankTensors:
    """The tensors of all rank files, by Megatron Core's names."""

    def __init__(
        self,
        files: RankFiles,
        parts: dict[str, tuple[Tensor, ...]],
        version: float,
        heads: int | None,
        *,
        is_gated: bool,
    ) -> None:
        """Raise CorruptFileError unless replicas on several ranks are equal, NaN included."""
        self.tp, self.shapes = files.tp, dict[str, Shape]()
        self.parts, self.version, self.heads, self.is_gated = parts, version, heads, is_gated
        for name, (first, *other_parts) in parts.items():
            if any(part.shape != first.shape or part.dtype != first.dtype for part in other_parts):
                raise CorruptFileError(
                    f"{files.step}: {one_line(name)} differs in form between tensor-parallel ranks"
                )
            dim, shape = split_dim(name), list(first.shape)
            if dim is not None and dim < len(shape):
                shape[dim] *= self.tp
            self.shapes[name] = tuple(shape)
            if dim is None and any(
                not torch.equal(part.view(torch.uint8), first.view(torch.uint8)) for part in other_parts
            ):
                raise CorruptFileError(
                    f"{files.step}: {one_line(name)} differs between tensor-parallel ranks, which hold "
                    "copies of it: they are of different saves, take another iteration"
                )

    def load(self, name: str, region: Region) -> Tensor:
        """Return elements of a tensor, float32, qkv rows as [head][q, k, v][column]."""
        target = torch.empty(region.size)
        for stored_region, part in self._slices(name):
            if common := region.intersect(stored_region):
                target[common.within(region)] = part[common.within(stored_region)]
        return target

    def _slices(self, name: str) -> Iterator[tuple[Region, Tensor]]:
        """Yield the regions of a full tensor and the slices of ranks that hold them."""
        dim, parts = split_dim(name), self.parts[name]
        is_old_qkv = self.version < 2 and name.endswith(("linear_qkv.weight", "linear_qkv.bias"))
        for t, part in enumerate(parts if dim is not None else parts[:1]):
            blocks: tuple[Tensor, ...] = (part,)
            if self.is_gated and name.endswith("linear_fc1.weight"):
                # A rank's rows are [gate, up], and so are the full tensor's.
                blocks = part.chunk(2)
            elif is_old_qkv:
                assert self.heads is not None, "checked when it was opened"
                heads = self.heads // self.tp
                if self.version == 0:  # [q, k, v][head][column]
                    rows = part.reshape(3, heads, -1, *part.shape[1:]).transpose(0, 1)
                else:  # [head][column][q, k, v]
                    rows = part.reshape(heads, -1, 3, *part.shape[1:]).transpose(1, 2)
                blocks = (rows.flatten(0, 2),)
            for block, rows in enumerate(blocks):
                offset = [0] * rows.ndim
                if dim is not None:
                    offset[dim] = (block * self.tp + t) * rows.shape[dim]
                yield Region(tuple(offset), tuple(rows.shape)), rows


def split_dim(name: str) -> int | None:
    """Return the dim that is split over tensor-parallel ranks; None for replicated tensors."""
    if name in TABLES or _SPLIT_ROWS.fullmatch(name):
        return 0
    return 1 if _SPLIT_COLUMNS.fullmatch(name) else None


def flatten(path: Path, chunk: Any) -> dict[str, Any]:
    """Flatten a dictionary of dictionaries: dotted name -> value, in order. Raises CorruptFileError."""
    values_by_name: dict[str, Any] = {}
    open_nodes: list[tuple[str, int, Any]] = [("", 0, chunk)]
    visited = 0
    while open_nodes:
        prefix, depth, node = open_nodes.pop()
        visited += 1
        if prefix and not isinstance(node, dict):
            if not prefix.endswith("_extra_state."):  # Transformer Engine's, of FP8 training
                values_by_name[prefix.removesuffix(".")] = node
            continue
        too_many = depth > _MOST_DEPTH or visited > _MOST_NODES
        if too_many or not isinstance(node, dict) or not all(type(key) is str for key in node):
            name = one_line(prefix) or "model"
            raise CorruptFileError(f"{path}: {name} is not a dictionary of names: copy it again")
        open_nodes += [(f"{prefix}{key}.", depth + 1, value) for key, value in reversed(node.items())]
    return values_by_name


def core_name(name: str, layers: str) -> str:
    """Return Megatron Core's name for a name of any year; `layers` is its module of the layers."""
    short = name.removeprefix("language_model.")
    if short != name:
        short = re.sub(r"^(?:transformer|encoder|decoder)\.", f"{layers}.", short)
    if in_layer := IN_LAYER.fullmatch(short):
        last = in_layer[3]
        for pattern, new in RENAMED:
            last = re.sub(f"^{pattern}", new, last)
        return f"{in_layer[1]}.layers.{in_layer[2]}.{last}"
    for pattern, new in RENAMED_OUTSIDE:
        short = re.sub(f"^{pattern}$", new, short)
    return short


def check_one_save(files: RankFiles, chunks: Mapping[Rank, list[dict[str, Any]]]) -> float:
    """Return the checkpoint_version. Raises CorruptFileError if the files are of different saves."""
    first = files.contents[0, 0]
    for rank, content in files.contents.items():
        for key in ("iteration", "checkpoint_version"):
            value, expected = content.get(key), first.get(key)
            if type(value) not in (int, float, type(None)) or value != expected:
                raise CorruptFileError(
                    f"{files.paths[rank]}: {key}={describe_value(value)}, but {describe_value(expected)} in "
                    f"{files.paths[0, 0].parent.name}: files of different saves, copy them again"
                )
        if len(chunks[rank]) != len(chunks[0, 0]):
            raise CorruptFileError(
                f"{files.paths[rank]}: has other model parts than the first: copy it again"
            )
    version = first.get("checkpoint_version") or 0
    if version not in (0, 1.0, 2.0, 3.0):
        setting = f"checkpoint_version={describe_value(version)}"
        raise UserError(f"{files.paths[0, 0]}: {setting}: 0, 1.0, 2.0 and 3.0 are known")
    return float(version)


def merge_stages(
    files: RankFiles, chunks: Mapping[Rank, list[dict[str, Any]]], layers: str
) -> list[dict[str, Tensor]]:
    """Return tensors by Megatron Core's names for each tensor-parallel rank, layers numbered over stages."""
    ranks = list[dict[str, Tensor]]()
    for t in range(files.tp):
        tensors, first_layer = dict[str, Tensor](), 0
        for v in range(len(chunks[t, 0])):
            for p in range(files.pp):
                part = {core_name(name, layers): value for name, value in chunks[t, p][v].items()}
                first_layer += add_stage(tensors, files, (t, p), part, first_layer)
        ranks.append(tensors)
        if differing := tensors.keys() ^ ranks[0].keys():
            raise CorruptFileError(
                f"{files.step}: {min(differing)} is not in every rank that should hold it: copy all again"
            )
    return ranks


def add_stage(
    tensors: dict[str, Tensor], files: RankFiles, rank: Rank, part: Mapping[str, Any], first_layer: int
) -> int:
    """Add the tensors of a stage; return its number of layers."""
    path, layers = files.paths[rank], set[int]()
    for name, value in part.items():
        try:
            stored = files.saved[rank].find(value)
            content = files.mapped[rank][stored.begin : stored.begin + stored.form.num_bytes]
            tensor = content.view(stored.dtype).view(stored.shape)
        except DAMAGES:
            tensor = torch.empty(0)
        if tensor.dtype not in _FLOATS or not 1 <= tensor.ndim <= 2 or not tensor.numel():
            problem = "is not a plain tensor of floating-point numbers"
            raise CorruptFileError(f"{path}: {one_line(name)} {problem}: copy it again")
        if in_layer := IN_LAYER.fullmatch(name):
            layers.add(int(in_layer[2]))
            name = f"{in_layer[1]}.layers.{first_layer + int(in_layer[2])}.{in_layer[3]}"
        if name in tensors:
            raise unknown_name(path, name)
        tensors[name] = tensor
    if layers != set(range(len(layers))):
        raise CorruptFileError(f"{path}: its layers are {sorted(layers)[:8]}, not 0, 1, 2, …: copy it again")
    return len(layers)
