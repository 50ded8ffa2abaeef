"""Sources of `mlm convert`: any format as parameters of ours, one at a time."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path

from torch import Tensor

from mlm.checkpoint.native.folders import locate
from mlm.checkpoint.native.format import JSON, RESTORE, Manifest, TensorEntry, read_manifest
from mlm.checkpoint.native.reader import Reader
from mlm.checkpoint.native.save_load import resolve
from mlm.checkpoint.native.slices import Read, Region
from mlm.checkpoint.native.verify import check_whole
from mlm.checkpoint.parameters import parameters
from mlm.convert.dcp.metadata import COPY_AGAIN, MAX_METADATA_BYTES, METADATA, MOMENTS
from mlm.convert.dcp.storage import DCPReader
from mlm.convert.dcp.torchtitan import TOKEN_TABLE, TorchtitanReader
from mlm.convert.huggingface.families import layer_names
from mlm.convert.huggingface.folder import (
    CONFIG,
    SAVE_AGAIN,
    TOKENIZER,
    HFModel,
    find_file,
    read_json,
    read_model,
    read_settings,
)
from mlm.convert.huggingface.mapping import TokenIds
from mlm.convert.huggingface.mapping import show as show_value
from mlm.convert.huggingface.model_card import card_facts
from mlm.convert.huggingface.tensors import HFTensors
from mlm.convert.megatron.args import Given
from mlm.convert.megatron.distributed import CoreTensors, is_distributed, open_distributed, open_moments
from mlm.convert.megatron.files import check_records, find_files, find_step
from mlm.convert.megatron.merge import RankTensors, open_checkpoint
from mlm.convert.megatron.model import MegatronModel
from mlm.data.chat_files import find_chat_template
from mlm.data.tokenizer import Tokenizer
from mlm.inference.base import Base, base_digest
from mlm.inference.trained import load_tokenizer, resolve_checkpoint, run_directory, trained_config
from mlm.models.config import LoraConfig, ModelConfig
from mlm.models.lora import adapter_shards, merged_changes
from mlm.parallel.low_rank import WeightChange
from mlm.parallel.mesh import Axis
from mlm.training.state import is_weights_only
from mlm.util.errors import CorruptFileError, UserError, reading_from
from mlm.util.files import digest_file, read_bounded
from mlm.util.terminal import progress_bar

SETTINGS = "tokenizer_config.json"


@dataclass(frozen=True)
class Source:
    """A checkpoint of any format, opened."""

    format: str
    path: Path
    model: ModelConfig
    read: Read
    """Elements of a parameter of ours, by its name in `parameters(model)`, float32 on the CPU."""
    digests: Callable[[], dict[str, str]]
    """Compare every file with the checksums that it has; return the digest of each."""
    filled: frozenset[str] = frozenset()
    """Parameters that it lacks."""
    tokenizer: Tokenizer | None = None
    moments: Mapping[str, Read] = field(default_factory=dict)
    """Adam's, by name, if they are whole; `origin` has the iteration then."""
    origin: dict[str, JSON] = field(default_factory=dict)
    """What a checkpoint made of it records: ids and labels to keep; iteration and layout."""
    notes: tuple[str, ...] = ()
    checkpoint: Manifest | None = None
    """Of a checkpoint of ours."""
    base: Base | None = None
    """What the adapters of a checkpoint of ours change: `read` returns both together."""

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's; else one made up, whose state names the origin."""
        made_up: dict[str, JSON] = {"source": {"name": self.path.name, **self.origin}}
        return self.checkpoint or Manifest(0, "", {}, {}, made_up)

    @cached_property
    def parameters(self) -> Mapping[str, TensorEntry]:
        """Every parameter of ours."""
        return parameters(self.model)

    def whole(self, name: str) -> Tensor:
        """Return a parameter of ours."""
        return self.read(name, Region.whole(self.parameters[name].shape))


