"""Conversion of checkpoints between formats: `mlm convert`.

Tensors are read, written and compared one at a time. An interrupted conversion keeps its complete files.
"""

import logging
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import mlm
from mlm.checkpoint.native.compare import row_blocks
from mlm.checkpoint.native.slices import Region
from mlm.config.build import to_dict
from mlm.convert.config import ConvertConfig
from mlm.convert.dcp.metadata import COPY_AGAIN, MAX_METADATA_BYTES, METADATA
from mlm.convert.dcp.torchtitan import TOKEN_TABLE, locations, open_torchtitan
from mlm.convert.huggingface.export import hf_mapping, tensor_bytes
from mlm.convert.huggingface.families import mapping_of
from mlm.convert.huggingface.folder import CONFIG, read_settings
from mlm.convert.huggingface.mapping import Note
from mlm.convert.locations import ForeignModel
from mlm.convert.megatron.classic import open_classic
from mlm.convert.megatron.distributed import find_step, open_distributed
from mlm.convert.megatron.write import core_mapping
from mlm.convert.source import Checkpoint, Source, is_native, open_checkpoint, open_source
from mlm.convert.targets import write_target
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import KINDS, ModelConfig
from mlm.runs.folder import new_folder, out_problems, run_config
from mlm.runs.journal import Journal
from mlm.runs.tokenizer import digests_of_tokenizer
from mlm.util.errors import CheckFailedError, Problem, UserError, attempt
from mlm.util.files import read_bounded
from mlm.util.terminal import progress_bar

log = logging.getLogger(__name__)

WITHOUT_EFFECT = (
    *("kind", "options", "ffn_hidden_size"),  # compared by family, and with defaults filled in
    *("hidden_dropout", "attention_dropout", "init_std", "vocab_multiple"),
)
"""Settings of a model that may differ after a conversion: its outputs do not depend on them."""


def preflight(config: ConvertConfig) -> list[str]:
    """Return the problems of the settings, the source and `out`; no tensor is read."""
    problems = out_problems(config.out)
    tokenizer_path = config.tokenizer
    tokenizer = None if tokenizer_path is None else attempt(problems, lambda: Tokenizer.load(tokenizer_path))
    source = attempt(problems, lambda: open_for_conversion(config, tokenizer))
    if source is None:
        return problems
    read_by = {"config": ("torchtitan",), "vocab_size": ("torch_dist", "torch"), "num_heads": ("torch",)}
    for key, formats in read_by.items():
        if getattr(config, key) is not None and source.format not in formats:
            problem = f"has no effect with source={config.source}, of the format {source.format}"
            problems.append(str(Problem.at(key, getattr(config, key), problem, "remove it")))
    attempt(problems, lambda: check_target(config, source))
    return problems


def open_for_conversion(config: ConvertConfig, tokenizer: Tokenizer | None = None) -> Source:
    """Open the source. Raises UserError, also for models that `mlm convert` does not support."""
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
        core_mapping(source.model)
    if config.to == "torchtitan":
        locations(source.model)
    if config.to in ("hf", "torchtitan"):
        hf_mapping(source)


def convert(config: ConvertConfig) -> tuple[Source, list[str], str]:
    """Read, write, compare and publish; return the source, notes, and a line on the comparison.

    Raises UserError. The same command continues with complete files, unless they or the source are damaged.
    """
    tokenizer = None if config.tokenizer is None else Tokenizer.load(config.tokenizer)
    source = open_for_conversion(config, tokenizer)
    check_target(config, source)
    name, digests = Path(config.source).resolve().name, source.digests()
    origin = {"kind": source.format, "name": name, "files": dict(sorted(digests.items())), **source.origin}
    dtype: torch.dtype = getattr(torch, config.dtype)
    count = tensor_bytes(source, dtype)
    identity = {
        "source": origin,
        "model": to_dict(source.model),
        "tokenizer": source.tokenizer and digests_of_tokenizer(source.tokenizer).encode(),
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
        **{key: getattr(config, key) for key in ("to", "dtype", "max_file_gb")},
    }
    kind = "run" if config.to == "native" else "exported-model"
    journal, line = Journal(identity), "not compared with the source (verify=false)"
    try:
        with new_folder(Path(config.out), count, kind, journal) as folder:
            with progress_bar(f"writing {config.to}", count, in_bytes=True) as advance:
                write_file = partial(journal.write_file, progress=advance)
                write_target(config, source, folder, origin, advance, write_file)
            if config.verify:
                reading = replace(config, vocab_size=source.model.vocab_size)
                line = compare(source, open_any(str(folder), reading), dtype)
    except (KeyboardInterrupt, SystemExit):
        if journal.files:
            log.warning("stopped: the same command continues with %d complete files", len(journal.files))
        raise
    notes = source.conversion_notes
    if source.format != "hf":
        notes.append(
            "weights only: the optimizer's state is left out, a run that starts from it begins at step 0"
        )
    if config.to == "hf" and source.model.kind not in KINDS:
        notes.append(f"the outputs of model.kind={source.model.kind} were not compared; mlm export hf does")
    return source, notes, line


