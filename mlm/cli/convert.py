"""`mlm convert`: a checkpoint of any format as one of any other."""

from mlm.cli.command import Command
from mlm.convert.config import ConvertConfig


def run(config: ConvertConfig) -> None:
    """Read, write, compare, publish, and print a table. Raises UserError; what is whole is kept then."""
    from mlm.cli.result import model_columns, show_table
    from mlm.convert.conversion import convert

    source, notes, line = convert(config)
    title = f"convert · {config.source} · {source.format} to {config.to}, {config.dtype}"
    show_table(title, model_columns(source.model), notes, line, f"written to {config.out}")


CONVERT = Command(
    words=("convert",),
    spec=ConvertConfig,
    target="mlm.cli.convert:run",
    preflight="mlm.convert.conversion:preflight",
    positional=("source", "out"),
    summary="convert checkpoints between mlm, transformers, Megatron-LM and torchtitan",
    about=(
        "Reads a checkpoint of any of these and writes it as any other, a tensor at a time, without "
        "running what is in it. Every parameter and the settings of the model are compared with the source "
        "before the folder gets its name. Interrupted, the same command continues."
    ),
    examples=(
        ("A model of transformers for Megatron-LM", "mlm convert models/llama ckpt/llama to=torch_dist"),
        ("And back", "mlm convert ckpt/llama models/llama-back to=hf"),
        (
            "A checkpoint of torchtitan, which records no model",
            "mlm convert outputs/step-1000 runs/llama config=models/llama",
        ),
    ),
)