@dataclass(frozen=True)
class SourceSettings:
    """Settings that a source may not record."""

    config: str | None = None
    """Folder with the config.json of its model, or a run."""
    vocab_size: int | None = None
    num_heads: int | None = None
    tokenizer: Tokenizer | None = None


def open_source(path: str, settings: SourceSettings) -> Source:
    """Find the format of a checkpoint and open it. Raises UserError and CorruptFileError."""
    folder, tokenizer = Path(path), settings.tokenizer
    if _is_native(path):
        return native_source(path, tokenizer)
    if not folder.is_dir():
        raise UserError(f"source={path}: no such folder; name a run, a model folder or a checkpoint folder")
    if (folder / CONFIG).is_file() and not (folder / METADATA).exists():
        return huggingface_source(read_model(folder), tokenizer)
    step, config = find_step(path), _config(folder, settings.config)
    is_core = is_distributed(step)
    if is_core and TOKEN_TABLE.encode() in read_bounded(step / METADATA, MAX_METADATA_BYTES, COPY_AGAIN):
        return _torchtitan(step, config, tokenizer)
    known = tokenizer.vocab_size if tokenizer else None
    given = Given(vocab_size=settings.vocab_size, known=known, num_heads=settings.num_heads, config=config)
    if is_core:
        return _megatron(open_distributed(step, given), tokenizer)
    return _megatron(open_checkpoint(find_files(path), replace(given, config=None)), tokenizer)


def _is_native(path: str) -> bool:
    try:
        locate(path)
    except UserError:
        return False
    return True


def _config(folder: Path, named: str | None) -> ModelConfig | None:
    """Return the model that `config=` names, or a config.json in the folder describes; None without."""
    if named is not None and _is_native(named):
        path = resolve(named)
        return trained_config(read_manifest(path), path).model
    if named is None and not (folder / CONFIG).is_file():
        return None
    return read_settings(Path(named or folder))[2]


def native_source(path: str, tokenizer: Tokenizer | None = None) -> Source:
    """Return a checkpoint of ours as a source: adapters on their base, and its tokenizer if none is given.

    Raises UserError and CorruptFileError.
    """
    step = resolve(path)
    manifest = read_manifest(step)
    trained, base = resolve_checkpoint(str(step)).config, Base.of(manifest, step)
    if tokenizer is None and os.path.lexists(run_directory(step) / "tokenizer.json"):
        tokenizer = load_tokenizer(None, step)
        tokenizer.chat_template = find_chat_template(run_directory(step), tokenizer)
    reader = Reader(step, manifest)

    def read(kind: str, name: str, region: Region) -> Tensor:
        if f"{kind}.{name}" not in manifest.tensors:
            raise CorruptFileError(f"{step}: holds no {kind}.{name}, its config has one. {RESTORE}")
        with reading_from(step, RESTORE):
            return reader.read(f"{kind}.{name}", region).float()

    def digests() -> dict[str, str]:
        size = sum(entry.bytes for entry in manifest.files.values())
        with progress_bar("verifying", size, in_bytes=True) as advance:
            check_whole(step, advance)
        return {name: entry.digest for name, entry in manifest.files.items()}

    origin, steps = manifest.state.get("source"), manifest.state.get("applied_steps")
    kept = origin if isinstance(origin, dict) else {}
    has_moments = is_weights_only(manifest) and type(steps) is int
    source = Source(
        "native",
        step,
        trained.model,
        partial(read, "model"),
        digests,
        tokenizer=tokenizer,
        moments={name: partial(read, f"optimizer.{name}") for name in MOMENTS} if has_moments else {},
        origin={key: kept[key] for key in ("pad_token_id", "labels", "card") if key in kept}
        | ({"iteration": steps} if has_moments else {}),
        checkpoint=manifest,
        base=base,
    )
    return source if base is None else _on_base(source, manifest, base, trained.lora)


