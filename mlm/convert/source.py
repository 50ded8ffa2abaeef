"""The model that a name refers to: a run or checkpoint, adapters on a base, `transformers` or the Hub.

`open_source` resolves the name once and reads settings; the `Source` reads tensors and tokenizer on demand.
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
from mlm.parallel.nf4 import round_to_nf4
from mlm.runs.config import PretrainConfig
from mlm.runs.folder import run_config
from mlm.runs.saved import check_stored_parameters, trained_config
from mlm.runs.tokenizer import digests_of_tokenizer, other_tokenizer, vocabulary_problem
from mlm.util.errors import Absent, ConfigError, CorruptFileError, Problem, UserError, reading_from
from mlm.util.files import digest_bytes
from mlm.util.terminal import progress_bar


class NoTokenizerError(UserError):
    """A checkpoint or model without a saved tokenizer, where none was specified."""


def open_source(name: str, tokenizer: Tokenizer | None = None) -> "Source":
    """Open the model that a name refers to, and read its settings; an id of the Hub is downloaded.

    `tokenizer` replaces the saved one in conversions. Raises UserError (ConfigError for several problems),
    CorruptFileError.
    """
    folder, repository = Path(name), hub_id(name)
    if folder.exists():
        # A folder with checkpoints of mlm is not a model folder, whatever else is in it.
        is_model = any((folder / file).is_file() for file in (CONFIG, ADAPTER)) and not is_native(name)
        return ModelFolder(folder, tokenizer, repository) if is_model else open_checkpoint(name, tokenizer)
    if repository is not None:
        return ModelFolder(fetch(repository, None, "ckpt"), tokenizer, repository)
    return open_checkpoint(name, tokenizer)


def open_checkpoint(name: str, tokenizer: Tokenizer | None = None) -> "Checkpoint":
    """Open the checkpoint or run directory of that name. Raises UserError, CorruptFileError."""
    return Checkpoint(resolve(name), tokenizer)


def is_native(path: str) -> bool:
    try:
        locate(path)
    except UserError:
        return False
    return True


class Source(ABC):
    """A model by its name: settings, and tensors and tokenizer on demand.

    Attributes:
        format: "native", "hf", or a format that only conversions read (conversion.py).
        path: step-… directory, or folder.
        config: Settings of the run; without one, defaults except for the model and its length.
        notes: Remarks on missing and unused tensors, one line each.
        filled: Parameters that it lacks, which take initial values.
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
        self.path, self.config, self.notes, self._replacement_tokenizer = path, config, notes, tokenizer

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @cached_property
    def origin(self) -> dict[str, JSON]:
        """Facts that a converted checkpoint records: ids and labels to keep, iteration, layout."""
        return {}

    @cached_property
    def manifest(self) -> Manifest:
        """The checkpoint's manifest; for other formats, one whose state records the origin."""
        return Manifest(0, "", {}, {}, {"source": {"name": self.path.name, **self.origin}})

    @cached_property
    def parameters(self) -> Mapping[str, TensorEntry]:
        return parameters(self.model)

    @abstractmethod
    def read(self, name: str, region: Region) -> Tensor:
        """Return elements of a parameter, float32 on the CPU, with adapters merged."""

    def read_full(self, name: str) -> Tensor:
        return self.read(name, Region.full(self.parameters[name].shape))

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """Compare every file with its checksums; return the digest of each."""

    @property
    def digest(self) -> str:
        """Digest of the weights; foreign files are read for it. Raises UserError, OSError."""
        return digest_of_files(self.digests())

    def check(self) -> None:
        """Read everything that a conversion reads except tensors. Raises UserError, CorruptFileError."""
        _ = self.tokenizer

    @property
    def conversion_notes(self) -> list[str]:
        """Lines on what a conversion changes or leaves out."""
        return list(self.notes)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer and its chat template that a conversion keeps."""
        return self._replacement_tokenizer

    @property
    def folder(self) -> Path:
        """Run directory or model folder, with tokenizer and chat template."""
        return self.path

    @property
    def name(self) -> str:
        """Name that opens it again: an id of the Hub, or a path."""
        return os.path.abspath(self.path)

    def result_file(self, name: str) -> Path:
        """Return the default path of a command's result: in the run directory.

        Model folders are not written to; their results go to the working directory, prefixed by the name.
        """
        return self.folder / name

    def saved_tokenizer(self, key: str = "tokenizer") -> Tokenizer:
        """Return the saved tokenizer; `key` is for messages.

        Raises NoTokenizerError, and CorruptFileError if the model was trained with another.
        """
        raise NoTokenizerError(f"{key}=null: {self.path} holds no tokenizer: give {key}=…/tokenizer.json")

    @property
    def tokenizer_digest(self) -> TokenizerDigest | None:
        """Identity of the tokenizer that the model was trained with; None if not recorded."""
        return None

    def load_tokenizer(
        self, path: str | None = None, key: str = "tokenizer", *, any_size: bool = False, force: bool = False
    ) -> Tokenizer:
        """Return the tokenizer at `path`, the value of `key`, else the saved one; see `saved_tokenizer`.

        Unless `any_size`, it must have no more tokens than the model. A tokenizer at `path` must be the one
        that the model was trained with, unless `force`.
        """
        tokenizer = self.saved_tokenizer(key) if path is None else self._load_tokenizer_file(path)
        if not any_size and (problem := vocabulary_problem(path, tokenizer, self.model, key)):
            raise UserError(problem)
        trained = None if path is None or force else self.tokenizer_digest
        digest = digests_of_tokenizer(tokenizer)
        if problem := other_tokenizer(f"{key}={path}", digest, str(self.path), trained, f"remove {key}="):
            raise UserError(problem)
        return tokenizer

    def _load_tokenizer_file(self, path: str) -> Tokenizer:
        return Tokenizer.load(path)

    def load_chat_template(
        self, file: str | None, path: str | None, tokenizer: Tokenizer, *, key: str
    ) -> ChatTemplate:
        """Return the template in `file`, else of the tokenizer at `path`, else of the model.

        Raises UserError without any, CorruptFileError.
        """
        if file in (None, TURNS) and (problem := self.template_problem(path, key=key)):
            raise ConfigError([problem])
        templates = (find_chat_template(folder, tokenizer, file) for folder in self._template_folders(path))
        return next(template for template in templates if template is not None)

    def template_problem(self, path: str | None, *, key: str) -> Problem | None:
        """Return the problem of a missing chat template, or None. Raises UserError, CorruptFileError."""
        folders = self._template_folders(path)
        if any("default" in find_templates(folder) for folder in folders):
            return None
        problem = f"{folders[0]} holds no chat template (chat_template.jinja, or in tokenizer_config.json)"
        return Absent.at(key, None, problem, f"set {key}={' or '.join(BUILT_IN)}, or to a FILE.jinja")

    def _template_folders(self, path: str | None) -> list[Path]:
        if path is None:
            return [self.folder]
        return [Path(path) if Path(path).is_dir() else Path(path).parent, self.folder]


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
    def _conversion_facts(self) -> tuple[Tokenizer | None, dict[str, JSON], list[str]]:
        """Tokenizer, origin and notes for conversions."""
        tokenizer, notes = self._replacement_tokenizer, list[str]()
        if tokenizer is None:
            tokenizer, notes = read_tokenizer(self.hf)
        ids, padding = ids_to_keep(self.hf, tokenizer)
        card = card_facts(self.path)
        return tokenizer, ids | ({"card": card} if card else {}), [*notes, *padding]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return self._conversion_facts[0]

    @cached_property
    def origin(self) -> dict[str, JSON]:
        return self._conversion_facts[1]

    @property
    def conversion_notes(self) -> list[str]:
        return [*map(str, self.notes), *self._conversion_facts[2]]

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
        # Correct digests exclude a cycle of bases. A model folder is digested when its weights are read.
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
        imported = source if isinstance(source, dict) else {}
        return {key: imported[key] for key in (*TOKEN_IDS, "labels", "card") if key in imported}

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        if self._replacement_tokenizer is not None or not os.path.lexists(self.folder / TOKENIZER_FILE):
            return self._replacement_tokenizer
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
            value = round_to_nf4(self.base.read_full(name), DTYPES[self.config.precision.dtype])[slices]
        else:
            value = self.base.read(name, region)
        if change is None:
            return value
        return change.apply_to(value, region.within(Region.full(region.size)), Axis("tp"))

    @cached_property
    def quantized(self) -> frozenset[str]:
        """Weights of the base that were quantised to 4 bits while the adapters were trained."""
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
            if isinstance(self.base, Checkpoint):  # a model folder was digested for the changes
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
        trained_digest = self.tokenizer_digest or TokenizerDigest("")
        return Tokenizer.load(saved, eod=trained_digest.eod_id, bos=trained_digest.bos_id)

    @property
    def tokenizer_digest(self) -> TokenizerDigest | None:
        return TokenizerDigest.of(self.manifest.state)

    def _load_tokenizer_file(self, path: str) -> Tokenizer:
        """Return a tokenizer; if it has the checkpoint's vocabulary, with the checkpoint's special tokens."""
        trained_digest = self.tokenizer_digest
        if trained_digest is None or trained_digest.eod_id is None:
            return Tokenizer.load(path)
        tokenizer = Tokenizer.load(path, eod=trained_digest.eod_id, bos=trained_digest.bos_id)
        return tokenizer if trained_digest.is_same(digests_of_tokenizer(tokenizer)) else Tokenizer.load(path)
