"""`mlm export dcp`: a checkpoint as a folder that torch.distributed.checkpoint loads."""

from dataclasses import dataclass
from typing import Literal

from mlm.cli.command import Command
from mlm.cli.convert import run as convert
from mlm.config.fields import CheckpointPath, OutFolder
from mlm.convert.config import ConvertConfig, DType


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportDCPConfig:
    """The run spec of `mlm export dcp`: a folder that torch.distributed.checkpoint loads."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    out: OutFolder
    """Folder to write: .metadata, __0_0.distcp, …"""
    names: Literal["torchtitan", "megatron"] = "torchtitan"
    """Names and order of rows: torchtitan's (of Llama 3 and Qwen 3), or Megatron Core's."""
    dtype: DType = "float32"
    """Numbers to write."""


def preflight(config: ExportDCPConfig) -> list[str]:
    """Return what is wrong with the checkpoint, the settings and `out`; no tensor is read."""
    from mlm.convert import conversion

    return conversion.preflight(conversion_of(config))


def run(config: ExportDCPConfig) -> None:
    """Export the checkpoint and print a table. Raises UserError; what is whole is kept then."""
    convert(conversion_of(config))


def conversion_of(config: ExportDCPConfig) -> ConvertConfig:
    """Return the conversion that the command is."""
    return ConvertConfig(
        source=config.ckpt,
        out=config.out,
        to="megatron_dcp" if config.names == "megatron" else "torchtitan",
        dtype=config.dtype,
    )


EXPORT_DCP = Command(
    words=("export", "dcp"),
    spec=ExportDCPConfig,
    target="mlm.cli.export_dcp:run",
    preflight="mlm.cli.export_dcp:preflight",
    positional=("ckpt",),
    summary="export a checkpoint as a folder that torch.distributed.checkpoint loads",
    about="Writes weights under torchtitan's or Megatron Core's names. Reads them again.",
    examples=(("Export a Llama for torchtitan", "mlm export dcp runs/llama out=for_torchtitan"),),
)
