"""`mlm export gguf`: a Llama, Mistral or Qwen as a file for llama.cpp."""

from dataclasses import dataclass
from typing import Literal

from mlm.cli.command import Command, check_out_file
from mlm.config.fields import CheckpointPath, ResultFile


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportGGUFConfig:
    """The run spec of `mlm export gguf`: a Llama, Mistral or Qwen as a file for llama.cpp."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    out: ResultFile
    """File to write, such as model.gguf, with the tokenizer in it."""
    type: Literal["f32", "f16", "bf16", "q8_0"] = "f16"
    """Numbers of matrices: q8_0 is 8 bits and a scale for 32 of them. Vectors are float32."""
    verify: bool = True
    """Compare tokens and logits in llama.cpp before the file is named, where mlm[gguf-check] is installed."""


def preflight(config: ExportGGUFConfig) -> list[str]:
    """Return what is wrong with the checkpoint and `out`; no tensor is read."""
    from mlm.convert.gguf.export import export_problems
    from mlm.util.results import result_problems

    return export_problems(config.ckpt) or result_problems(config.out)


def run(config: ExportGGUFConfig) -> None:
    """Write the file, try it in llama.cpp and print a table. Raises UserError."""
    import mlm
    from mlm.cli.result import show_table
    from mlm.convert.gguf.export import export_gguf
    from mlm.convert.source import open_checkpoint
    from mlm.util.results import target_name

    source = open_checkpoint(config.ckpt)
    logits = (lambda ids: mlm.load(config.ckpt).logits(ids)) if config.verify else None
    columns, notes = export_gguf(source, config.out, config.type, logits=logits)
    title = f"export gguf · {source.path}"
    show_table(title, columns, notes, f"written to {target_name(config.out)}")


EXPORT_GGUF = Command(
    words=("export", "gguf"),
    spec=ExportGGUFConfig,
    target="mlm.cli.export_gguf:run",
    local_check=check_out_file,
    preflight="mlm.cli.export_gguf:preflight",
    positional=("ckpt",),
    summary="export a Llama, Mistral or Qwen as a GGUF file for llama.cpp",
    about=(
        "Writes weights and tokenizer as one file, by the package gguf (the extra mlm[gguf]). Adapters "
        "are added to the weights of their base."
    ),
    examples=(("Eight bits a weight", "mlm export gguf runs/laptop_chat out=model.gguf type=q8_0"),),
)
