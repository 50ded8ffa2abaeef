"""`mlm convert`, `mlm export megatron` and `mlm export dcp`: a checkpoint of any format as one of any other.

A tensor at a time is read, written and compared. Interrupted, the same command continues: files that are
whole are kept.
"""

import json
from pathlib import Path

import torch

import mlm
from mlm.checkpoint.commands import conversion_targets as targets
from mlm.checkpoint.commands.config import ConvertConfig, ExportDCPConfig, ExportMegatronConfig
from mlm.checkpoint.commands.conversion_sources import Source, SourceSettings, open_source
from mlm.checkpoint.commands.conversion_verify import compare
from mlm.checkpoint.commands.import_megatron import WEIGHTS_AND_MOMENTS, WEIGHTS_ONLY
from mlm.checkpoint.commands.result import model_columns, show_table
from mlm.checkpoint.dcp.torchtitan import stored_shapes
from mlm.checkpoint.megatron.write import MegatronWriter, rank_files
from mlm.checkpoint.native.format import JSON
from mlm.inference.trained import split_problems
from mlm.parallel.config import ParallelConfig
from mlm.training.run_folder import new_folder, out_problems
from mlm.util.errors import ConfigError, UserError, attempt
from mlm.util.terminal import Advance, progress_bar

MEGATRON = ("torch_dist", "torch", "megatron_dcp")
NOT_COMPARED = "not compared with the source (verify=false)"


def preflight(config: ConvertConfig) -> list[str]:
    """Return what is wrong with the settings, the source and `out`; no tensor is read."""
    problems = out_problems(config.out)
    source = attempt(problems, lambda: open_(config))
    if source is not None:
        attempt(problems, lambda: check_target(config, source))
    return problems


def preflight_megatron(config: ExportMegatronConfig) -> list[str]:
    """Return what is wrong with the settings of `mlm export megatron`."""
    return preflight(of_megatron(config))


def preflight_dcp(config: ExportDCPConfig) -> list[str]:
    """Return what is wrong with the settings of `mlm export dcp`."""
    return preflight(of_dcp(config))


def run_megatron(config: ExportMegatronConfig) -> None:
    """Export a checkpoint for Megatron-LM. Raises UserError."""
    run(of_megatron(config))


def run_dcp(config: ExportDCPConfig) -> None:
    """Export a checkpoint as a DCP folder. Raises UserError."""
    run(of_dcp(config))


def of_megatron(config: ExportMegatronConfig) -> ConvertConfig:
    """Return the conversion that `mlm export megatron` is."""
    return ConvertConfig(
        source=config.ckpt, out=config.out, to=config.format, tp=config.tp, pp=config.pp, dtype=config.dtype
    )


def of_dcp(config: ExportDCPConfig) -> ConvertConfig:
    """Return the conversion that `mlm export dcp` is."""
    return ConvertConfig(
        source=config.ckpt,
        out=config.out,
        to="megatron_dcp" if config.names == "megatron" else "torchtitan",
        dtype=config.dtype,
    )


def open_(config: ConvertConfig) -> Source:
    """Open the source. Raises UserError."""
    settings = SourceSettings(config.config, config.vocab_size, config.num_heads, config.tokenizer)
    source = open_source(config.source, settings)
    if source.model.architecture.attention_weights:
        raise UserError(
            f"source={config.source}: models of latent attention are not converted; use mlm import hf or "
            "mlm export hf"
        )
    return source


def check_target(config: ConvertConfig, source: Source) -> None:
    """Raise UserError if the target has no such model, or the layout does not divide it."""
    if config.to not in ("native", "torch") and (config.tp, config.pp) != (1, 1):
        raise UserError(f"tp={config.tp} pp={config.pp}: to={config.to} has no layout: leave them out")
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
        targets.describe_for_hf(source)


def writer_of(config: ConvertConfig, source: Source) -> MegatronWriter:
    """Return what makes Megatron's tensors of the source."""
    return MegatronWriter(source.model, source.read, dtype_of(config), config.tp, config.pp)


def dtype_of(config: ConvertConfig) -> torch.dtype:
    """Return the dtype to write."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def run(config: ConvertConfig) -> None:
    """Read, write, compare, publish, and print a table. Raises UserError; what is whole is kept then."""
    source = open_(config)
    check_target(config, source)
    digests = source.digests()
    dtype, name = dtype_of(config), Path(config.source).resolve().name
    origin = {"kind": source.format, "name": name, "files": dict(sorted(digests.items())), **source.origin}
    count = targets.tensor_bytes(source, dtype)
    has_moments = config.to == "native" and bool(source.moments)
    count += has_moments * len(source.moments) * count
    kind = "run" if config.to == "native" else "exported-model"
    with new_folder(Path(config.out), count, kind, journal=journal(config, origin)) as folder:
        with progress_bar(f"writing {config.to}", count, in_bytes=True) as advance:
            write(config, source, folder, origin, advance)
        line = NOT_COMPARED
        if config.verify:
            settings = SourceSettings(config=config.config, vocab_size=source.model.vocab_size)
            line = compare(source, open_source(str(folder), settings), dtype)
        (folder / targets.DONE).unlink(missing_ok=True)
    columns = {
        "from#": source.format,
        "to#": config.to,
        "dtype#": config.dtype,
        **model_columns(source.model),
    }
    title = f"convert · {config.source}"
    state = WEIGHTS_AND_MOMENTS.format(source.applied_steps) if has_moments else WEIGHTS_ONLY
    notes = source.notes if source.format == "hf" else (*source.notes, state)
    show_table(title, columns, notes, line, f"written to {config.out}")


def journal(config: ConvertConfig, origin: dict[str, JSON]) -> bytes:
    """Return what decides every byte that is written: an interrupted command with the same continues."""
    settings = {key: getattr(config, key) for key in ("to", "tp", "pp", "dtype", "max_file_gb", "tokenizer")}
    versions = {"mlm": mlm.__version__, "torch": torch.__version__}
    return json.dumps({"settings": settings, "origin": origin, "versions": versions}, sort_keys=True).encode()


def write(
    config: ConvertConfig, source: Source, folder: Path, origin: dict[str, JSON], advance: Advance
) -> None:
    """Write the target's files."""
    dtype, most = dtype_of(config), config.max_file_gb
    match config.to:
        case "native":
            targets.write_native(source, folder, origin, config.tp, config.pp, advance)
        case "hf":
            targets.write_hf(source, folder, dtype, most, advance)
        case "torchtitan":
            targets.write_torchtitan(source, folder, dtype, most, advance)
        case "torch_dist":
            targets.write_torch_dist(writer_of(config, source), folder, most, advance)
        case "megatron_dcp":
            targets.write_megatron_dcp(writer_of(config, source), folder, most, advance)
        case "torch":
            targets.write_torch(writer_of(config, source), folder, advance)
