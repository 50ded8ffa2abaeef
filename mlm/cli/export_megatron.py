"""`mlm export megatron`: a checkpoint that Megatron-LM starts from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from mlm.cli.command import Command
from mlm.cli.convert import run as convert
from mlm.config.fields import CheckpointPath, OnlyIf, OutFolder
from mlm.convert.config import ConvertConfig, DType
from mlm.parallel.config import PipelineSize, TensorSize


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportMegatronConfig:
    """The run spec of `mlm export megatron`: a checkpoint that Megatron-LM starts from."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    out: OutFolder
    """Folder to write, for --load: release/ and latest_checkpointed_iteration.txt."""
    format: Literal["torch_dist", "torch"] = "torch_dist"
    """torch_dist loads at any layout; torch is the classic one, of a file per rank."""
    tp: Annotated[TensorSize, OnlyIf("format", "torch")] = 1
    """Tensor-parallel size of format=torch."""
    pp: Annotated[PipelineSize, OnlyIf("format", "torch")] = 1
    """Pipeline-parallel size of format=torch."""
    dtype: DType = "float32"
    """Numbers to write."""


def preflight(config: ExportMegatronConfig) -> list[str]:
    """Return what is wrong with the checkpoint, the settings and `out`; no tensor is read."""
    from mlm.convert import conversion

    return conversion.preflight(conversion_of(config))


def run(config: ExportMegatronConfig) -> None:
    """Export the checkpoint and print a table. Raises UserError; what is whole is kept then."""
    convert(conversion_of(config))


def conversion_of(config: ExportMegatronConfig) -> ConvertConfig:
    """Return the conversion that the command is."""
    return ConvertConfig(
        source=config.ckpt, out=config.out, to=config.format, dtype=config.dtype, tp=config.tp, pp=config.pp
    )


EXPORT_MEGATRON = Command(
    words=("export", "megatron"),
    spec=ExportMegatronConfig,
    target="mlm.cli.export_megatron:run",
    preflight="mlm.cli.export_megatron:preflight",
    positional=("ckpt",),
    summary="export a checkpoint for Megatron-LM, as torch_dist or as classic rank files",
    about="Writes weights under Megatron Core's names, and the arguments of the model. Reads them again.",
    examples=(("Export a run's latest checkpoint", "mlm export megatron runs/shakespeare out=for_megatron"),),
)
