"""`mlm convert`, `import megatron`, `export megatron`, `export dcp`: a checkpoint of any format as another.

A tensor at a time is read, written and compared. Interrupted, the same command continues: files that are
whole are kept.
"""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

import mlm
from mlm.checkpoint.native.format import JSON
from mlm.cli.conversion_settings import (
    ConvertConfig,
    ExportDCPConfig,
    ExportMegatronConfig,
    ImportMegatronConfig,
)
from mlm.cli.result import model_columns, show_table
from mlm.convert import targets as targets
from mlm.convert.dcp.torchtitan import stored_shapes
from mlm.convert.huggingface.target import hf_mapping, write_hf
from mlm.convert.megatron.write import MegatronWriter, rank_files
from mlm.convert.sources import Source, SourceSettings, open_source
from mlm.convert.verify import compare
from mlm.data.tokenizer import Tokenizer
from mlm.inference.trained import split_problems
from mlm.parallel.config import ParallelConfig
from mlm.runs.folder import new_folder, out_problems
from mlm.util.errors import ConfigError, Problem, UserError, attempt
from mlm.util.terminal import Advance, progress_bar

MEGATRON = ("torch_dist", "torch", "megatron_dcp")
NOT_COMPARED = "not compared with the source (verify=false)"
WEIGHTS_ONLY = "weights only: the optimizer's state is left out, a run that starts from it begins at step 0"
WEIGHTS_AND_MOMENTS = (
    "weights and Adam's moments after {} steps: a run that starts from it with optimizer.kind=adamw takes "
    "both, at step 0 of its own schedule and data"
)


AnyConversion = ConvertConfig | ImportMegatronConfig | ExportMegatronConfig | ExportDCPConfig
"""Settings of a command that is a conversion."""


def as_conversion(config: AnyConversion) -> ConvertConfig:
    """Return the conversion that a command is."""
    match config:
        case ImportMegatronConfig():
            return ConvertConfig(**asdict(config))
        case ExportMegatronConfig():
            kept = ConvertConfig(source=config.ckpt, out=config.out, to=config.format, dtype=config.dtype)
            return replace(kept, tp=config.tp, pp=config.pp)
        case ExportDCPConfig():
            kept = ConvertConfig(source=config.ckpt, out=config.out, dtype=config.dtype)
            return replace(kept, to="megatron_dcp" if config.names == "megatron" else "torchtitan")
    return config


def preflight(config: AnyConversion) -> list[str]:
    """Return what is wrong with the settings, the source and `out`; no tensor is read."""
    given, config = config, as_conversion(config)
    problems = out_problems(config.out)
    tokenizer = attempt(problems, lambda: load_tokenizer(config))
    source = attempt(problems, lambda: open_(config, tokenizer))
    if source is None:
        return problems
    if isinstance(given, ImportMegatronConfig) and source.format not in ("torch_dist", "torch"):
        is_ours = source.format == "native"
        what = "a checkpoint of mlm already" if is_ours else f"of the format {source.format}"
        problems.append(f"source={given.source}: is {what}, not Megatron-LM's; convert it by mlm convert")
        return problems
    without_model = ("torchtitan", "torch_dist", "megatron_dcp")
    for key, formats in (("config", without_model), ("vocab_size", MEGATRON), ("num_heads", MEGATRON)):
        if getattr(config, key) is not None and source.format not in formats:
            why = f"has no effect with source={config.source}, of the format {source.format}"
            problems.append(str(Problem.at(key, getattr(config, key), why, "remove it")))
    attempt(problems, lambda: check_target(config, source))
    return problems


def load_tokenizer(config: ConvertConfig) -> Tokenizer | None:
    """Return the tokenizer that the command names. Raises UserError."""
    return None if config.tokenizer is None else Tokenizer.load(config.tokenizer)


def open_(config: ConvertConfig, tokenizer: Tokenizer | None = None) -> Source:
    """Open the source. Raises UserError."""
    settings = SourceSettings(config.config, config.vocab_size, config.num_heads, tokenizer)
    source = open_source(config.source, settings)
    if source.base is not None:
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
        writer = writer_of(config, source)
        list(rank_files(writer) if config.to == "torch" else writer.tensors())
    if config.to == "torchtitan":
        stored_shapes(source.model)
    if config.to in ("hf", "torchtitan"):
        hf_mapping(source)


def writer_of(config: ConvertConfig, source: Source) -> MegatronWriter:
    """Return what makes Megatron's tensors of the source."""
    return MegatronWriter(source.model, source.read, dtype_of(config), config.tp, config.pp)


def dtype_of(config: ConvertConfig) -> torch.dtype:
    """Return the dtype to write."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def run(config: AnyConversion) -> None:
    """Read, write, compare, publish, and print a table. Raises UserError; what is whole is kept then."""
    config = as_conversion(config)
    source = open_(config, load_tokenizer(config))
    check_target(config, source)
    digests = source.digests()
    dtype, name = dtype_of(config), Path(config.source).resolve().name
    origin = {"kind": source.format, "name": name, "files": dict(sorted(digests.items())), **source.origin}
    count = targets.tensor_bytes(source, dtype)
    if config.to == "native":
        count *= 1 + len(source.moments)
    kind = "run" if config.to == "native" else "exported-model"
    # all that decides every byte: an interrupted command with the same journal continues
    settings = {key: getattr(config, key) for key in ("to", "tp", "pp", "dtype", "max_file_gb", "tokenizer")}
    versions = {"mlm": mlm.__version__, "torch": torch.__version__}
    journal = {"settings": settings, "origin": origin, "versions": versions}
    encoded = json.dumps(journal, sort_keys=True).encode()
    with new_folder(Path(config.out), count, kind, journal=encoded) as folder:
        with progress_bar(f"writing {config.to}", count, in_bytes=True) as advance:
            write(config, source, folder, origin, advance)
        line = NOT_COMPARED
        if config.verify:
            reading = SourceSettings(config=config.config, vocab_size=source.model.vocab_size)
            line = compare(source, open_source(str(folder), reading), dtype)
        (folder / targets.DONE).unlink(missing_ok=True)
    title = f"convert · {config.source} · {source.format} to {config.to}, {config.dtype}"
    notes = list(source.notes)
    if source.moments and config.to == "native":
        notes.append(WEIGHTS_AND_MOMENTS.format(source.origin["iteration"]))
    elif source.format != "hf":
        notes.append(WEIGHTS_ONLY)
    show_table(title, model_columns(source.model), notes, line, f"written to {config.out}")


def write(
    config: ConvertConfig, source: Source, folder: Path, origin: dict[str, JSON], advance: Advance
) -> None:
    """Write the target's files."""
    dtype, most = dtype_of(config), config.max_file_gb
    match config.to:
        case "native":
            targets.write_native(source, folder, origin, advance, tp=config.tp, pp=config.pp, resumes=True)
        case "hf":
            progress = targets.Progress(folder, advance)
            write_hf(source, folder, dtype, most, advance, partial(progress.shard, folder))
        case "torchtitan":
            targets.write_torchtitan(source, folder, dtype, most, advance)
        case "torch_dist" | "megatron_dcp":
            writer = writer_of(config, source)
            targets.write_core(writer, folder, most, advance, stacked=config.to == "torch_dist")
        case "torch":
            targets.write_torch(writer_of(config, source), folder, advance)
