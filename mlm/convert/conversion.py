"""A checkpoint of any format as another: `mlm convert`, and its work for imports and exports.

One tensor at a time is read, written and compared. Interrupted, the same conversion continues: complete files
are kept.
"""

import json
from collections.abc import Collection
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

import mlm
from mlm.checkpoint.native.compare import row_blocks
from mlm.checkpoint.native.slices import Read, Region
from mlm.convert.config import ConvertConfig
from mlm.convert.dcp.metadata import COPY_AGAIN, MAX_METADATA_BYTES, METADATA
from mlm.convert.dcp.storage import DCPReader
from mlm.convert.dcp.torchtitan import TOKEN_TABLE, TorchtitanReader, stored_shapes
from mlm.convert.huggingface.export import hf_mapping, tensor_bytes
from mlm.convert.huggingface.families import mapping_of
from mlm.convert.huggingface.folder import CONFIG, read_settings
from mlm.convert.huggingface.mapping import Note
from mlm.convert.megatron.distributed import open_distributed, open_moments
from mlm.convert.megatron.files import RankFiles, find_files, find_step
from mlm.convert.megatron.merge import RankTensors, open_checkpoint
from mlm.convert.megatron.model import MegatronModel, MegatronOverrides
from mlm.convert.megatron.write import rank_files
from mlm.convert.source import Checkpoint, Source, is_ours, open_source
from mlm.convert.source import open_checkpoint as open_ours
from mlm.convert.targets import DONE, megatron_writer, write_target
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import KINDS, ModelConfig
from mlm.parallel.config import ParallelConfig
from mlm.runs.checks import split_problems
from mlm.runs.folder import new_folder, out_problems, run_config
from mlm.util.errors import CheckFailedError, ConfigError, Problem, UserError, attempt
from mlm.util.files import read_bounded
from mlm.util.terminal import progress_bar

MEGATRON = ("torch_dist", "torch", "megatron_dcp")
WITHOUT_EFFECT = (
    *("kind", "options", "ffn_hidden_size"),  # compared by family, and with defaults filled in
    *("hidden_dropout", "attention_dropout", "init_std", "vocab_multiple"),
)
"""Settings of a model that may differ after a conversion: its outputs do not depend on them."""


def preflight(config: ConvertConfig, only: Collection[str] = ()) -> list[str]:
    """Return what is wrong with the settings, the source and `out`; no tensor is read.

    `only`, if any, are the formats that the source may have: Megatron-LM's.
    """
    problems = out_problems(config.out)
    tokenizer = attempt(problems, lambda: load_tokenizer(config))
    source = attempt(problems, lambda: open_for_conversion(config, tokenizer))
    if source is None:
        return problems
    if only and source.format not in only:
        is_native = source.format == "native"
        what = "a checkpoint of mlm already" if is_native else f"of the format {source.format}"
        problems.append(f"source={config.source}: is {what}, not Megatron-LM's; convert it by mlm convert")
        return problems
    without_model = ("torchtitan", "torch_dist", "megatron_dcp")
    for key, formats in (("config", without_model), ("vocab_size", MEGATRON), ("num_heads", MEGATRON)):
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
    """Raise UserError if the target has no such model, or the layout does not divide it."""
    if source.filled and config.to != "native":
        raise UserError(
            f"{source.path} lacks {min(source.filled)}: use to=native, which fills it, then convert that"
        )
    if config.to == "native" and config.dtype != "float32":
        raise UserError(f"dtype={config.dtype}: weights of to=native are float32: leave it out")
    layout = ParallelConfig(tp=config.tp, pp=config.pp)
    if config.to in ("native", "torch") and (problems := split_problems(source.model, layout)):
        raise ConfigError(problems)
    if config.to in MEGATRON:
        writer = megatron_writer(config, source)
        list(rank_files(writer) if config.to == "torch" else writer.tensors())
    if config.to == "torchtitan":
        stored_shapes(source.model)
    if config.to in ("hf", "torchtitan"):
        hf_mapping(source)


