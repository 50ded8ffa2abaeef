"""A model folder of `transformers` or the Hub, read without that library: settings, files, tensor names.

Only JSON and safetensors are read. Nothing in the folder is executed, sizes are bounded before anything is
read, and no file outside it is opened, except through links in the Hub's cache (snapshots/… -> blobs/…).
"""

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.format import JSON
from mlm.checkpoint.native.shard_file import Stored, read_safetensors_header
from mlm.config.suggest import nearest
from mlm.convert.huggingface.families import mapping_of_kind
from mlm.convert.huggingface.mapping import (
    FolderContent,
    HuggingFaceMapping,
    Note,
    TokenIds,
    declared_ids,
    show,
    token_ids_to_keep,
)
from mlm.data.chat_files import find_chat_template
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import KINDS, ModelConfig
from mlm.util.errors import CorruptFileError, UserError, reading_from
from mlm.util.extras import go_offline_without_hub
from mlm.util.files import parse_json, read_bounded

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
TOKENIZER = (
    *("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt"),
    *(TOKENIZER_SETTINGS, "added_tokens.json", "special_tokens_map.json"),
)
"""Files of tokenizers; the last but one is only read without tokenizer.json."""
SMALL_FILES = (
    *(CONFIG, ADAPTER, INDEX, *TOKENIZER, "generation_config.json"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
)
"""All files that are read in addition to the tensors."""
EXPORTED_AGAIN = ("README.md", "additional_chat_templates/*.jinja")
"""Files that are only read to be exported again."""
TENSOR_FILES = ("model.safetensors", "model-*-of-*.safetensors")
"""Patterns of the tensors to fetch from the Hub: no pickle, no code."""
EXTRA = "pip install 'mlm[hf]'"
MAX_BYTES = {CONFIG: 1 << 20, ADAPTER: 1 << 20, INDEX: 1 << 26} | dict.fromkeys(TOKENIZER, 1 << 28)
SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}\.safetensors")  # no separator, not hidden
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
SAVE_AGAIN = "Download or save it again"
LANGUAGE_MODELS = {"model.language_model.": "model.", "language_model.": ""}
"""Prefix of the language model in a multi-modal model -> prefix of its tensors in a language model."""


