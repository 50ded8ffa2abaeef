"""`mlm ckpt inspect`: what is in a checkpoint, from its manifest alone."""

from dataclasses import dataclass
from typing import Any

from mlm.cli.command import Command, check_out_file
from mlm.config.fields import CheckpointPath, ResultFile

LAYOUT_KEYS = ("tp", "pp", "vp", "dp", "cp", "ep", "zero")


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptInspectConfig:
    """The run spec of `mlm ckpt inspect`: what is in a checkpoint, from its manifest alone."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    tensors: bool = False
    """List every tensor with its shape, dtype and pieces, optimizer state too."""
    out: ResultFile | None = None
    """JSON file for all of it; null writes none."""


def run(config: CkptInspectConfig) -> None:
    """Print tables, write `out`.

    Raises UserError when there is no checkpoint, CorruptFileError when its manifest is damaged.
    """
    from mlm.checkpoint.native.folders import best_note, resolve
    from mlm.checkpoint.native.format import read_manifest
    from mlm.checkpoint.native.inspection import checkpoint_facts
    from mlm.cli.result import write_result
    from mlm.util.terminal import console

    path = resolve(config.ckpt)
    result = checkpoint_facts(path, read_manifest(path))
    if config.out is not None:
        write_result(config.out, result)
    show(result, with_tensors=config.tensors)
    if note := best_note(config.ckpt, path):
        console().print(f"note: {note}")


def show(result: dict[str, Any], *, with_tensors: bool) -> None:
    """Print the tables."""
    from mlm.util.terminal import add_row, console, format_bytes, one_line, table

    out = console()
    facts = table(f"ckpt inspect · {result['path']}", "", "")
    for name, fact in facts_of(result).items():
        add_row(facts, name, fact)
    out.print(facts)
    made = table("tensors by purpose", "", "tensors#", "elements#", "size#", "dtype")
    for name, group in result["groups"].items():
        counts = f"{group['tensors']:,}", f"{group['elements']:,}", format_bytes(group["bytes"])
        add_row(made, name, *counts, ", ".join(group["dtypes"]))
    out.print(made)
    made = table("files", "", "size#", "digest")
    for name, file in result["files"].items():
        add_row(made, name, format_bytes(file["bytes"]), file["digest"])
    out.print(made)
    if not with_tensors:
        return
    made = table("tensors", "", "shape", "dtype", "split", "pieces")
    for name, tensor in result["tensors"].items():
        pieces = [f"{file.removesuffix('.safetensors')}{region}" for file, region in tensor["pieces"].items()]
        shown = pieces if len(pieces) <= 4 else [*pieces[:3], f"… {len(pieces) - 3} more"]
        split = split_text(**tensor["split"])
        add_row(made, name, tensor["shape"], tensor["dtype"], split, one_line(", ".join(shown)))
    out.print(made)


def facts_of(result: dict[str, Any]) -> dict[str, str]:
    """Return name and value of facts listed once; those that the checkpoint does not record are left out."""
    from mlm.checkpoint.native.inspection import dig
    from mlm.util.terminal import format_bytes

    source = dig(result, "state", "source")
    has_moments = any(name.startswith("optimizer.") for name in result["groups"])
    facts = {
        "step": f"{result['step']:,}",
        "samples": number_text(result["consumed_samples"]),
        "tokens": number_text(result["consumed_tokens"]),
        "model": settings_text(result["model"]),
        "trained at": settings_text({key: dig(result["layout"], key) for key in LAYOUT_KEYS}),
        "data": data_text(dig(result, "state", "data", "segments")),
        "made from": settings_text({key: dig(source, key) for key in ("kind", "name", "iteration")}),
        "resharded to": settings_text(result["resharded_to"]),
        "files": f"{len(result['files']):,}, {format_bytes(result['bytes'])}",
        "optimizer state": "yes" if has_moments else "no: weights alone",
        "loss scale": "" if result["loss_scale"] is None else str(result["loss_scale"]),
        "written by": settings_text(result["written_by"]),
        "save id": result["save_id"],
        "digest": result["digest"],
    }
    return {name: fact for name, fact in facts.items() if fact}


def number_text(value: Any) -> str:
    """Return a whole number; empty for anything else."""
    return f"{value:,}" if type(value) is int else ""


def settings_text(settings: Any) -> str:
    """{"tp": 2, "pp": 1} as `tp=2 pp=1`."""
    if not isinstance(settings, dict):
        return "" if settings is None else str(settings)
    return " ".join(f"{key}={value}" for key, value in settings.items() if value is not None)


def data_text(segments: Any) -> str:
    """Name and share of each corpus of the newest blend: `wiki 30.00%, web 70.00%`."""
    from mlm.checkpoint.native.inspection import dig

    sources = dig(segments[-1], "sources") if isinstance(segments, list) and segments else None
    shares = [(dig(s, "name"), dig(s, "weight")) for s in (sources if isinstance(sources, list) else [])]
    return ", ".join(f"{name} {share:.2%}" for name, share in shares if isinstance(share, float))


def split_text(tp_dim: int | None, stage: int | str, multiple: int) -> str:
    """Return `dim 0 over tp, layer 3`: the split of a tensor over layouts."""
    over = "whole on each tp rank" if tp_dim is None else f"dim {tp_dim} over tp"
    if multiple > 1:
        over += f" by {multiple} rows"
    return f"{over}, {f'layer {stage}' if isinstance(stage, int) else f'{stage} stage'}"


INSPECT = Command(
    words=("ckpt", "inspect"),
    also=("checkpoint",),
    spec=CkptInspectConfig,
    target="mlm.cli.ckpt.inspect:run",
    local_check=check_out_file,
    positional=("ckpt",),
    summary="show a checkpoint: step, tokens, model, layout, tensors, files, configuration",
    about="Reads the manifest of a checkpoint, no tensor.",
    examples=(
        ("Describe the latest checkpoint of a run", "mlm ckpt inspect runs/shakespeare"),
        ("Every tensor of one", "mlm ckpt inspect runs/shakespeare/checkpoints/step-00000900 --tensors"),
    ),
)