def convert(config: ConvertConfig) -> tuple[Source, list[str], str]:
    """Read, write, compare and publish; return the source, notes, and a line on what was compared.

    Raises UserError; complete files are kept then.
    """
    source = open_for_conversion(config, load_tokenizer(config))
    check_target(config, source)
    name, digests = Path(config.source).resolve().name, source.digests()
    origin = {"kind": source.format, "name": name, "files": dict(sorted(digests.items())), **source.origin}
    dtype: torch.dtype = getattr(torch, config.dtype)
    is_native = config.to == "native"
    count = tensor_bytes(source, dtype) * (1 + len(source.moments) * is_native)
    # All that decides every byte: an interrupted command with the same journal continues.
    settings = {key: getattr(config, key) for key in ("to", "tp", "pp", "dtype", "max_file_gb", "tokenizer")}
    versions = {"mlm": mlm.__version__, "torch": torch.__version__}
    journal = json.dumps({"settings": settings, "origin": origin, "versions": versions}, sort_keys=True)
    kind = "run" if is_native else "exported-model"
    with new_folder(Path(config.out), count, kind, journal=journal.encode()) as folder:
        with progress_bar(f"writing {config.to}", count, in_bytes=True) as advance:
            write_target(config, source, folder, origin, advance)
        line = "not compared with the source (verify=false)"
        if config.verify:
            reading = replace(config, vocab_size=source.model.vocab_size, num_heads=None)
            line = compare(source, open_any(str(folder), reading), dtype)
        (folder / DONE).unlink(missing_ok=True)
    notes = source.conversion_notes
    if source.moments and is_native:
        notes.append(
            f"weights and Adam's moments after {source.origin['iteration']} steps: a run that starts from it "
            "with optimizer.kind=adamw takes both, at step 0 of its own schedule and data"
        )
    elif source.format != "hf":
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
    reads: list[tuple[str, Read, Read]] = [("", source.read, target.read)]
    reads += [(f"{name} of ", source.moments[name], read) for name, read in target.moments.items()]
    size = len(reads) * sum(entry.num_bytes for entry in compared.values())
    with progress_bar("comparing", size, in_bytes=True) as advance:
        for (kind, read, read_again), (name, entry) in product(reads, compared.items()):
            # Rows of tables are read as they are stored; a tensor of a layer may be put together of several.
            is_in_layer = name.startswith("layers.")
            for region in [Region.whole(entry.shape)] if is_in_layer else row_blocks(entry.shape, 4):
                if not torch.equal(read(name, region).to(dtype), read_again(name, region).to(dtype)):
                    raise CheckFailedError(f"{kind}{name} differs from {source.path} after the conversion")
                advance(region.volume * 4)
    moments = ", their moments too" if target.moments else ""
    names = f"{len(compared)} parameters are equal bit for bit{moments}"
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
    step, named, config = find_step(path), settings.config, None
    if named is not None and is_ours(named):
        config = open_ours(named).model
    elif named is not None or has_config:
        config = read_settings(Path(named or folder))[2]
    is_dcp = (step / METADATA).is_file()
    if is_dcp and TOKEN_TABLE.encode() in read_bounded(step / METADATA, MAX_METADATA_BYTES, COPY_AGAIN):
        return TorchtitanSource(step, config, tokenizer)
    overrides = MegatronOverrides(
        vocab_size=settings.vocab_size,
        tokenizer_size=tokenizer.vocab_size if tokenizer else None,
        num_heads=settings.num_heads,
        config=config,
    )
    if is_dcp:
        return MegatronSource(open_distributed(step, overrides), tokenizer)
    return MegatronSource(open_checkpoint(find_files(path), replace(overrides, config=None)), tokenizer)


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
        moments, steps = self._tensors.open_moments()
        self._readers = dict.fromkeys([self._tensors.reader, *(moment.reader for moment in moments.values())])
        self.moments = {name: moment.read for name, moment in moments.items()}
        self.origin = {"iteration": steps} if moments else {}

    def read(self, name: str, region: Region) -> Tensor:
        return self._tensors.read(name, region)

    def digests(self) -> dict[str, str]:
        return _digests(*self._readers)


class MegatronSource(Source):
    """A checkpoint of Megatron-LM: distributed, or the files of its ranks."""

    def __init__(self, opened: MegatronModel, tokenizer: Tokenizer | None) -> None:
        tensors, notes = opened.tensors, list(opened.notes)
        if padding := opened.table_rows - opened.model.vocab_size:
            rows = f"the last {padding:,} of {opened.table_rows:,} rows of the token table"
            notes.append(f"{rows} are padding: left out")
        if tokenizer is None:
            notes.append("no tokenizer was named: give tokenizer=… where text is read or written")
        config = run_config(tensors.path.name, opened.model)
        super().__init__(tensors.path, config, tuple(map(Note, notes)), tokenizer)
        self._opened, self._moments = opened, open_moments(opened)
        self.format, self.filled = "torch_dist", opened.filled
        self.moments = {name: moment.read for name, moment in self._moments.items()}
        self.origin = {"iteration": opened.iteration}
        if isinstance(tensors, RankTensors):
            self.format = "torch"
            layout = {"tp": tensors.tp, "pp": tensors.pp, "vp": tensors.vp}
            self.origin |= {"checkpoint_version": tensors.version, "layout": layout}

    def read(self, name: str, region: Region) -> Tensor:
        return self._opened.read(name, region)

    def digests(self) -> dict[str, str]:
        return _digests(*(model.tensors.files for model in (self._opened, *self._moments.values())))


def _digests(*files: DCPReader | RankFiles) -> dict[str, str]:
    """Compare records with their checksums; return the digest of each file by its name.

    Raises CorruptFileError where a checksum differs, UserError where a file cannot be read.
    """
    digests: dict[str, str] = {}
    with progress_bar("reading", sum(part.num_bytes for part in files), in_bytes=True) as advance:
        for part in files:
            digests |= part.verify(advance)
    return digests
