"""`mlm import hf`: a Hugging Face model as a checkpoint to train, score or sample."""

from dataclasses import dataclass
from pathlib import Path

from mlm.cli.command import Command
from mlm.config.fields import CheckpointPath, InputPath, OutFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportHFConfig:
    """The run spec of `mlm import hf`: a Hugging Face model as a checkpoint to train, score or sample."""

    source: InputPath
    """Folder with config.json and model.safetensors, or the id of a model on the Hugging Face Hub."""
    out: OutFolder
    """Run directory to write: out/checkpoints/step-00000000 and the tokenizer."""
    base: CheckpointPath | None = None
    """Of a folder of peft's, the model that its adapters were trained on: a checkpoint, run directory, model
    folder or Hub id; null takes the one that it names."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; null takes the default branch."""
    verify: bool = True
    """Compare logits with those of `transformers` on the same tokens, and refuse where they differ."""


def preflight(config: ImportHFConfig) -> list[str]:
    """Return what is wrong with the settings and the folder; nothing is downloaded."""
    from mlm.convert.huggingface.importing import import_problems
    from mlm.verify.huggingface import extra_problems

    problems = import_problems(config.source, config.out, config.revision, config.base)
    return [*problems, *extra_problems(config.verify)]


def run(config: ImportHFConfig) -> None:
    """Import the model or the adapters and print a table. Raises UserError and leaves no files."""
    from mlm.cli.result import model_columns, show_table
    from mlm.convert.huggingface.importing import import_adapters, import_model, is_adapter
    from mlm.verify.huggingface import compare_logits

    title, out = f"import hf · {config.source}", Path(config.out)
    if is_adapter(config.source):
        show_table(title, *import_adapters(Path(config.source), out, base=config.base))
        return
    compare = compare_logits if config.verify else None
    model, notes, *lines = import_model(config.source, out, revision=config.revision, compare=compare)
    show_table(title, {"class#": model.architecture, **model_columns(model.config)}, notes, *lines)


IMPORT_HF = Command(
    words=("import", "hf"),
    spec=ImportHFConfig,
    target="mlm.cli.import_hf:run",
    preflight="mlm.cli.import_hf:preflight",
    positional=("source",),
    summary="import a Hugging Face GPT-2, BERT, Llama, Mistral or Qwen as a checkpoint",
    about=(
        "Reads config.json, safetensors and the tokenizer of a folder or a Hub id, and writes a "
        "checkpoint of weights: any layout trains, scores or samples it. The logits of `transformers` "
        "and ours are compared on the same tokens (needs the extra mlm[hf])."
    ),
    examples=(
        ("Import a GPT-2 of the Hub", "mlm import hf openai-community/gpt2 out=runs/gpt2"),
        ("From a folder", "mlm import hf models/gpt2 out=runs/gpt2"),
    ),
)
