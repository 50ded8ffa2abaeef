"""A model folder of `transformers`, read without it: settings, tensors, digests. Only JSON and safetensors.

Nothing in the folder is executed, sizes are bounded before anything is read, and no file outside it is
opened: links are followed only as the Hub's cache lays them (snapshots/… -> blobs/…).
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.format import DTYPE_NAMES, JSON, without_repeats
from mlm.checkpoint.hf_config import Family, family_of, show
from mlm.checkpoint.huggingface import Place
from mlm.checkpoint.rectangle import Rectangle
from mlm.checkpoint.shard_file import Stored, copy_region, read_safetensors_header
from mlm.config.errors import CorruptFileError, UserError
from mlm.config.model_schema import ModelConfig
from mlm.files import digest_file

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt")
SMALL_FILES = (CONFIG, INDEX, *TOKENIZER)
"""All we read besides the tensors."""
ADAPTER = "adapter_config.json"

MAX_BYTES = {CONFIG: 1 << 20, INDEX: 1 << 26} | dict.fromkeys(TOKENIZER, 1 << 28)
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}\.safetensors")  # no separator, not hidden
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
AGAIN = "Download or save it again"
ROWS = 4096  # compared at a time


def find_file(folder: Path, name: str) -> Path | None:
    """A regular file of the folder, or of the Hub's cache that a snapshot links to; None if it is not there.

    Raises UserError when it is something else, or larger than such a file can be.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        target, root = path.resolve(strict=True), folder.resolve()
        found = target.stat()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: cannot be opened: {error}. Make it readable, or {AGAIN.lower()}") from error
    allowed = [root]
    if root.parent.name == "snapshots":  # models--owner--name/snapshots/COMMIT: blobs of it, or of all models
        allowed += [root.parents[1] / "blobs", root.parents[2] / "blobs"]
    if not any(target.is_relative_to(place) for place in allowed):
        raise UserError(f"{path}: a link that leads out of the folder. Put the file itself there")
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: no plain file. {AGAIN}")
    most = MAX_BYTES.get(name)
    if most is not None and found.st_size > most:
        raise UserError(f"{path}: {found.st_size} bytes, {most} is the limit. {AGAIN}")
    return target


def read_json(folder: Path, name: str) -> dict[str, JSON]:
    """A JSON object in the folder. Raises UserError without a file, CorruptFileError when it is no object."""
    path = find_file(folder, name)
    if path is None:
        raise UserError(f"{folder}: holds no {name}. Name the folder of a model that transformers saved")
    try:
        said = json.loads(path.read_bytes(), object_pairs_hook=without_repeats)
    except OSError as error:
        raise UserError(f"{folder / name}: {error.strerror}. Make it readable") from error
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{folder / name}: is no JSON ({error}). {AGAIN}") from error
    if not isinstance(said, dict):
        raise CorruptFileError(f"{folder / name}: is no JSON object. {AGAIN}")
    return said


@dataclass(frozen=True)
class HFModel:
    """What config.json says."""

    folder: Path
    family: Family
    config: ModelConfig
    notes: tuple[str, ...]
    """What is taken differently from what it says."""
    tied: bool
    """Whether the output layer is the token table even where the file holds no output layer."""


def read_model(folder: Path) -> HFModel:
    """Read the settings of a model folder. Raises UserError (all faults of config.json together)."""
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder. Name one with config.json and model.safetensors")
    said, path = read_json(folder, CONFIG), str(folder / CONFIG)
    if find_file(folder, ADAPTER):
        raise UserError(
            f"{folder}: {ADAPTER}: holds an adapter, whose weights are not in the model. Merge it "
            f"(merge_and_unload of peft), save the model, and name that folder"
        )
    family = family_of(said, path)
    config, notes = family.read(said, path)
    return HFModel(folder, family, config, tuple(notes), said.get("tie_word_embeddings", True) is True)


