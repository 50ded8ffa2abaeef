"""`mlm ckpt inspect`: what is in a checkpoint, from its manifest alone."""

from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.folders import best_note
from mlm.checkpoint.native.format import DTYPE_NAMES, FORMAT, JSON, Manifest, TensorEntry, read_manifest
from mlm.checkpoint.native.save_load import resolve
from mlm.checkpoint.native.slices import describe
from mlm.cli.conversion_settings import CkptInspectConfig
from mlm.cli.result import versions, write_result
from mlm.util.terminal import add_row, console, format_bytes, one_line, table

MODEL_KEYS = ("kind", "num_layers", "hidden_size", "num_heads", "vocab_size")
LAYOUT_KEYS = ("tp", "pp", "vp", "dp", "cp", "ep", "zero")


@dataclass
class Group:
    """Tensors of one purpose: "model", "optimizer.exp_avg"."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    dtypes: tuple[str, ...] = ()


def run(config: CkptInspectConfig) -> None:
    """Print tables, write `out`.

    Raises UserError when there is no checkpoint, CorruptFileError when its manifest is damaged.
    """
    path = resolve(config.ckpt)
    manifest = read_manifest(path)
    result = result_of(path, manifest)
    if config.out is not None:
        write_result(config.out, result)
    show(result, manifest, with_tensors=config.tensors)
    if note := best_note(config.ckpt, path):
        console().print(f"note: {note}")


def result_of(path: Path, manifest: Manifest) -> dict[str, Any]:
    """All facts for machines; null where the checkpoint does not record one."""
    state, grouped = manifest.state, groups(manifest)
    samples, length = dig(state, "consumed_samples"), dig(state, "config", "data", "seq_length")
    parameters = grouped["model"].elements if "model" in grouped else None
    return {
        "task": "ckpt inspect",
        "path": str(path),
        "format": FORMAT,
        "step": manifest.step,
        "consumed_samples": samples,
        "consumed_tokens": samples * length if type(samples) is type(length) is int else None,
        "model": {key: dig(state, "config", "model", key) for key in MODEL_KEYS} | {"parameters": parameters},
        "layout": dig(state, "config", "parallel"),
        "resharded_to": dig(state, "reshard", "layout"),
        "loss_scale": dig(state, "scaler", "scale"),
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "groups": {name: asdict(group) for name, group in grouped.items()},
        "files": {name: asdict(file) for name, file in sorted(manifest.files.items())},
        "tensors": {name: _tensor(entry) for name, entry in manifest.tensors.items()},
        "state": {key: value for key, value in state.items() if key not in ("config", "versions")},
        "config": state.get("config"),
        "written_by": state.get("versions"),
        "save_id": manifest.save_id,
        "digest": manifest.digest,
        "versions": versions(),
    }


def dig(value: JSON, *keys: str) -> JSON:
    """value[key][key]…; None where one is not there, for a state may be anything."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def groups(manifest: Manifest) -> dict[str, Group]:
    """Tensors by purpose: `optimizer.exp_avg.X` belongs to optimizer.exp_avg, `model.X` to model."""
    grouped: dict[str, Group] = {}
    for name, entry in manifest.tensors.items():
        words = name.split(".")
        group = grouped.setdefault(".".join(words[: 2 if words[0] == "optimizer" else 1]), Group())
        group.tensors += 1
        group.elements += prod(entry.shape)
        group.bytes += entry.num_bytes
        group.dtypes = tuple(sorted({*group.dtypes, DTYPE_NAMES[entry.dtype]}))
    return dict(sorted(grouped.items()))


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    return {
        "shape": list(entry.shape),
        "dtype": DTYPE_NAMES[entry.dtype],
        "split": asdict(entry.split),
        "pieces": {chunk.file: describe(chunk.region) for chunk in entry.chunks},
    }


def show(result: dict[str, Any], manifest: Manifest, *, with_tensors: bool) -> None:
    """Print the tables."""
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
    for name, entry in manifest.tensors.items():
        pieces = [
            f"{chunk.file.removesuffix('.safetensors')}{describe(chunk.region)}" for chunk in entry.chunks
        ]
        shown = pieces if len(pieces) <= 4 else [*pieces[:3], f"… {len(pieces) - 3} more"]
        cells = list(entry.shape), DTYPE_NAMES[entry.dtype], split_text(entry), one_line(", ".join(shown))
        add_row(made, name, *cells)
    out.print(made)


def facts_of(result: dict[str, Any]) -> dict[str, str]:
    """Name and value of facts listed once; those that the checkpoint does not record are left out."""
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


def number_text(value: JSON) -> str:
    """A whole number; empty for anything else."""
    return f"{value:,}" if type(value) is int else ""


def settings_text(settings: JSON) -> str:
    """{"tp": 2, "pp": 1} as `tp=2 pp=1`."""
    if not isinstance(settings, dict):
        return "" if settings is None else str(settings)
    return " ".join(f"{key}={value}" for key, value in settings.items() if value is not None)


def data_text(segments: JSON) -> str:
    """Name and share of each corpus of the newest blend: `wiki 30.00%, web 70.00%`."""
    sources = dig(segments[-1], "sources") if isinstance(segments, list) and segments else None
    shares = [(dig(s, "name"), dig(s, "weight")) for s in (sources if isinstance(sources, list) else [])]
    return ", ".join(f"{name} {share:.2%}" for name, share in shares if isinstance(share, float))


def split_text(entry: TensorEntry) -> str:
    """`dim 0 over tp, layer 3`: the split of a tensor over layouts."""
    dim, stage = entry.split.tp_dim, entry.split.stage
    over = "whole on each tp rank" if dim is None else f"dim {dim} over tp"
    if entry.split.multiple > 1:
        over += f" by {entry.split.multiple} rows"
    return f"{over}, {f'layer {stage}' if isinstance(stage, int) else f'{stage} stage'}"
