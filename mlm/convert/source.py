"""The model that a name holds: of a run or checkpoint, adapters on a base, `transformers` or the Hub.

`open_source` finds it once and reads its settings; the `Source` is passed on, and reads tensors and tokenizer
when it is asked for them.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path

from torch import Tensor

from mlm.checkpoint.native.folders import locate
from mlm.checkpoint.native.format import (
    JSON,
    MANIFEST,
    RESTORE,
    Manifest,
    TensorEntry,
    canonical,
    read_manifest,
)
from mlm.checkpoint.native.reader import Reader
from mlm.checkpoint.native.run_state import LORA, TOKENIZER_FILE, TokenizerDigest, check_run_tokenizer
from mlm.checkpoint.native.save_load import resolve
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.verify import check_whole
from mlm.checkpoint.parameters import parameters
from mlm.convert.huggingface.families import layer_names
from mlm.convert.huggingface.folder import (
    ADAPTER,
    CONFIG,
    fetch,
    ids_to_keep,
    model_name,
    read_model,
    read_tokenizer,
)
from mlm.convert.huggingface.mapping import TOKEN_IDS, Note
from mlm.convert.huggingface.model_card import card_facts
from mlm.convert.huggingface.tensors import HFTensors
from mlm.data.chat_builtin import BUILT_IN, TURNS
from mlm.data.chat_files import find_chat_template, find_templates
from mlm.data.chat_template import ChatTemplate
from mlm.data.files_present import hub_id
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import ModelConfig
from mlm.models.lora import adapted_on_meta, adapter_shards, merged_changes, quantized_layers
from mlm.optim.precision import DTYPES
from mlm.parallel.low_rank import WeightChange
from mlm.parallel.mesh import Axis
from mlm.parallel.nf4 import rounded
from mlm.runs.config import PretrainConfig
from mlm.runs.folder import run_config
from mlm.runs.saved import check_stored_parameters, trained_config
from mlm.runs.tokenizer import digests_of_tokenizer, other_tokenizer, vocabulary_problem
from mlm.util.errors import Absent, ConfigError, CorruptFileError, Problem, UserError, reading_from
from mlm.util.files import digest_bytes
from mlm.util.terminal import progress_bar


class NoTokenizerError(UserError):
    """No tokenizer is saved with a checkpoint or a model, and none was named."""


def open_source(name: str, tokenizer: Tokenizer | None = None) -> "Source":
    """Find what a name holds and read its settings; an id of the Hub is fetched.

    `tokenizer` replaces the saved one in conversions. Raises UserError (ConfigError for several problems),
    CorruptFileError.
    """
    folder, repository = Path(name), hub_id(name)
    if folder.exists():
        # A folder that holds checkpoints of mlm is no model folder, whatever else is in it.
        is_model = any((folder / file).is_file() for file in (CONFIG, ADAPTER)) and not is_ours(name)
        return ModelFolder(folder, tokenizer, repository) if is_model else open_checkpoint(name, tokenizer)
    if repository is not None:
        return ModelFolder(fetch(repository, None, "ckpt"), tokenizer, repository)
    return open_checkpoint(name, tokenizer)


def open_checkpoint(name: str, tokenizer: Tokenizer | None = None) -> "Checkpoint":
    """Open the checkpoint or run directory of that name. Raises UserError, CorruptFileError."""
    return Checkpoint(resolve(name), tokenizer)


def is_ours(path: str) -> bool:
    try:
        locate(path)
    except UserError:
        return False
    return True


class Source(ABC):
    """A model by its name: settings now, tensors and tokenizer when they are asked for.

    Attributes:
        format: "native", "hf", or a format that only conversions read (conversion.py).
        path: Its step-… directory, or its folder.
        config: Settings of its run; where it has none, defaults except for the model and its length.
        notes: What is missing and takes initial values, what is left out; one line each.
        filled: Parameters that it lacks: they take initial values.
    """

    format: str
    filled: frozenset[str] = frozenset()

    def __init__(
        self,
        path: Path,
        config: PretrainConfig,
        notes: tuple[Note, ...] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.path, self.config, self.notes, self._given_tokenizer = path, config, notes, tokenizer

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @cached_property
    def origin(self) -> dict[str, JSON]:
        """Facts that a converted checkpoint records: ids and labels to keep, iteration, layout."""
        return {}

    @cached_property
    def manifest(self) -> Manifest:
        """The checkpoint's manifest; of another format one whose state names the origin."""
        return Manifest(0, "", {}, {}, {"source": {"name": self.path.name, **self.origin}})

    @cached_property
    def parameters(self) -> Mapping[str, TensorEntry]:
        return parameters(self.model)

    @abstractmethod
    def read(self, name: str, region: Region) -> Tensor:
        """Return elements of a parameter, float32 on the CPU, with what adapters add to them."""

    def read_full(self, name: str) -> Tensor:
        return self.read(name, Region.full(self.parameters[name].shape))

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """Compare every file with the checksums that it has; return the digest of each."""

    @property
    def digest(self) -> str:
        """Digest of the weights, for which foreign files are read. Raises UserError, OSError."""
        return digest_of_files(self.digests())

    def check(self) -> None:
        """Read all that a conversion reads except tensors. Raises UserError, CorruptFileError."""
        _ = self.tokenizer

    @property
    def conversion_notes(self) -> list[str]:
        """Lines on what a conversion changes or leaves out."""
        return list(self.notes)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer with its chat template, as far as a conversion can keep it."""
        return self._given_tokenizer

    @property
    def folder(self) -> Path:
        """Run directory, or model folder, which holds tokenizer and chat template."""
        return self.path

    @property
    def name(self) -> str:
        """Name that opens it again: an id of the Hub, or a path."""
        return os.path.abspath(self.path)

    def result_file(self, name: str) -> Path:
        """Return the default path of a command's result: in the run directory.

        Model folders are not written to: their results are in the working directory, prefixed by their name.
        """
        return self.folder / name

    def saved_tokenizer(self, key: str = "tokenizer") -> Tokenizer:
        """Return the tokenizer saved with it; `key` is for messages.

        Raises NoTokenizerError, and CorruptFileError for another than it was trained with.
        """
        raise NoTokenizerError(f"{key}=null: {self.path} holds no tokenizer: give {key}=…/tokenizer.json")

    @property
    def tokenizer_digest(self) -> TokenizerDigest | None:
        """The tokenizer that it was trained with; None if not recorded."""
        return None

    def load_tokenizer(
        self, named: str | None = None, key: str = "tokenizer", *, any_size: bool = False, force: bool = False
    ) -> Tokenizer:
        """Return the tokenizer that `key` names, else the saved one. Raises as `saved_tokenizer`.

        Unless `any_size`, it must have no more tokens than the model. One that is named must be the one that
        the model was trained with, unless `force` is given.
        """
        tokenizer = self.saved_tokenizer(key) if named is None else self._load_named(named)
        if not any_size and (problem := vocabulary_problem(named, tokenizer, self.model, key)):
            raise UserError(problem)
        known = None if named is None or force else self.tokenizer_digest
        now = digests_of_tokenizer(tokenizer)
        if problem := other_tokenizer(f"{key}={named}", now, str(self.path), known, f"remove {key}="):
            raise UserError(problem)
        return tokenizer

    def _load_named(self, named: str) -> Tokenizer:
        return Tokenizer.load(named)

    def load_chat_template(
        self, file: str | None, named: str | None, tokenizer: Tokenizer, *, key: str
    ) -> ChatTemplate:
        """Return the template in `file`, else of the named tokenizer, else of the model.

        Raises UserError without any, CorruptFileError.
        """
        if file in (None, TURNS) and (problem := self.template_problem(named, key=key)):
            raise ConfigError([problem])
        templates = (find_chat_template(folder, tokenizer, file) for folder in self._template_folders(named))
        return next(template for template in templates if template is not None)

    def template_problem(self, named: str | None, *, key: str) -> Problem | None:
        """Return the problem of a model without a chat template. Raises UserError, CorruptFileError."""
        folders = self._template_folders(named)
        if any("default" in find_templates(folder) for folder in folders):
            return None
        why = f"{folders[0]} holds no chat template (chat_template.jinja, or in tokenizer_config.json)"
        return Absent.at(key, None, why, f"set {key}={' or '.join(BUILT_IN)}, or to a FILE.jinja")

    def _template_folders(self, named: str | None) -> list[Path]:
        if named is None:
            return [self.folder]
        return [Path(named) if Path(named).is_dir() else Path(named).parent, self.folder]


class ModelFolder(Source):
    """A model folder of `transformers`; `hf` describes its content."""

    format = "hf"

    def __init__(
        self, folder: Path, tokenizer: Tokenizer | None = None, repository: str | None = None
    ) -> None:
        self.hf, self.repository = read_model(folder), repository
        super().__init__(folder, run_config(model_name(folder), self.hf.config), self.hf.notes, tokenizer)
        self.filled = self.hf.content.filled

    @cached_property
    def tensors(self) -> HFTensors:
        """Its tensors, with names, dtypes and shapes checked. Raises UserError."""
        tensors = HFTensors(self.hf)
        tensors.check()
        return tensors

    @cached_property
    def _kept(self) -> tuple[Tokenizer | None, dict[str, JSON], list[str]]:
        """Tokenizer, origin and notes of a conversion."""
        tokenizer, notes = self._given_tokenizer, list[str]()
        if tokenizer is None:
            tokenizer, notes = read_tokenizer(self.hf)
        kept, padding = ids_to_keep(self.hf, tokenizer)
        card = card_facts(self.path)
        return tokenizer, kept | ({"card": card} if card else {}), [*notes, *padding]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return self._kept[0]

    @cached_property
    def origin(self) -> dict[str, JSON]:
        return self._kept[1]

    @property
    def conversion_notes(self) -> list[str]:
        return [*map(str, self.notes), *self._kept[2]]

    def check(self) -> None:
        _ = self.tensors, self.tokenizer

    def read(self, name: str, region: Region) -> Tensor:
        return self.tensors.read(name, region)

    def digests(self) -> dict[str, str]:
        with progress_bar("reading", self.tensors.num_bytes, in_bytes=True) as advance:
            return self.tensors.digests(advance)

    @property
    def digest(self) -> str:
        return digest_of_files(self.tensors.digests(lambda _: None))

    @property
    def name(self) -> str:
        return self.repository or super().name

    def result_file(self, name: str) -> Path:
        return Path(f"{model_name(self.path)}-{name}")

    def saved_tokenizer(self, key: str = "tokenizer") -> Tokenizer:
        try:
            return Tokenizer.load(self.path)
        except CorruptFileError:
            raise
        except (UserError, OSError) as error:
            raise NoTokenizerError(f"{key}=null: {error}: give {key}=…/tokenizer.json") from error

    @property
    def tokenizer_digest(self) -> TokenizerDigest | None:
        try:
            return digests_of_tokenizer(Tokenizer.load(self.path))
        except (UserError, OSError):
            return None


def digest_of_files(digests: Mapping[str, str]) -> str:
    """Return the digest of a model folder by the digests of its files."""
    return digest_bytes(canonical(dict(digests)))


class Checkpoint(Source):
    """A checkpoint of mlm; `read` adds adapters to the weights of their `base`."""

    format = "native"

    def __init__(self, path: Path, tokenizer: Tokenizer | None = None) -> None:
        self.manifest = read_manifest(path)
        super().__init__(path, trained_config(self.manifest, path), (), tokenizer)
        self._reader = Reader(path, self.manifest)
        self._change_of = lru_cache(maxsize=1)(self._compute_change)  # a weight is read in parts
        self.base: Source | None = None
        entry = self.manifest.state.get(LORA)
        if entry is None:
            check_stored_parameters(self.manifest, self.model, path)
            return
        name, digest = (entry.get(key) if isinstance(entry, dict) else None for key in ("base", "digest"))
        if not isinstance(name, str) or not isinstance(digest, str):
            raise CorruptFileError(f"{path}: does not name the base of its adapters")
        self.base_name, self.base_digest, base = name, digest, Path(name)
        # A chain of true digests has no cycle. A model folder's are compared when its weights are read.
        if (base / MANIFEST).exists():
            self._check_base(read_manifest(base).digest)
        elif not (base / CONFIG).is_file() and not hub_id(name):
            raise UserError(f"{name}: the base of these adapters is not there; bring it back")
        self.base = open_source(name)

    def _check_base(self, digest: str) -> None:
        if digest != self.base_digest:
            raise UserError(
                f"{self.base_name}: is no longer the base of the adapters in {self.path}; bring that base "
                "back"
            )

    @cached_property
    def origin(self) -> dict[str, JSON]:
        source = self.manifest.state.get("source")
        kept = source if isinstance(source, dict) else {}
        return {key: kept[key] for key in (*TOKEN_IDS, "labels", "card") if key in kept}

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        if self._given_tokenizer is not None or not os.path.lexists(self.folder / TOKENIZER_FILE):
            return self._given_tokenizer
        tokenizer = self.load_tokenizer(any_size=True)
        tokenizer.chat_template = find_chat_template(self.folder, tokenizer)
        return tokenizer

    def check(self) -> None:
        super().check()
        if self.base is not None:
            self.base.check()

    def read(self, name: str, region: Region) -> Tensor:
        if self.base is None or f"model.{name}" in self.manifest.tensors:
            return self._read_stored(name, region)
        change = self._change_of(name)
        if name in self.quantized:
            slices = tuple(slice(o, o + n) for o, n in zip(region.offset, region.size, strict=True))
            value = rounded(self.base.read_full(name), DTYPES[self.config.precision.dtype])[slices]
        else:
            value = self.base.read(name, region)
        if change is None:
            return value
        return change.apply_to(value, region.within(Region.full(region.size)), Axis("tp"))

    @cached_property
    def quantized(self) -> frozenset[str]:
        """Weights of the base on which the adapters were trained in 4 bits."""
        chunk = adapted_on_meta(self.model, self.config.lora, layer_names(self.model))
        return frozenset(f"{name}.weight" for name in quantized_layers(chunk, self.config.lora))

    def _read_stored(self, name: str, region: Region) -> Tensor:
        if f"model.{name}" not in self.manifest.tensors:
            raise CorruptFileError(f"{self.path}: holds no model.{name}, its config has one. {RESTORE}")
        with reading_from(self.path, RESTORE):
            return self._reader.read(f"model.{name}", region).float()

    def _compute_change(self, name: str) -> WeightChange | None:
        change = self._changes.get(name)
        return None if change is None else change()

    @cached_property
    def _changes(self) -> dict[str, Callable[[], WeightChange]]:
        """Functions that compute the change of a weight, by name. Digests the files of the base once."""
        assert self.base is not None
        self._check_base(self.base.digest)
        model, lora, names = self.model, self.config.lora, layer_names(self.model)
        shards = [shard for shard, _ in adapter_shards(model, lora, names)]
        stored = {s.name: self._read_stored(s.name, Region.full(s.global_shape)) for s in shards}
        return merged_changes(model, lora, names, stored)

    def digests(self) -> dict[str, str]:
        if self.base is not None:
            _ = self._changes
            if isinstance(self.base, Checkpoint):  # of a model folder every file is read by now
                self.base.digests()
        size = sum(entry.bytes for entry in self.manifest.files.values())
        with progress_bar("verifying", size, in_bytes=True) as advance:
            check_whole(self.path, advance)
        return {name: entry.digest for name, entry in self.manifest.files.items()}

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def folder(self) -> Path:
        return self.path.parent.parent

    def saved_tokenizer(self, key: str = "tokenizer") -> Tokenizer:
        saved = self.folder / TOKENIZER_FILE
        if not os.path.lexists(saved):
            raise NoTokenizerError(f"{key}=null and {saved} is not there: give {key}=…/tokenizer.json")
        check_run_tokenizer(self.path, self.manifest.state)
        known = self.tokenizer_digest or TokenizerDigest("")
        return Tokenizer.load(saved, eod=known.eod_id, bos=known.bos_id)

    @property
    def tokenizer_digest(self) -> TokenizerDigest | None:
        return TokenizerDigest.of(self.manifest.state)

    def _load_named(self, named: str) -> Tokenizer:
        """Return a tokenizer, with the special tokens of the checkpoint if it has its vocabulary."""
        known = self.tokenizer_digest
        if known is None or known.eod_id is None:
            return Tokenizer.load(named)
        tokenizer = Tokenizer.load(named, eod=known.eod_id, bos=known.bos_id)
        return tokenizer if known.is_same(digests_of_tokenizer(tokenizer)) else Tokenizer.load(named)
