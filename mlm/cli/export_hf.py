"""`mlm export hf`: a checkpoint as a folder that `transformers` loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mlm.cli.command import Command
from mlm.config.fields import POSITIVE, CheckpointPath, OutFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportHFConfig:
    """The run spec of `mlm export hf`: a checkpoint as a folder that `transformers` loads."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    out: OutFolder
    """Folder to write: config.json, model.safetensors (or several and their index), the tokenizer."""
    merge: bool = False
    """Of a run with adapters, add them to the weights of their base; else the adapters alone are written, as
    peft loads them."""
    max_file_gb: Annotated[float, POSITIVE] = 5.0
    """Largest .safetensors file, in 10^9 bytes; a larger model is split into several."""
    verify: bool = True
    """Compare logits with those of `transformers` on the same tokens, and refuse where they differ."""


def preflight(config: ExportHFConfig) -> list[str]:
    """Return what is wrong with the checkpoint and `out`; no tensor is read."""
    from mlm.convert.huggingface.export import export_problems
    from mlm.verify.huggingface import extra_problems

    return [*export_problems(config.ckpt, config.out, config.max_file_gb), *extra_problems(config.verify)]


def run(config: ExportHFConfig) -> None:
    """Export the checkpoint and print a table. Raises UserError."""
    from mlm.checkpoint.native.folders import best_note
    from mlm.cli.result import show_table
    from mlm.convert.huggingface.export import export_model
    from mlm.convert.source import open_checkpoint
    from mlm.verify.huggingface import compare_logits

    source, out = open_checkpoint(config.ckpt), Path(config.out)
    compare = compare_logits if config.verify else None
    columns, notes, line = export_model(
        source, out, max_file_gb=config.max_file_gb, merge=config.merge, compare=compare
    )
    if "rank#" not in columns:
        notes = [*filter(None, [best_note(config.ckpt, source.path)]), *notes]
    show_table(f"export hf · {source.path}", columns, notes, line, f"written to {config.out}")


EXPORT_HF = Command(
    words=("export", "hf"),
    spec=ExportHFConfig,
    target="mlm.cli.export_hf:run",
    preflight="mlm.cli.export_hf:preflight",
    positional=("ckpt",),
    summary="export a checkpoint as a folder that transformers loads",
    about=(
        "Writes config.json, safetensors (several with an index where one would be too large) and the "
        "tokenizer, loads them with `transformers` and compares logits (needs the extra mlm[hf])."
    ),
    examples=(
        (
            "Export a run's latest checkpoint for `transformers`",
            "mlm export hf ckpt=runs/shakespeare out=exported",
        ),
    ),
)
