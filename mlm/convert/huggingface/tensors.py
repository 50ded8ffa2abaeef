"""The tensors of a model folder of `transformers` as our parameters: checked, read, digested."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mlm.checkpoint.native.compare import are_equal
from mlm.checkpoint.native.format import DTYPE_NAMES
from mlm.checkpoint.native.reader import copy_region
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.parameters import parameters
from mlm.convert.huggingface.folder import CONFIG, SAVE_AGAIN, SMALL_FILES, TOKENIZER, HFModel, find_file
from mlm.convert.huggingface.mapping import Location, show
from mlm.convert.huggingface.mxfp4 import BLOCK
from mlm.util.errors import CorruptFileError, UserError, reading_from
from mlm.util.files import digest_file

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class HFTensors:
    """The tensors of a model folder, one read at a time, under our names."""

    def __init__(self, model: HFModel) -> None:
        """Check names and dtypes; `check` compares shapes.

        Each parameter except `content.filled` must be stored once, and nothing else but tensors that the
        family ignores. Raises UserError.
        """
        self.model = model
        self._locations = self._check_names()

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.model.files.values())

    def holds(self, name: str) -> bool:
        return name in self._locations

    def digests(self, progress: Callable[[int], None]) -> dict[str, str]:
        """Return the content digest of each file, the tokenizer's too; `progress` receives tensor bytes."""
        digests, folder = {}, self.model.folder
        beside_vocabulary, vocabulary = TOKENIZER[-1], TOKENIZER[-2]
        with reading_from(folder, SAVE_AGAIN):
            for name in SMALL_FILES:
                is_read = name != beside_vocabulary or find_file(folder, vocabulary)
                if is_read and (path := find_file(folder, name)):
                    digests[name] = digest_file(path)
            for name, path in self.model.files.items():
                digests[name] = digest_file(path, progress)
        return dict(sorted(digests.items()))

    def check(self) -> None:
        """Raise UserError unless shapes are those that config.json implies, and copies are equal."""
        for name, parameter in parameters(self.model.config).items():
            if name in self.model.content.filled:
                continue
            location, shape = self._locations[name], tuple(parameter.shape)
            wanted = [location.shape(shape)] * len(location.names)
            if location.experts is not None:
                wanted = location.experts.shapes(shape)
                if location.experts.is_mxfp4 and shape[-1] % BLOCK:
                    raise UserError(
                        f"{self.model.folder}: {location.names[0]}: {CONFIG} makes rows of {shape[-1]} "
                        f"numbers, and MXFP4 has blocks of {BLOCK}. {SAVE_AGAIN}"
                    )
            for theirs, want in zip(location.names, wanted, strict=True):
                file, stored = self.model.stored[theirs]
                if stored.shape != want:
                    raise UserError(
                        f"{self.model.folder / file}: {theirs} is {list(stored.shape)}, {CONFIG} makes it "
                        f"{list(want)}. Fix {CONFIG}, or save the model again"
                    )
        # The output layer is our token table: copies of it must be equal.
        model, has_output = self.model, self.model.config.head == "language_model"
        for copy, name in model.copies.items():
            if copy in model.stored:
                self._check_copy(copy, name)
            elif has_output and not model.is_tied and copy.endswith("weight"):
                raise UserError(
                    f"{model.folder / CONFIG}: tie_word_embeddings=false, and no {copy} is there. "
                    f"Supported: an output layer that is the token table"
                )

    def read(self, name: str, region: Region) -> Tensor:
        """Return those elements of our parameter `name`, float32.

        A tensor stored like ours is read in part; of others the full tensor is held, twice at most. Experts
        are read one after the other.
        """
        location = self._locations[name]
        if location.is_plain:
            return self._load(location.names[0], region)
        if location.experts is not None:
            return self._read_experts(location, region)
        if not location.stacked:
            full = location.to_ours([self._load(theirs) for theirs in location.names])
            return full[region.within(Region.whole(full.shape))]
        target, depth = torch.empty(region.size, dtype=torch.float32), len(location.stacked)
        inner = Region(region.offset[depth:], region.size[depth:])
        for index, theirs in zip(location.indices, location.names, strict=True):
            at = tuple(n - first for n, first in zip(index, region.offset, strict=False))
            if all(0 <= n < size for n, size in zip(at, region.size, strict=False)):
                target[at].copy_(self._load(theirs, inner))
        return target

    def _read_experts(self, location: Location, region: Region) -> Tensor:
        """Return elements of a parameter that one tensor holds for all experts, one after the other."""
        target, inner = torch.empty(region.size), Region(region.offset[1:], region.size[1:])
        for number, part in enumerate(target):
            first, values = region.offset[0] + number, list[Tensor]()
            for theirs in location.names:
                shape = self.model.stored[theirs][1].shape
                own = Region((first, *(0 for _ in shape[1:])), (1, *shape[1:]))
                values.append(self._load(theirs, own))
            full = location.to_ours(values)[0]
            if not full.isfinite().all():  # an exponent of MXFP4 that is NaN's
                file = self.model.folder / self.model.stored[location.names[-1]][0]
                raise CorruptFileError(f"{file}: {location.names[-1]} is not finite. {SAVE_AGAIN}")
            part.copy_(full[inner.within(Region.whole(full.shape))])
        return target

    def _load(self, theirs: str, region: Region | None = None) -> Tensor:
        """Return a tensor as it is stored, or some of its elements, as float32; bytes as they are."""
        file, stored = self.model.stored[theirs]
        whole = Region.whole(stored.shape)
        region = region or whole
        dtype = stored.dtype if stored.dtype == torch.uint8 else torch.float32
        target = torch.empty(region.size, dtype=dtype)
        if region.volume:
            with reading_from(self.model.folder / file, SAVE_AGAIN), open(self.model.files[file], "rb") as f:
                copy_region(f, stored, region, whole, target)
            if not torch.stack(target.aminmax()).isfinite().all():  # without a copy of the tensor's size
                raise CorruptFileError(f"{self.model.folder / file}: {theirs} is not finite. {SAVE_AGAIN}")
        return target

    def _check_names(self) -> dict[str, Location]:
        model, locations, known = self.model, {}, set(self.model.content.unused)
        for ours, location in model.mapping.locations(model.config):  # stops at the first that is missing
            if ours in model.content.filled:
                continue
            location = self._as_stored(location)
            for theirs in location.names:
                if theirs not in model.stored:
                    raise UserError(
                        f"{model.folder}: holds no tensor {theirs}, which {CONFIG} requires. {SAVE_AGAIN}"
                    )
            locations[ours] = location
            known.update(location.names)
        quantised = {
            theirs
            for location in locations.values()
            if location.experts is not None and location.experts.is_mxfp4
            for theirs in location.names
        }
        known_twice = {copy for copy, name in model.copies.items() if name in known}
        for name, (file, stored) in model.stored.items():
            if name not in known | known_twice and not model.mapping.ignored.fullmatch(name):
                wanted = model.architecture
                raise UserError(
                    f"{model.folder / file}: {show(name)} is no parameter of {wanted}. Save the model as "
                    f"{wanted}, without other heads or more layers than {CONFIG} says"
                )
            supported = (torch.uint8,) if name in quantised else FLOATS
            if name in known and stored.dtype not in supported:
                kinds = ", ".join(DTYPE_NAMES[dtype] for dtype in supported)
                raise UserError(
                    f"{model.folder / file}: {name} is {DTYPE_NAMES[stored.dtype]}; supported: {kinds}. Save "
                    f"the model in one of them"
                )
        return locations

    def _as_stored(self, location: Location) -> Location:
        """Return the location of a weight's blocks and scales, if it is stored so."""
        name = location.names[0]
        both = (f"{name}_blocks", f"{name}_scales")
        if location.experts is None or name in self.model.stored or both[0] not in self.model.stored:
            return location
        rows = location.experts._replace(transposed=False, is_mxfp4=True)
        return replace(location, names=both, experts=rows)

    def _check_copy(self, copy: str, name: str) -> None:
        model = self.model
        (_, original), (_, second) = model.stored[name], model.stored[copy]
        is_alike = original.shape == second.shape and second.dtype in FLOATS
        if is_alike and are_equal(partial(self._load, name), partial(self._load, copy), original.shape):
            return
        untied, _ = model.mapping.read({**model.raw, "tie_word_embeddings": False}, CONFIG)
        fix = f"an untied output layer of {untied.kind} is not supported. Remove {copy} if {name} is meant"
        if not model.mapping.copies(untied):
            fix = (
                f"tie_word_embeddings=true in {CONFIG}: transformers 5 computes with the former, 4 with the "
                f"latter. Set tie_word_embeddings=false to keep {copy}, or remove that tensor"
            )
        raise UserError(f"{model.folder}: {copy} differs from {name}, and {fix}")
