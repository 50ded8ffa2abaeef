"""A checkpoint of any format as another: `mlm convert`, and its work for imports and exports.

One tensor at a time is read, written and compared.
"""

from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.compare import row_blocks
from mlm.checkpoint.native.slices import Region
from mlm.convert.config import ConvertConfig
from mlm.convert.dcp.metadata import COPY_AGAIN, MAX_METADATA_BYTES, METADATA
from mlm.convert.dcp.torchtitan import TOKEN_TABLE, TorchtitanReader, stored_shapes
from mlm.convert.huggingface.export import hf_mapping, tensor_bytes
from mlm.convert.huggingface.families import mapping_of
from mlm.convert.huggingface.folder import CONFIG, read_settings
from mlm.convert.huggingface.mapping import Note
from mlm.convert.megatron.classic import open_classic
from mlm.convert.megatron.distributed import find_step, open_distributed
from mlm.convert.megatron.model import Files, MegatronModel
from mlm.convert.megatron.write import MegatronWriter
from mlm.convert.source import Checkpoint, Source, is_ours, open_checkpoint, open_source
from mlm.convert.targets import write_target
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import KINDS, ModelConfig
from mlm.runs.folder import new_folder, out_problems, run_config
from mlm.util.errors import CheckFailedError, Problem, UserError, attempt
from mlm.util.files import read_bounded
from mlm.util.terminal import progress_bar

WITHOUT_EFFECT = (
    *("kind", "options", "ffn_hidden_size"),  # compared by family, and with defaults filled in
    *("hidden_dropout", "attention_dropout", "init_std", "vocab_multiple"),
)
"""Settings of a model that may differ after a conversion: its outputs do not depend on them."""


def preflight(config: ConvertConfig) -> list[str]:
    """Return what is wrong with the settings, the source and `out`; no tensor is read."""
    problems = out_problems(config.out)
    tokenizer = attempt(problems, lambda: load_tokenizer(config))
    source = attempt(problems, lambda: open_for_conversion(config, tokenizer))
    if source is None:
        return problems
    read_by = {"config": ("torchtitan",), "vocab_size": ("torch_dist", "torch"), "num_heads": ("torch",)}
    for key, formats in read_by.items():
        if getattr(config, key) is not None and source.format not in formats:
            why = f"has no effect with source={config.source}, of the format {source.format}"
            problems.append(str(Problem.at(key, getattr(config, key), why, "remove it")))
    attempt(problems, lambda: check_target(config, source))
    return problems


def load_tokenizer(config: ConvertConfig) -> Tokenizer | None:
    return None if config.tokenizer is None else Tokenizer.load(config.tokenizer)


def open_for_conversion(config: ConvertConfig, tokenizer: Tokenizer | None = None) -> Source:
    """Open the source. Raises UserError, also for a model that is only imported from and exported to hf."""
    source = open_any(config.source, config, tokenizer)
    if isinstance(source, Checkpoint) and source.base is not None:
        raise UserError(
            f"source={config.source}: holds adapters alone; convert what mlm export hf merge=true writes"
        )
    if source.model.options.get("kv_lora_rank"):
        raise UserError(
            f"source={config.source}: models of latent attention are not converted; use mlm import hf or "
            "mlm export hf"
        )
    return source


def check_target(config: ConvertConfig, source: Source) -> None:
    """Raise UserError if the target has no such model."""
    if source.filled and config.to != "native":
        raise UserError(
            f"{source.path} lacks {min(source.filled)}: use to=native, which fills it, then convert that"
        )
    if config.to == "native" and config.dtype != "float32":
        raise UserError(f"dtype={config.dtype}: weights of to=native are float32: leave it out")
    if config.to == "torch_dist":
        MegatronWriter(source.model, source.read, torch.float32).tensors()
    if config.to == "torchtitan":
        stored_shapes(source.model)
    if config.to in ("hf", "torchtitan"):
        hf_mapping(source)


def convert(config: ConvertConfig) -> tuple[Source, list[str], str]:
    """Read, write, compare and publish; return the source, notes, and a line on what was compared.

    Raises UserError and leaves no files.
    """
    source = open_for_conversion(config, load_tokenizer(config))
    check_target(config, source)
    name, digests = Path(config.source).resolve().name, source.digests()
    origin = {"kind": source.format, "name": name, "files": dict(sorted(digests.items())), **source.origin}
    dtype: torch.dtype = getattr(torch, config.dtype)
    count = tensor_bytes(source, dtype)
    with new_folder(Path(config.out), count, "run" if config.to == "native" else "exported-model") as folder:
        with progress_bar(f"writing {config.to}", count, in_bytes=True) as advance:
            write_target(config, source, folder, origin, advance)
        line = "not compared with the source (verify=false)"
        if config.verify:
            reading = replace(config, vocab_size=source.model.vocab_size)
            line = compare(source, open_any(str(folder), reading), dtype)
    notes = source.conversion_notes
    if source.format != "hf":
        notes.append(
            "weights only: the optimizer's state is left out, a run that starts from it begins at step 0"
        )
    if config.to == "hf" and source.model.kind not in KINDS:
        notes.append(f"the outputs of model.kind={source.model.kind} were not compared; mlm export hf does")
    return source, notes, line


