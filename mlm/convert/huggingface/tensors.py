"""The tensors of a model folder of `transformers`, checked, digested and read as parameters."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from mlm.checkpoint.native.compare import are_equal
from mlm.checkpoint.native.format import DTYPE_NAMES, TensorEntry
from mlm.checkpoint.native.reader import copy_region
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.parameters import parameters
from mlm.convert.huggingface.folder import CONFIG, SAVE_AGAIN, SMALL_FILES, TOKENIZER, HFModel, find_file
from mlm.convert.huggingface.mapping import show
from mlm.convert.locations import MXFP4_BLOCK, Location
from mlm.util.errors import CorruptFileError, UserError, reading_from
from mlm.util.files import digest_file

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class HFTensors:
    """The parameters in a model folder, read one at a time."""

    def __init__(self, model: HFModel) -> None:
        """Check names and dtypes; `check` compares shapes.

        Each parameter except `content.filled` must be stored once, and nothing else but tensors that the
        family ignores. Raises UserError.
        """
        self.model = model
        self._locations, used, quantised = dict[str, Location](), set(model.content.unused), set[str]()
        for key, location in model.mapping.locations(model.config):  # stops at the first that is missing
            if key in model.content.filled:
                continue
            name = location.names[0]
            blocks, scales = f"{name}_blocks", f"{name}_scales"
            if location.experts is not None and name not in model.stored and blocks in model.stored:
                rows = location.experts._replace(transposed=False, is_mxfp4=True)
                location = replace(location, names=(blocks, scales), experts=rows)
                quantised |= {blocks, scales}
            for name in location.names:
                if name not in model.stored:
                    raise UserError(
                        f"{model.folder}: holds no tensor {name}, which {CONFIG} requires. {SAVE_AGAIN}"
                    )
            self._locations[key] = location
            used.update(location.names)
        copies = {copy for copy, name in model.mapping.copies(model.config).items() if name in used}
        for name, (file, stored) in model.stored.items():
            if name not in used | copies and not model.mapping.ignored.fullmatch(name):
                class_name = model.architecture
                raise UserError(
                    f"{model.folder / file}: {show(name)} is not a parameter of {class_name}. Save the model "
                    f"as {class_name}, without other heads or more layers than {CONFIG} says"
                )
            supported = (torch.uint8,) if name in quantised else FLOATS
            if name in used and stored.dtype not in supported:
                kinds = ", ".join(DTYPE_NAMES[dtype] for dtype in supported)
                raise UserError(
                    f"{model.folder / file}: {name} is {DTYPE_NAMES[stored.dtype]}; supported: {kinds}. Save "
                    f"the model in one of them"
                )

    @cached_property
    def _parameters(self) -> dict[str, TensorEntry]:
        # Built after the names are checked: config.json may claim any number of layers.
        return parameters(self.model.config)

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.model.files.values())

    def has_parameter(self, name: str) -> bool:
        return name in self._locations

    def digests(self, progress: Callable[[int], None]) -> dict[str, str]:
        """Return the content digest of each file, the tokenizer's too; `progress` receives tensor bytes."""
        digests, folder = {}, self.model.folder
        added_tokens, vocabulary = TOKENIZER[-1], TOKENIZER[-2]
        with reading_from(folder, SAVE_AGAIN):
            for name in SMALL_FILES:
                is_read = name != added_tokens or find_file(folder, vocabulary)
                if is_read and (path := find_file(folder, name)):
                    digests[name] = digest_file(path)
            for name, path in self.model.files.items():
                digests[name] = digest_file(path, progress)
        return dict(sorted(digests.items()))

    def check(self) -> None:
        """Raise UserError unless shapes match config.json and copies are equal."""
        for name, parameter in self._parameters.items():
            if name in self.model.content.filled:
                continue
            location, shape = self._locations[name], parameter.shape
            if location.is_mxfp4 and shape[-1] % MXFP4_BLOCK:
                raise UserError(
                    f"{self.model.folder}: {location.names[0]}: {CONFIG} makes rows of {shape[-1]} "
                    f"numbers, and MXFP4 has blocks of {MXFP4_BLOCK}. {SAVE_AGAIN}"
                )
            for tensor, expected in zip(location.names, location.shapes(shape), strict=True):
                file, stored = self.model.stored[tensor]
                if stored.shape != expected:
                    raise UserError(
                        f"{self.model.folder / file}: {tensor} is {list(stored.shape)}, {CONFIG} makes it "
                        f"{list(expected)}. Fix {CONFIG}, or save the model again"
                    )
        # mlm's output layer is the token table: stored copies must equal it.
        model, has_output = self.model, self.model.config.head == "language_model"
        for copy, name in model.mapping.copies(model.config).items():
            if copy not in model.stored:
                if not has_output or model.is_tied or not copy.endswith("weight"):
                    continue
                raise UserError(
                    f"{model.folder / CONFIG}: tie_word_embeddings=false, and no {copy} is there. "
                    f"Supported: an output layer that is the token table"
                )
            original, second = model.stored[name][1], model.stored[copy][1]
            is_alike = original.shape == second.shape and second.dtype in FLOATS
            if is_alike and are_equal(partial(self._load, name), partial(self._load, copy), original.shape):
                continue
            untied, _ = model.mapping.read({**model.raw, "tie_word_embeddings": False}, CONFIG)
            fix = (
                f"an untied output layer of {untied.kind} is not supported. Remove {copy} if {name} is meant"
            )
            if not model.mapping.copies(untied):
                fix = (
                    f"tie_word_embeddings=true in {CONFIG}: transformers 5 computes with the former, 4 with "
                    f"the latter. Set tie_word_embeddings=false to keep {copy}, or remove that tensor"
                )
            raise UserError(f"{model.folder}: {copy} differs from {name}, and {fix}")

    def read(self, name: str, region: Region) -> Tensor:
        """Return elements of a parameter, float32. Raises CorruptFileError unless they are finite."""
        location = self._locations[name]
        value = location.read(self._parameters[name].shape, region, self._load)
        if location.is_mxfp4 and not value.isfinite().all():  # an exponent that is NaN's
            file = self.model.folder / self.model.stored[location.names[-1]][0]
            raise CorruptFileError(f"{file}: {location.names[-1]} is not finite. {SAVE_AGAIN}")
        return value

    def _load(self, name: str, region: Region) -> Tensor:
        """Return elements of a stored tensor, float32; bytes stay uint8."""
        file, stored = self.model.stored[name]
        full = Region.full(stored.shape)
        dtype = stored.dtype if stored.dtype == torch.uint8 else torch.float32
        target = torch.empty(region.size, dtype=dtype)
        if region.volume:
            with reading_from(self.model.folder / file, SAVE_AGAIN), open(self.model.files[file], "rb") as f:
                copy_region(f, stored, region, full, target)
            if not torch.stack(target.aminmax()).isfinite().all():  # without a copy of the tensor's size
                raise CorruptFileError(f"{self.model.folder / file}: {name} is not finite. {SAVE_AGAIN}")
        return target
