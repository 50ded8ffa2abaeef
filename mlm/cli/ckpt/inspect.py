"""`mlm ckpt inspect`: what is in a checkpoint, from its manifest alone."""

from typing import Any

from mlm.checkpoint.native.folders import best_note, resolve
from mlm.checkpoint.native.format import read_manifest
from mlm.checkpoint.native.inspection import checkpoint_facts, dig
from mlm.cli.ckpt.settings import CkptInspectConfig
from mlm.cli.result import write_result
from mlm.util.terminal import add_row, console, format_bytes, one_line, table

LAYOUT_KEYS = ("tp", "pp", "vp", "dp", "cp", "ep", "zero")


def run(config: CkptInspectConfig) -> None:
    """Print tables, write `out`.

    Raises UserError when there is no checkpoint, CorruptFileError when its manifest is damaged.
    """
    path = resolve(config.ckpt)
    result = checkpoint_facts(path, read_manifest(path))
    if config.out is not None:
        write_result(config.out, result)
    out = console()
    facts = table(f"ckpt inspect · {result['path']}", "", "")
    for name, fact in facts_of(result).items():
        if fact:
            add_row(facts, name, fact)
    out.print(facts)
    groups = table("tensors by purpose", "", "tensors#", "elements#", "size#", "dtype")
    for name, group in result["groups"].items():
        counts = f"{group['tensors']:,}", f"{group['elements']:,}", format_bytes(group["bytes"])
        add_row(groups, name, *counts, ", ".join(group["dtypes"]))
    out.print(groups)
    files = table("files", "", "size#", "digest")
    for name, file in result["files"].items():
        add_row(files, name, format_bytes(file["bytes"]), file["digest"])
    out.print(files)
    if config.tensors:
        tensors = table("tensors", "", "shape", "dtype", "split", "pieces")
        for name, tensor in result["tensors"].items():
            pieces = [f"{f.removesuffix('.safetensors')}{region}" for f, region in tensor["pieces"].items()]
            shown = pieces if len(pieces) <= 4 else [*pieces[:3], f"… {len(pieces) - 3} more"]
            tp_dim, stage, multiple = (tensor["split"][key] for key in ("tp_dim", "stage", "multiple"))
            split = "whole on each tp rank" if tp_dim is None else f"dim {tp_dim} over tp"
            split += f" by {multiple} rows" if multiple > 1 else ""
            split += f", layer {stage}" if isinstance(stage, int) else f", {stage} stage"
            add_row(tensors, name, tensor["shape"], tensor["dtype"], split, one_line(", ".join(shown)))
        out.print(tensors)
    if note := best_note(config.ckpt, path):
        out.print(f"note: {note}")


def facts_of(result: dict[str, Any]) -> dict[str, str]:
    """Printed facts of a checkpoint by name; empty if its manifest lacks one."""
    source = dig(result, "state", "source")
    samples, tokens = (
        f"{count:,}" if type(count) is int else ""
        for count in (result["consumed_samples"], result["consumed_tokens"])
    )
    # of the newest blend: name and share of each corpus
    segments = dig(result, "state", "data", "segments")
    corpora = dig(segments[-1], "sources") if isinstance(segments, list) and segments else None
    shares = [(dig(c, "name"), dig(c, "weight")) for c in (corpora if isinstance(corpora, list) else [])]
    has_moments = any(name.startswith("optimizer.") for name in result["groups"])
    return {
        "step": f"{result['step']:,}",
        "samples": samples,
        "tokens": tokens,
        "model": settings_text(result["model"]),
        "trained at": settings_text({key: dig(result["layout"], key) for key in LAYOUT_KEYS}),
        "data": ", ".join(f"{name} {share:.2%}" for name, share in shares if isinstance(share, float)),
        "made from": settings_text({key: dig(source, key) for key in ("kind", "name", "iteration")}),
        "resharded to": settings_text(result["resharded_to"]),
        "files": f"{len(result['files']):,}, {format_bytes(result['bytes'])}",
        "optimizer state": "yes" if has_moments else "no: weights alone",
        "loss scale": "" if result["loss_scale"] is None else str(result["loss_scale"]),
        "written by": settings_text(result["written_by"]),
        "save id": result["save_id"],
        "digest": result["digest"],
    }


def settings_text(settings: Any) -> str:
    """{"tp": 2, "pp": 1} as `tp=2 pp=1`."""
    if not isinstance(settings, dict):
        return "" if settings is None else str(settings)
    return " ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