def compare(source: Source, target: Source, dtype: torch.dtype) -> str:
    """Compare the settings of the model, and every parameter bit for bit; return a line on what was compared.

    `dtype` is the target's, to which parameters are rounded first. With equal parameters and settings the
    outputs are equal too. Raises CheckFailedError for a difference.
    """
    if changed := changed_setting(source.model, target.model):
        raise CheckFailedError(f"{changed} differs from {source.path} after the conversion")
    compared = {name: entry for name, entry in source.parameters.items() if name not in source.filled}
    size = sum(entry.num_bytes for entry in compared.values())
    with progress_bar("comparing", size, in_bytes=True) as advance:
        for name, entry in compared.items():
            # Rows of tables are read as they are stored; a tensor of a layer may be put together of several.
            is_in_layer = name.startswith("layers.")
            for region in [Region.whole(entry.shape)] if is_in_layer else row_blocks(entry.shape, 4):
                if not torch.equal(source.read(name, region).to(dtype), target.read(name, region).to(dtype)):
                    raise CheckFailedError(f"{name} differs from {source.path} after the conversion")
                advance(region.volume * 4)
    names = f"{len(compared)} parameters are equal bit for bit"
    return f"compared: {names}, and so are the settings of the model"


def changed_setting(source: ModelConfig, target: ModelConfig) -> str | None:
    """Return the first setting that decides outputs and differs between two models; None if there is none."""
    names = [field.name for field in fields(ModelConfig) if field.name not in WITHOUT_EFFECT]
    for name in (*names, "ffn_size"):
        if getattr(source, name) != getattr(target, name):
            return f"model.{name}"
    if source == target or (mapping := mapping_of(source)) is None:
        return None
    changed = mapping.changed_option(source, target)
    return None if changed is None else f"model.options.{changed}"


def open_any(path: str, settings: ConvertConfig, tokenizer: Tokenizer | None = None) -> Source:
    """Open a checkpoint of any format, and check all that a conversion reads except tensors.

    `settings` have what the files may not record: `config`, `vocab_size` and `num_heads`.

    Raises UserError and CorruptFileError.
    """
    folder = Path(path)
    if not (is_ours(path) or folder.is_dir()):
        raise UserError(f"source={path}: no such folder; name a run, a model folder or a checkpoint folder")
    has_config = (folder / CONFIG).is_file()
    if is_ours(path) or (has_config and not (folder / METADATA).exists()):
        source = open_source(path, tokenizer)
        source.check()
        return source
    step = find_step(path)
    known = tokenizer.vocab_size if tokenizer else None
    if not (step / METADATA).exists():
        opened = open_classic(step, settings.vocab_size, known, settings.num_heads)
        return MegatronSource(opened, tokenizer, format="torch")
    if TOKEN_TABLE.encode() not in read_bounded(step / METADATA, MAX_METADATA_BYTES, COPY_AGAIN):
        return MegatronSource(open_distributed(step, settings.vocab_size, known), tokenizer)
    named, model = settings.config, None
    if named is not None and is_ours(named):
        model = open_checkpoint(named).model
    elif named is not None or has_config:
        model = read_settings(Path(named or folder))[2]
    return TorchtitanSource(step, model, tokenizer)


class TorchtitanSource(Source):
    """A folder of torch.distributed.checkpoint with torchtitan's names."""

    format = "torchtitan"

    def __init__(self, folder: Path, model: ModelConfig | None, tokenizer: Tokenizer | None) -> None:
        if model is None:
            raise UserError(
                f"{folder}: torchtitan's names, and no config.json: set config=… of mlm convert to a folder "
                "with the config.json of the model (that of its transformers version) or a run of mlm"
            )
        super().__init__(folder, run_config(folder.name, model), (), tokenizer)
        self._tensors = TorchtitanReader(folder, model)

    def read(self, name: str, region: Region) -> Tensor:
        return self._tensors.read(name, region)

    def digests(self) -> dict[str, str]:
        return _digests(self._tensors.reader)


class MegatronSource(Source):
    """A checkpoint of Megatron-LM."""

    def __init__(
        self, opened: MegatronModel, tokenizer: Tokenizer | None, format: str = "torch_dist"
    ) -> None:
        self.format = format
        tensors, notes = opened.tensors, list(opened.notes)
        if padding := opened.table_rows - opened.model.vocab_size:
            rows = f"the last {padding:,} of {opened.table_rows:,} rows of the token table"
            notes.append(f"{rows} are padding: left out")
        if tokenizer is None:
            notes.append("no tokenizer was named: give tokenizer=… where text is read or written")
        config = run_config(tensors.path.name, opened.model)
        super().__init__(tensors.path, config, tuple(map(Note, notes)), tokenizer)
        self._opened, self.filled = opened, opened.filled
        self.origin = {"iteration": opened.iteration}

    def read(self, name: str, region: Region) -> Tensor:
        return self._opened.read(name, region)

    def digests(self) -> dict[str, str]:
        return _digests(self._opened.tensors.files)


def _digests(files: Files) -> dict[str, str]:
    """Compare records with their checksums; return the digest of each file by its name.

    Raises CorruptFileError where a checksum differs, UserError where a file cannot be read.
    """
    with progress_bar("reading", files.num_bytes, in_bytes=True) as advance:
        return files.verify(advance)
