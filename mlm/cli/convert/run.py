"""`mlm convert`, `mlm import …` and `mlm export …`. Each raises UserError, and leaves nothing then."""

from pathlib import Path

import mlm
from mlm.checkpoint.native.folders import best_note
from mlm.cli.convert.settings import (
    ExportGGUFConfig,
    ExportHFConfig,
    ImportHFConfig,
)
from mlm.cli.result import model_columns, show_table
from mlm.convert import conversion
from mlm.convert.config import ConvertConfig
from mlm.convert.gguf import export as gguf
from mlm.convert.huggingface.export import export_model, export_problems
from mlm.convert.huggingface.hub import push_folder, push_problems
from mlm.convert.huggingface.importing import import_adapters, import_model, import_problems, is_adapter
from mlm.convert.source import open_checkpoint
from mlm.util.results import result_problems, target_name
from mlm.verify.huggingface import compare_logits, extra_problems


def run(config: ConvertConfig) -> None:
    source, notes, line = conversion.convert(config)
    title = f"convert · {config.source} · {source.format} to {config.to}, {config.dtype}"
    show_table(title, model_columns(source.model), notes, line, f"written to {config.out}")


def preflight_import_hf(config: ImportHFConfig) -> list[str]:
    problems = import_problems(config.source, config.out, config.revision, config.base)
    is_compared = config.verify and not is_adapter(config.source)
    return [*problems, *extra_problems(is_compared)]


def run_import_hf(config: ImportHFConfig) -> None:
    compare, out = compare_logits if config.verify else None, Path(config.out)
    if is_adapter(config.source):
        columns, *lines = import_adapters(Path(config.source), out, base=config.base)
        show_table(f"import hf · {config.source}", columns, (), *lines)
        return
    model, notes, *lines = import_model(config.source, out, revision=config.revision, compare=compare)
    show_table(
        f"import hf · {config.source}",
        {"class#": model.architecture, **model_columns(model.config)},
        notes,
        *lines,
    )


def preflight_export_hf(config: ExportHFConfig) -> list[str]:
    problems = [*export_problems(config.ckpt, config.out, config.max_file_gb), *extra_problems(config.verify)]
    if problems:
        return problems
    source = open_checkpoint(config.ckpt)
    if config.base is not None and source.base is None:
        problems.append(f"base={config.base}: {source.path} holds no adapters: leave it out")
    elif config.push is not None:
        options = {"public": config.public, "merge": config.merge}
        problems += push_problems(config.push, source, base=config.base, **options)
    return problems


def run_export_hf(config: ExportHFConfig) -> None:
    source, compare = open_checkpoint(config.ckpt), compare_logits if config.verify else None
    columns, notes, line = export_model(
        source,
        Path(config.out),
        max_file_gb=config.max_file_gb,
        merge=config.merge,
        compare=compare,
        base=config.base,
    )
    if "rank#" not in columns:  # not of adapters
        notes = [*filter(None, [best_note(config.ckpt, source.path)]), *notes]
    lines = [line, f"written to {config.out}"]
    if config.push is not None:
        lines.append(f"pushed to {push_folder(Path(config.out), config.push, public=config.public)}")
    show_table(f"export hf · {source.path}", columns, notes, *lines)


def preflight_export_gguf(config: ExportGGUFConfig) -> list[str]:
    return gguf.export_problems(config.ckpt) or result_problems(config.out)


def run_export_gguf(config: ExportGGUFConfig) -> None:
    source = open_checkpoint(config.ckpt)
    logits = (lambda ids: mlm.load(config.ckpt).logits(ids)) if config.verify else None
    columns, notes = gguf.export_gguf(source, config.out, config.type, logits=logits)
    show_table(f"export gguf · {source.path}", columns, notes, f"written to {target_name(config.out)}")