def compare(source: Source, target: Source, dtype: torch.dtype) -> str:
    """Compare the model's settings, and every parameter bit for bit; return a line on the comparison.

    Parameters are first rounded to `dtype`, the target's. Equal parameters and settings give equal outputs.
    Raises CheckFailedError for a difference.
    """
    names = [field.name for field in fields(ModelConfig) if field.name not in WITHOUT_EFFECT]
    for name in (*names, "ffn_size"):
        if getattr(source.model, name) != getattr(target.model, name):
            raise CheckFailedError(f"model.{name} differs from {source.path} after the conversion")
    mapping = mapping_of(source.model)
    if mapping is not None and (option := mapping.changed_option(source.model, target.model)):
        raise CheckFailedError(f"model.options.{option} differs from {source.path} after the conversion")
    compared = {name: entry for name, entry in source.parameters.items() if name not in source.filled}
    size = sum(entry.num_bytes for entry in compared.values())
    with progress_bar("comparing", size, in_bytes=True) as advance:
        for name, entry in compared.items():
            # Token tables are read by rows, as stored; a layer's tensor may combine several stored ones.
            is_in_layer = name.startswith("layers.")
            for region in [Region.full(entry.shape)] if is_in_layer else row_blocks(entry.shape, 4):
                if not torch.equal(source.read(name, region).to(dtype), target.read(name, region).to(dtype)):
                    raise CheckFailedError(f"{name} differs from {source.path} after the conversion")
                advance(region.volume * 4)
    equal = f"{len(compared)} parameters are equal bit for bit"
    return f"compared: {equal}, and so are the settings of the model"


def open_any(path: str, settings: ConvertConfig, tokenizer: Tokenizer | None = None) -> Source:
    """Open a checkpoint of any format, and check everything that a conversion reads except tensors.

    `settings` supply facts that the files may lack: `config`, `vocab_size` and `num_heads`. Raises UserError
    and CorruptFileError.
    """
    folder = Path(path)
    if not (is_native(path) or folder.is_dir()):
        raise UserError(f"source={path}: no such folder; name a run, a model folder or a checkpoint folder")
    has_config = (folder / CONFIG).is_file()
    if is_native(path) or (has_config and not (folder / METADATA).exists()):
        source = open_source(path, tokenizer)
        source.check()
        return source
    step = find_step(path)
    tokenizer_size = tokenizer.vocab_size if tokenizer else None
    if not (step / METADATA).exists():
        opened = open_classic(step, settings.vocab_size, tokenizer_size, settings.num_heads)
        return ForeignSource(opened, tokenizer)
    if TOKEN_TABLE.encode() not in read_bounded(step / METADATA, MAX_METADATA_BYTES, COPY_AGAIN):
        return ForeignSource(open_distributed(step, settings.vocab_size, tokenizer_size), tokenizer)
    config_path = settings.config
    if config_path is not None and is_native(config_path):
        checkpoint = open_checkpoint(config_path)
        return ForeignSource(open_torchtitan(step, checkpoint.model, checkpoint.origin), tokenizer)
    if config_path is not None or has_config:
        _, content, model, _ = read_settings(Path(config_path or folder))
        return ForeignSource(open_torchtitan(step, model, content), tokenizer)
    raise UserError(
        f"{step}: torchtitan's names, and no config.json: set config=… of mlm convert to a folder "
        "with the config.json of the model (of its transformers version) or a run of mlm"
    )


class ForeignSource(Source):
    """A checkpoint of Megatron-LM or torchtitan."""

    def __init__(self, stored: ForeignModel, tokenizer: Tokenizer | None) -> None:
        notes = list(stored.notes)
        if tokenizer is None:
            notes.append("no tokenizer was named: give tokenizer=… where text is read or written")
        config = run_config(stored.path.name, stored.model)
        super().__init__(stored.path, config, tuple(map(Note, notes)), tokenizer)
        self.format, self.filled, self._stored = stored.format, stored.filled, stored
        self.origin = dict(stored.origin)
        if tokenizer is None:
            self.origin |= stored.token_ids

    def read(self, name: str, region: Region) -> Tensor:
        return self._stored.read(name, region)

    def digests(self) -> dict[str, str]:
        files = self._stored.files
        with progress_bar("reading", files.num_bytes, in_bytes=True) as advance:
            return files.verify(advance)