def find_file(folder: Path, name: str) -> Path | None:
    """Return a regular file of the folder, or of the Hub's cache that a snapshot links to; None if absent.

    Raises UserError if it is not a regular file, or larger than MAX_BYTES.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        target, root = path.resolve(strict=True), folder.resolve()
        status = target.stat()
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{path}: cannot be opened: {error}. Make it readable, or {SAVE_AGAIN.lower()}"
        ) from error
    allowed_parents = [root]
    if root.parent.name == "snapshots":  # models--owner--name/snapshots/COMMIT: blobs of it, or of all models
        allowed_parents += [root.parents[1] / "blobs", root.parents[2] / "blobs"]
    if not any(target.is_relative_to(parent) for parent in allowed_parents):
        raise UserError(f"{path}: a link that leads out of the folder. Put the file itself there")
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: no plain file. {SAVE_AGAIN}")
    max_bytes = MAX_BYTES.get(name)
    if max_bytes is not None and status.st_size > max_bytes:
        raise UserError(f"{path}: {status.st_size} bytes, {max_bytes} is the limit. {SAVE_AGAIN}")
    return target


def read_json(folder: Path, name: str) -> dict[str, JSON]:
    """Return a JSON object of the folder. Raises UserError if there is no file, else CorruptFileError."""
    path = find_file(folder, name)
    if path is None:
        raise UserError(f"{folder}: holds no {name}. Name the folder of a model that transformers saved")
    try:
        with reading_from(folder / name, "Make it readable"):
            content = parse_json(read_bounded(path, MAX_BYTES[name], SAVE_AGAIN), foreign=True)
    except UserError:
        raise
    except ValueError as error:
        raise CorruptFileError(f"{folder / name}: is not JSON ({error}). {SAVE_AGAIN}") from error
    if not isinstance(content, dict):
        raise CorruptFileError(f"{folder / name}: is not a JSON object. {SAVE_AGAIN}")
    return content


@dataclass(frozen=True)
class HFModel:
    """Settings of a model folder, and the locations of its tensors."""

    folder: Path
    mapping: HuggingFaceMapping
    raw: Mapping[str, JSON]
    """All of config.json."""
    content: FolderContent
    files: Mapping[str, Path]
    """Safetensors file -> path of its bytes."""
    stored: Mapping[str, tuple[str, Stored]]
    """Plain name of each tensor -> its file and layout."""
    renamings: Mapping[str, str]
    """Patterns and replacements of tensor names: `key_mapping` of `transformers`."""
    notes: tuple[Note, ...]
    """Remarks for the user, one line each."""
    token_ids: TokenIds
    """Padding and labels that a later export writes."""

    @property
    def config(self) -> ModelConfig:
        return self.content.config

    @property
    def is_tied(self) -> bool:
        """True if the output layer is the token table, even if the folder stores no output layer."""
        return self.raw.get("tie_word_embeddings", True) is True

    @property
    def architecture(self) -> str:
        return self.mapping.architecture(self.config)


def read_settings(folder: Path) -> tuple[HuggingFaceMapping, dict[str, JSON], ModelConfig, tuple[Note, ...]]:
    """Read config.json of a model folder: its family, content, settings without the head, and notes.

    Raises UserError with all problems together.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a folder. Name one with config.json and model.safetensors")
    if find_file(folder, ADAPTER):
        raise UserError(
            f"{folder}: {ADAPTER}: holds an adapter, whose weights are not in the model. Import the folder "
            "(mlm import hf; of a Hub id, what hf download ID --local-dir FOLDER writes), and name that run"
        )
    raw, path = read_json(folder, CONFIG), str(folder / CONFIG)
    mappings = [mapping_of_kind(kind) for kind in KINDS]
    by_type = {model_type: mapping for mapping in mappings for model_type in mapping.model_types}
    mapping = by_type.get(str(raw.get("model_type")))
    if mapping is None:
        model_type = raw.get("model_type")
        hint = nearest(str(model_type), by_type)
        fix = "the reference's page Model families lists those that are" + (f", such as {hint}" * bool(hint))
        raise UserError(f"{path}: model_type={show(model_type)} is not supported; {fix}")
    config, notes = mapping.read(raw, path)
    return mapping, raw, config, tuple(map(Note, notes))


def read_model(folder: Path) -> HFModel:
    """Read the settings and the tensors' names of a model folder.

    Raises UserError, and CorruptFileError for damaged files.
    """
    mapping, raw, config, notes = read_settings(folder)
    files, headers = weight_files(folder), dict[str, dict[str, Stored]]()
    for file, path in files.items():
        with reading_from(folder / file, SAVE_AGAIN):
            headers[file] = read_safetensors_header(path, SAVE_AGAIN)[1]
    unwrapped, renamings, parts = language_model_names(
        [name for header in headers.values() for name in header]
    )
    for pattern, replacement in mapping.renamings(unwrapped.values()).items():
        renamings[pattern] = replacement
        unwrapped = {key: re.sub(pattern, replacement, name) for key, name in unwrapped.items()}
    stored: dict[str, tuple[str, Stored]] = {}
    for file, header in headers.items():
        for stored_name, layout in header.items():
            if stored_name not in unwrapped:
                continue
            name = mapping.plain(unwrapped[stored_name])
            if name in stored:
                locations = f"{stored[name][0]} and in {file}"
                raise CorruptFileError(f"{folder}: {name} is in {locations}. {SAVE_AGAIN}")
            stored[name] = file, layout
    for copy, name in mapping.copies(config).items():
        is_tied = raw.get("tie_word_embeddings", True) is True
        if is_tied and name not in stored and copy in stored:  # some writers store only the copy
            stored[name] = stored.pop(copy)
    shapes = {name: layout.shape for name, (_, layout) in stored.items()}
    content = mapping.content(config, shapes, str(folder))
    architectures = raw.get("architectures")
    class_name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if content.config.head == "none" and class_name.endswith("ForCausalLM"):
        raise UserError(
            f"{folder}: holds no lm_head.weight, which {show(class_name)} has. Save the model again, or set "
            f"tie_word_embeddings=true in {CONFIG} if the token table is its output layer"
        )
    token_ids, id_notes = token_ids_to_keep(raw, content.config)
    notes = (*notes, *parts, *content.notes, *id_notes)
    return HFModel(folder, mapping, raw, content, files, stored, renamings, notes, token_ids)