def _on_base(adapters: Source, manifest: Manifest, base: Base, lora: LoraConfig) -> Source:
    """Return adapters as the model that they make of their base, whose files are digested once."""
    model, names = adapters.model, layer_names(adapters.model)
    below = open_source(str(base.path), SourceSettings())

    @cache
    def changes() -> dict[str, Callable[[], WeightChange]]:
        if base_digest(base.path) != base.digest:
            raise UserError(
                f"{base.name}: is no longer the base of the adapters in {adapters.path}; bring it back"
            )
        shapes = {shard.name: shard.global_shape for shard, _ in adapter_shards(model, lora, names)}
        stored = {name: adapters.read(name, Region.whole(shape)) for name, shape in shapes.items()}
        return merged_changes(model, lora, names, stored)

    @lru_cache(maxsize=1)  # a weight is read by parts
    def change_of(name: str) -> WeightChange | None:
        return changes()[name]() if name in changes() else None

    def read(name: str, region: Region) -> Tensor:
        if f"model.{name}" in manifest.tensors:
            return adapters.read(name, region)
        change, value = change_of(name), below.read(name, region)
        if change is None:
            return value
        return change.apply_to(value, region.within(Region.whole(region.size)), Axis("tp"))

    def digests() -> dict[str, str]:
        changes()
        if below.checkpoint is not None:  # of a model folder `changes` has read every file
            below.digests()
        return adapters.digests()

    return replace(adapters, read=read, digests=digests)


def huggingface_source(model: HFModel, tokenizer: Tokenizer | None = None) -> Source:
    """Return a folder of `transformers` as a source; its own tokenizer, unless one is given."""
    tensors = HFTensors(model)
    tensors.check()
    own, notes = (tokenizer, []) if tokenizer is not None else read_tokenizer(model)
    ids, padding = ids_to_keep(model, own)

    def digests() -> dict[str, str]:
        with progress_bar("reading", tensors.num_bytes, in_bytes=True) as advance:
            return tensors.digests(advance)

    return Source(
        "hf",
        model.folder,
        model.config,
        tensors.read,
        digests,
        tensors.filled,
        own,
        origin=ids_as_json(ids) | ({"card": card} if (card := card_facts(model.folder)) else {}),
        notes=(*map(str, model.notes), *notes, *padding),
    )


def read_tokenizer(model: HFModel) -> tuple[Tokenizer | None, list[str]]:
    """Return the model's tokenizer if it is supported, and notes. Raises CorruptFileError."""
    present = {name for name in TOKENIZER if find_file(model.folder, name)}
    if not any(present.issuperset(kind) for kind in (TOKENIZER[:1], TOKENIZER[1:3], TOKENIZER[3:4])):
        return None, ["no tokenizer is there: give tokenizer=… where text is read or written"]
    with reading_from(model.folder, SAVE_AGAIN):
        try:
            tokenizer = Tokenizer.load(model.folder)
        except CorruptFileError:
            raise
        except UserError as error:
            return None, [f"the tokenizer was not taken: {error}"]
    notes, size = unread_tokens(model.folder, tokenizer), model.config.vocab_size
    try:
        tokenizer.chat_template = find_chat_template(model.folder, tokenizer)
    except UserError as error:
        notes.append(f"the chat template was not taken: {error}")
    if tokenizer.vocab_size > size:
        notes.append(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model reads up to {size - 1}"
        )
    return tokenizer, notes