class HFTensors:
    """The tensors of a model folder, one read at a time, under our names.

    When it is made, names and dtypes are checked: each parameter is there once, and nothing else but what
    the family ignores; `check` compares shapes. Raises UserError, CorruptFileError when a file is damaged.
    """

    def __init__(self, model: HFModel) -> None:
        self.model = model
        self.files = weight_files(model.folder)
        self._stored = self._headers()
        self._places = self._check_names(self._stored)

    @property
    def num_bytes(self) -> int:
        """Size of all files that hold tensors."""
        return sum(path.stat().st_size for path in self.files.values())

    def digests(self, progress: Callable[[int], None]) -> dict[str, str]:
        """Content digest of each file read, those of the tokenizer too; `progress` hears of tensor bytes."""
        out = {}
        for name in SMALL_FILES:
            if path := find_file(self.model.folder, name):
                with self._reading(name):
                    out[name] = digest_file(path)
        for name, path in self.files.items():
            with self._reading(name):
                out[name] = digest_file(path, progress)
        return dict(sorted(out.items()))

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises UserError unless every parameter has, there, the shape that it needs here, and the output
        layer is the token table."""
        for name, shape in shapes.items():
            place, want = self._places[name], self._places[name].shape(shape)
            file, stored = self._stored[place.name]
            if stored.shape != want:
                raise UserError(
                    f"{self.model.folder / file}: {place.name} is {list(stored.shape)}, {CONFIG} makes it "
                    f"{list(want)}. Mend {CONFIG}, or save the model again"
                )
        self._check_tied()

    def read(self, name: str, rectangle: Rectangle) -> Tensor:
        """Those elements of our parameter `name`, float32; holds the whole tensor twice at most."""
        place = self._places[name]
        whole = place.to_ours(self._load(place.name))
        return whole[tuple(slice(o, o + n) for o, n in zip(*rectangle, strict=True))]

    def _load(self, theirs: str, rows: range | None = None) -> Tensor:
        """A tensor as it is stored, or some of its rows, as float32."""
        file, stored = self._stored[theirs]
        whole = Rectangle((0,) * len(stored.shape), stored.shape)
        region = whole
        if rows is not None:
            region = Rectangle((rows.start, *whole.offset[1:]), (len(rows), *stored.shape[1:]))
        target = torch.empty(region.size, dtype=torch.float32)
        with self._reading(file), open(self.files[file], "rb") as f:
            copy_region(f, stored, region, whole, target)
        return target

    @contextmanager
    def _reading(self, file: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.model.folder / file}: cannot be read: {error.strerror}. {AGAIN}"
            ) from error

    def _headers(self) -> dict[str, tuple[str, Stored]]:
        """File and layout of every tensor, under their name without the base model's prefix."""
        out: dict[str, tuple[str, Stored]] = {}
        for file, path in self.files.items():
            with self._reading(file):
                found = read_safetensors_header(path, AGAIN)[1]
            for theirs, stored in found.items():
                name = theirs.removeprefix(self.model.family.prefix)
                if name in out:
                    where = self.model.folder
                    raise CorruptFileError(f"{where}: {name} is in {out[name][0]} and in {file}. {AGAIN}")
                out[name] = file, stored
        return out

    def _check_names(self, found: Mapping[str, tuple[str, Stored]]) -> dict[str, Place]:
        family, folder = self.model.family, self.model.folder
        places, known = {}, set()
        for ours, place in family.places(self.model.config):  # stops at the first that is missing
            if place.name not in found:
                raise UserError(f"{folder}: holds no tensor {place.name}, which {CONFIG} asks for. {AGAIN}")
            places[ours] = place
            known.add(place.name)
        for name, (file, stored) in found.items():
            if name not in known and name != family.tied[0] and not family.ignored.fullmatch(name):
                raise UserError(
                    f"{folder / file}: {show(name)} is no parameter of {family.architecture}. Save the "
                    f"model as {family.architecture}, without other heads or more layers than {CONFIG} says"
                )
            if name in known and stored.dtype not in FLOATS:
                kinds = ", ".join(DTYPE_NAMES[dtype] for dtype in FLOATS)
                raise UserError(
                    f"{folder / file}: {name} is {DTYPE_NAMES[stored.dtype]}; supported: {kinds}. Save the "
                    f"model in one of them"
                )
        return places

    def _check_tied(self) -> None:
        """The output layer is our token table: what else is stored for it must be equal."""
        output, table = self.model.family.tied
        if output not in self._stored:
            if not self.model.tied:
                raise UserError(
                    f"{self.model.folder / CONFIG}: tie_word_embeddings=false, and no {output} is there. "
                    f"Supported: an output layer that is the token table"
                )
            return
        (_, mine), (_, other) = self._stored[table], self._stored[output]
        equal = mine.shape == other.shape and other.dtype in FLOATS
        for first in range(0, mine.shape[0], ROWS):
            rows = range(first, min(first + ROWS, mine.shape[0]))
            equal = equal and torch.equal(self._load(table, rows), self._load(output, rows))
        if not equal:
            raise UserError(
                f"{self.model.folder}: {output} differs from {table}: an output layer of its own is not "
                f"supported, ours is the token table"
            )


def weight_files(folder: Path) -> dict[str, Path]:
    """The safetensors files of a model folder: name -> where its bytes are. Raises UserError."""
    if path := find_file(folder, WEIGHTS):
        return {WEIGHTS: path}
    if not find_file(folder, INDEX):
        raise UserError(_no_weights(folder))
    listed = read_json(folder, INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(f, str) for f in listed.values()):
        raise CorruptFileError(f"{folder / INDEX}: its weight_map names no files. {AGAIN}")
    out = {}
    for name in sorted(set(listed.values())):
        if not SHARD_NAME.fullmatch(name):
            raise CorruptFileError(f"{folder / INDEX}: the file name {show(name)} is not allowed. {AGAIN}")
        path = find_file(folder, name)
        if path is None:
            raise UserError(f"{folder / name}: missing, {INDEX} names it. {AGAIN}")
        out[name] = path
    return out


def _no_weights(folder: Path) -> str:
    others = sorted(path.name for path in folder.iterdir() if path.suffix in OTHER_WEIGHTS)
    remedy = (
        "load it where you trust it, by transformers, and write it with save_pretrained (safetensors is its "
        "default), then name that folder"
    )
    if not others:
        return f"{folder}: holds neither {WEIGHTS} nor {INDEX}. Name the folder of a model, or {remedy}"
    if others[0].endswith(PICKLES):
        return (
            f"{folder / others[0]}: a pickle, which could run any code when it is read: it is not opened. "
            f"Is there a safetensors version? Else {remedy}"
        )
    return f"{folder / others[0]}: only {WEIGHTS} is read. To convert it, {remedy}"