def language_model_names(stored: Sequence[str]) -> tuple[dict[str, str], dict[str, str], list[Note]]:
    """Return a language model's tensor names by stored name, the renaming to them, and notes.

    Tensors of other parts of a multi-modal model are left out.
    """
    prefix = next((o for o in LANGUAGE_MODELS if any(name.startswith(o) for name in stored)), "")
    if not prefix:
        return {name: name for name in stored}, {}, []
    pattern, new_prefix, notes = f"^{re.escape(prefix)}", LANGUAGE_MODELS[prefix], list[Note]()
    inner = [name for name in stored if name.startswith((prefix, "lm_head."))]
    notes.append(Note(f"names begin with {prefix}: read without"))
    if outside := sorted(set(stored) - set(inner)):
        notes.append(Note(f"left out, outside the language model: {outside[0]} and {len(outside) - 1} more"))
    return {name: re.sub(pattern, new_prefix, name) for name in inner}, {pattern: new_prefix}, notes


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the safetensors files of a model folder: name -> path of its bytes. Raises UserError."""
    if path := find_file(folder, WEIGHTS):
        return {WEIGHTS: path}
    if not find_file(folder, INDEX):
        example = next((path for path in sorted(folder.iterdir()) if path.suffix in OTHER_WEIGHTS), folder)
        raise UserError(
            f"{example}: only {WEIGHTS} and {INDEX} are read: a pickle could run any code. Is there a "
            "safetensors version? Else load it where you trust it, by transformers, and name what "
            "save_pretrained writes"
        )
    shards = read_json(folder, INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(f, str) for f in shards.values()):
        raise CorruptFileError(f"{folder / INDEX}: its weight_map names no files. {SAVE_AGAIN}")
    files = {}
    for name in sorted(set(shards.values())):
        if not SHARD_NAME.fullmatch(name):
            raise CorruptFileError(
                f"{folder / INDEX}: the file name {show(name)} is not allowed. {SAVE_AGAIN}"
            )
        path = find_file(folder, name)
        if path is None:
            raise UserError(f"{folder / name}: missing, {INDEX} names it. {SAVE_AGAIN}")
        files[name] = path
    return files


def fetch(repository: str, revision: str | None, setting: str) -> Path:
    """Download a model's settings, tokenizer and tensors; `setting` is the key for messages.

    Raises UserError in one line for any failure.
    """
    # An unsupported model is rejected before gigabytes are downloaded.
    read_settings(download(repository, revision, SMALL_FILES, setting))
    return download(repository, revision, (*SMALL_FILES, *TENSOR_FILES, *EXPORTED_AGAIN), setting)


def download(repository: str, revision: str | None, patterns: tuple[str, ...], setting: str) -> Path:
    """Download the files that match, and return their folder in the Hub's cache. Raises UserError."""
    go_offline_without_hub()
    try:
        hub: Any = import_module("huggingface_hub")  # optional
    except ImportError as error:
        raise UserError(
            f"{setting}={repository}: no such folder; to ask the Hub for it, {EXTRA} (huggingface_hub)"
        ) from error
    try:
        folder = hub.snapshot_download(repository, revision=revision, allow_patterns=list(patterns))
    except Exception as error:  # errors of the library and its HTTP client have no common base class
        reason = reason_of(error)
        if type(error).__name__ in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
            reason = "out of reach from here, and its cache does not hold it"
        suffix = "" if revision is None else f" revision={revision}"
        raise UserError(
            f"{setting}={repository}{suffix}: no such folder, and the Hub does not give it ({reason}). "
            f"Fix the id or the connection, or give a folder with config.json and model.safetensors"
        ) from error
    return Path(folder)