def unread_tokens(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Return a note if only tokenizer_config.json holds some tokens: `transformers` adds them at loading."""
    settings = read_json(folder, SETTINGS) if find_file(folder, SETTINGS) else {}
    listed = settings.get("added_tokens_decoder")
    tokens = list(listed.values()) if isinstance(listed, dict) else []
    names = [
        name for token in tokens if isinstance(token, dict) and isinstance(name := token.get("content"), str)
    ]
    unread = [name for name in names if name not in tokenizer]
    if not unread:
        return []
    return [
        f"{SETTINGS} alone holds the token {show_value(unread[0])}, one of {len(unread)} not kept: to keep "
        f"them, load the tokenizer by AutoTokenizer, save it by save_pretrained, and import it with the model"
    ]


def ids_to_keep(model: HFModel, tokenizer: Tokenizer | None) -> tuple[TokenIds, list[str]]:
    """Return padding and labels of config.json to write at an export, and a note on what is not kept."""
    ids = model.kept
    is_usable = tokenizer is None or ids.pad is None or ids.pad in tokenizer.added_ids
    if is_usable or not model.mapping.pads_with_special_token:
        return ids, []
    why = "is no special token of the tokenizer: an export names the end of document"
    return replace(ids, pad=None), [f"pad_token_id={ids.pad} is not kept: it {why}"]


def ids_as_json(ids: TokenIds) -> dict[str, JSON]:
    """Return padding and labels as part of the checkpoint's source."""
    pad: dict[str, JSON] = {} if ids.pad is None else {"pad_token_id": ids.pad}
    return {**pad, **({"labels": list(ids.labels)} if ids.labels else {})}


def _torchtitan(folder: Path, config: ModelConfig | None, tokenizer: Tokenizer | None) -> Source:
    if config is None:
        raise UserError(
            f"{folder}: torchtitan's names, and no config.json: set config=… of mlm convert to a folder with "
            "the config.json of the model (that of its transformers version) or a run of mlm"
        )
    tensors = TorchtitanReader(folder, config)
    moments, steps = tensors.open_moments()
    readers = dict.fromkeys([tensors.reader, *(each.reader for each in moments.values())])
    return Source(
        "torchtitan",
        folder,
        config,
        tensors.read,
        lambda: digest_dcp(*readers),
        tokenizer=tokenizer,
        moments={name: each.read for name, each in moments.items()},
        origin={"iteration": steps} if moments else {},
    )


def digest_dcp(*readers: DCPReader) -> dict[str, str]:
    """Return the digest of each file by its name; items are compared with their checksums."""
    size = sum((reader.folder / name).stat().st_size for reader in readers for name in reader.files)
    digests: dict[str, str] = {}
    with progress_bar("reading", size, in_bytes=True) as advance:
        for reader in readers:
            digests |= reader.verify(advance)
    return digests


def _megatron(opened: MegatronModel, tokenizer: Tokenizer | None) -> Source:
    held, moments = opened.held, open_moments(opened)
    origin: dict[str, JSON] = {"iteration": opened.iteration}
    if isinstance(held, RankTensors):
        layout = {"tp": held.tp, "pp": held.pp, "vp": held.vp}
        origin |= {"checkpoint_version": held.version, "layout": layout}
    notes = list(opened.notes)
    if padding := opened.table_rows - opened.model.vocab_size:
        rows = f"the last {padding:,} of {opened.table_rows:,} rows of the token table"
        notes.append(f"{rows} are padding: left out")
    if tokenizer is None:
        notes.append("no tokenizer was named: give tokenizer=… where text is read or written")
    return Source(
        "torch" if isinstance(held, RankTensors) else "torch_dist",
        held.path,
        opened.model,
        opened.read,
        lambda: {name: digest for each in (opened, *moments.values()) for name, digest in _digests(each)},
        opened.filled,
        tokenizer,
        {name: each.read for name, each in moments.items()},
        origin,
        tuple(notes),
    )


def _digests(opened: MegatronModel) -> Iterable[tuple[str, str]]:
    """Return each file and its digest; its records are compared with their checksums.

    Raises CorruptFileError where one differs, UserError where a file cannot be read.
    """
    held = opened.held
    if isinstance(held, CoreTensors):
        return digest_dcp(held.reader).items()
    assert isinstance(held, RankTensors)
    paths, digests = list(held.files.files.values()), {}
    with progress_bar("reading", sum(path.stat().st_size for path in paths), in_bytes=True) as advance:
        for path in paths:
            with reading_from(path, COPY_AGAIN):
                check_records(path)
                digests[path.relative_to(held.path).as_posix()] = digest_file(path, advance)
    return digests.items()
