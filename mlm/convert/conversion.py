"""A checkpoint of any format as another: `mlm convert`, and what it does for imports and exports.

A tensor at a time is read, written and compared. Interrupted, the same conversion continues: files that are
whole are kept.
"""

import json
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import mlm
from mlm.checkpoint.native.format import JSON
from mlm.convert import targets
from mlm.convert.config import ConvertConfig
from mlm.convert.dcp.torchtitan import stored_shapes
from mlm.convert.foreign import open_any
from mlm.convert.huggingface.export import hf_mapping, tensor_bytes, write_hf
from mlm.convert.megatron.write import MegatronWriter, rank_files
from mlm.convert.source import Checkpoint, Source
from mlm.convert.verify import compare
from mlm.data.tokenizer import Tokenizer
from mlm.parallel.config import ParallelConfig
from mlm.runs.checks import split_problems
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


def preflight(config: ConvertConfig, only: Collection[str] = ()) -> list[str]:
    """Return what is wrong with the settings, the source and `out`; no tensor is read.

    `only`, if any, are the formats that the source may have: Megatron-LM's.
    """
    problems = out_problems(config.out)
    tokenizer = attempt(problems, lambda: load_tokenizer(config))
    source = attempt(problems, lambda: open_(config, tokenizer))
    if source is None:
        return problems
    if only and source.format not in only:
        is_ours = source.format == "native"
        what = "a checkpoint of mlm already" if is_ours else f"of the format {source.format}"
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
    """Return the tokenizer that the command names. Raises UserError."""
    return None if config.tokenizer is None else Tokenizer.load(config.tokenizer)


def open_(config: ConvertConfig, tokenizer: Tokenizer | None = None) -> Source:
    """Open the source. Raises UserError."""
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


def convert(config: ConvertConfig) -> tuple[Source, list[str], str]:
    """Read, write, compare and publish; return the source, notes, and a line on what was compared.

    Raises UserError; what is whole is kept then.
    """
    source = open_(config, load_tokenizer(config))
    check_target(config, source)
    digests = source.digests()
    dtype, name = dtype_of(config), Path(config.source).resolve().name
    origin = {"kind": source.format, "name": name, "files": dict(sorted(digests.items())), **source.origin}
    count = tensor_bytes(source, dtype)
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
            reading = replace(config, vocab_size=source.model.vocab_size, num_heads=None)
            line = compare(source, open_any(str(folder), reading), dtype)
        (folder / targets.DONE).unlink(missing_ok=True)
    notes = source.conversion_notes
    if source.moments and config.to == "native":
        notes.append(WEIGHTS_AND_MOMENTS.format(source.origin["iteration"]))
    elif source.format != "hf":
        notes.append(WEIGHTS_ONLY)
    return source, notes, line


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