def reason_of(error: Exception) -> str:
    """Return the first line of an error of `huggingface_hub`, without the token.

    HTTP clients print headers that they cannot send.
    """
    lines = re.sub("Bearer [^'\"]*", "Bearer …", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def commit_of(folder: Path) -> str | None:
    """Return the commit that a folder of the Hub's cache is a snapshot of."""
    return folder.name if re.fullmatch("[0-9a-f]{40}", folder.name) else None


def model_name(folder: Path) -> str:
    """Return the last component of a model folder, or the name of the model on the Hub."""
    resolved = folder.resolve()
    if resolved.parent.name == "snapshots":  # models--OWNER--NAME/snapshots/COMMIT
        return resolved.parents[1].name.rpartition("--")[2]
    return resolved.name


def read_tokenizer(model: HFModel) -> tuple[Tokenizer | None, list[str]]:
    """Return the model's tokenizer if it is supported, and notes. Raises CorruptFileError."""
    folder, size = model.folder, model.config.vocab_size
    present = {name for name in TOKENIZER if find_file(folder, name)}
    if not any(present.issuperset(files) for files in (TOKENIZER[:1], TOKENIZER[1:3], TOKENIZER[3:4])):
        return None, ["no tokenizer is there: give tokenizer=… where text is read or written"]
    with reading_from(folder, SAVE_AGAIN):
        try:
            tokenizer = Tokenizer.load(folder)
        except CorruptFileError:
            raise
        except UserError as error:
            return None, [f"the tokenizer was not taken: {error}"]
    notes = []
    # `transformers` adds tokens of tokenizer_config.json at loading; ours reads tokenizer.json alone.
    settings = read_json(folder, TOKENIZER_SETTINGS) if find_file(folder, TOKENIZER_SETTINGS) else {}
    decoder = settings.get("added_tokens_decoder")
    tokens = list(decoder.values()) if isinstance(decoder, dict) else []
    names = [token.get("content") for token in tokens if isinstance(token, dict)]
    if unread := [name for name in names if isinstance(name, str) and name not in tokenizer]:
        notes.append(
            f"{TOKENIZER_SETTINGS} alone holds the token {show(unread[0])}, one of {len(unread)} not kept: "
            "to keep them, load the tokenizer by AutoTokenizer, save it by save_pretrained, and import it "
            "with the model"
        )
    try:
        tokenizer.chat_template = find_chat_template(folder, tokenizer)
    except UserError as error:
        notes.append(f"the chat template was not taken: {error}")
    if tokenizer.vocab_size > size:
        notes.append(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model reads up to {size - 1}"
        )
    return tokenizer, notes


def ids_to_keep(model: HFModel, tokenizer: Tokenizer | None) -> tuple[dict[str, JSON], list[str]]:
    """Return entries of config.json for a later export, and a note on one that is not kept.

    They are padding and labels and, without a tokenizer to supply them, the ids that begin and end texts.
    """
    pad, labels, notes = model.token_ids.pad, model.token_ids.labels, list[str]()
    entries: dict[str, JSON] = {"labels": list(labels)} if labels else {}
    if tokenizer is None:
        entries |= declared_ids(model.raw, model.config.vocab_size)
    entries.pop("pad_token_id", None)
    is_usable = tokenizer is None or pad in tokenizer.added_ids or not model.mapping.pads_with_special_token
    if pad is not None and is_usable:
        entries["pad_token_id"] = pad
    elif pad is not None:
        problem = "is no special token of the tokenizer: an export names the end of document"
        notes.append(f"pad_token_id={pad} is not kept: it {problem}")
    return entries, notes
