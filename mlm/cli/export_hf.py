"""`mlm export hf`: a checkpoint as a folder that `transformers` loads, tokenizer included.

Tensors are read and written one at a time, whatever layout wrote the checkpoint; the vocabulary is not
padded. The folder is loaded by `transformers` and its logits are compared before it gets its name.
"""

from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.folders import best_note
from mlm.checkpoint.native.shard_file import Form, write_stream
from mlm.checkpoint.native.slices import Region
from mlm.cli.conversion_settings import ExportHFConfig
from mlm.cli.result import show_table
from mlm.config.fields import Role, path_argument
from mlm.convert.huggingface import peft
from mlm.convert.huggingface.target import (
    SAFETENSORS_FOR,
    hf_mapping,
    write_hf,
    write_json,
    write_settings,
)
from mlm.convert.sources import Source, SourceSettings, native_source, open_source
from mlm.convert.targets import tensor_bytes
from mlm.inference.base import Base
from mlm.inference.trained import is_model_folder, run_directory, trained_config
from mlm.models.shape import count_parameters
from mlm.runs.folder import GB, new_folder, out_problems
from mlm.util.errors import ConfigError, attempt
from mlm.util.terminal import progress_bar
from mlm.verify.huggingface import NOT_COMPARED, compare_logits, extra_problems


def preflight(config: ExportHFConfig) -> list[str]:
    """Return what is wrong with the checkpoint and `out`; no tensor is read."""
    problems = [*out_problems(config.out), *extra_problems(config.verify)]
    if not config.max_file_gb > 0:
        problems.append(f"max_file_gb={config.max_file_gb} must be greater than 0")
    attempt(problems, lambda: hf_mapping(native_source(config.ckpt)))
    return problems


def export_hf(
    ckpt: str | Path,
    out: str | Path,
    *,
    max_file_gb: float = 5.0,
    verify: bool = True,
    merge: bool = False,
) -> Path:
    """Write a checkpoint as a folder that `transformers` loads, as `mlm export hf` does; return the folder.

    Args:
        ckpt: Run directory (its latest checkpoint; of a finetuned run the best) or checkpoint (step-…).
        out: Folder to write, a new one.
        max_file_gb: Largest .safetensors file, in 10^9 bytes.
        verify: Compare logits with those of `transformers`, and write nothing where they differ.
        merge: Of a run with adapters, add them to the weights of their base; else they are written alone, as
            `peft` loads them.

    Raises:
        UserError: The model is not supported, `out` is not free, or the logits differ.
    """
    ckpt, out = path_argument("ckpt", ckpt), path_argument("out", out, Role.FOLDER)
    config = ExportHFConfig(ckpt=ckpt, out=out, max_file_gb=max_file_gb, verify=verify, merge=merge)
    if problems := preflight(config):
        raise ConfigError(problems)
    export(config)
    return Path(out)


def run(config: ExportHFConfig) -> None:
    """Export the checkpoint and print a table. Raises UserError."""
    source, columns, notes, line = export(config)
    show_table(f"export hf · {source.path}", columns, notes, line, f"written to {config.out}")


def export(config: ExportHFConfig) -> tuple[Source, dict[str, object], list[str], str]:
    """Verify the digests, write, compare logits and publish; return what is printed of it."""
    source = native_source(config.ckpt)
    mapping, count = hf_mapping(source), tensor_bytes(source, torch.float32)
    with new_folder(Path(config.out), count, "exported-model") as folder:
        source.digests()
        if source.base is not None and not config.merge:
            rank = write_adapters(source, source.base, folder)
            write_settings(source, mapping, folder)
            name = source.base.name
            note = f"its base in the form that peft loads: mlm export hf ckpt={name} out=… merge=true"
            notes = [] if is_model_folder(source.base.path) else [note]
            return source, {"rank#": rank}, notes, f"adapters of {name}, for peft"
        with progress_bar("exporting", count, in_bytes=True) as advance:
            files, is_folded = write_hf(source, folder, torch.float32, config.max_file_gb, advance)
        line = str(compare_logits(folder, source.path)) if config.verify else NOT_COMPARED
    columns = {
        "class#": mapping.architecture(source.model),
        "parameters#": f"{count_parameters(source.model):,}",
        "step#": source.manifest.step,
        "files#": files,
        "GB#": f"{count / GB:.3g}",
    }
    notes = [*filter(None, [best_note(config.ckpt, source.path)])]
    if source.tokenizer is None:
        notes.append(f"no tokenizer: {run_directory(source.path)} holds no tokenizer.json")
    if is_folded:
        notes.append("the classifier's bias, which the class has no parameter for, is in the norm before it")
    return source, columns, notes, line


def write_adapters(source: Source, base: Base, folder: Path) -> int:
    """Write adapters as `peft` does, with its settings; return their rank."""
    lora, below = (
        trained_config(source.manifest, source.path).lora,
        open_source(str(base.path), SourceSettings()),
    )

    def read(name: str) -> Tensor:
        return source.read(name, Region.whole(source.manifest.tensors[f"model.{name}"].shape))

    tensors = {
        name: value.contiguous()
        for each in peft.stored_adapters(source.model, lora)
        for name, value in each.to_theirs(read, below.whole)
    }
    forms = {name: Form(torch.float32, tuple(value.shape)) for name, value in tensors.items()}
    write_stream(folder / peft.WEIGHTS, forms, tensors.__getitem__, SAFETENSORS_FOR)
    write_json(folder / peft.CONFIG, peft.write_config(source.model, lora, base.name))
    return lora.rank
