"""`mlm ckpt inspect`: what is in a checkpoint, from its manifest alone."""

from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console

from mlm.checkpoint.commands.config import CkptInspectConfig
from mlm.checkpoint.commands.result import versions, write_result
from mlm.checkpoint.native.folders import best_note
from mlm.checkpoint.native.format import DTYPE_NAMES, FORMAT, JSON, Manifest, TensorEntry, read_manifest
from mlm.checkpoint.native.save_load import resolve
from mlm.checkpoint.native.slices import describe
from mlm.util.terminal import add_row, console, format_bytes, one_line, table

MODEL_KEYS = ("kind", "num_layers", "hidden_size", "num_heads", "vocab_size")
MODEL_FACTS = ("{}", "layers {}", "hidden {}", "heads {}", "vocabulary {}", "parameters {:,}")
FIRST = ("tp", "pp", "vp", "dp")  # of a layout's keys
TRAINING_KEYS = ("config", "consumed_samples", "applied_steps", "scaler")
"""Keys of the state of a training run."""


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
    state = manifest.state
    weights_only = state.get("weights_only") is True
    samples, length = dig(state, "consumed_samples"), dig(state, "config", "data", "seq_length")
    grouped = groups(manifest)
    return {
        "task": "ckpt inspect",
        "path": str(path),
        "format": FORMAT,
        "step": manifest.step,
        "consumed_samples": samples,
        "consumed_tokens": samples * length if type(samples) is type(length) is int else None,
        "weights_only": weights_only,
        "optimizer_state": any(name.startswith("optimizer.") for name in grouped),
        "missing": [
            key for key in TRAINING_KEYS if key not in state and not (weights_only and key != "config")
        ],
        "model": {key: dig(state, "config", "model", key) for key in MODEL_KEYS}
        | {"parameters": grouped["model"].elements if "model" in grouped else None},
        "layout": dig(state, "config", "parallel"),
        "resharded_to": dig(state, "reshard", "layout"),
        "loss_scale": dig(state, "scaler", "scale"),
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "dtypes": sorted({DTYPE_NAMES[entry.dtype] for entry in manifest.tensors.values()}),
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
        group.bytes += prod(entry.shape) * entry.dtype.itemsize
        group.dtypes = tuple(sorted({*group.dtypes, DTYPE_NAMES[entry.dtype]}))
    return dict(sorted(grouped.items()))


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    return {
        "shape": list(entry.shape),
        "dtype": DTYPE_NAMES[entry.dtype],
        "split": entry.split and asdict(entry.split),
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
    if with_tensors:
        show_tensors(out, manifest)


def facts_of(result: dict[str, Any]) -> dict[str, str]:
    """Name and value of facts listed once; those that the checkpoint does not record are left out."""
    samples, tokens, missing = (result[key] for key in ("consumed_samples", "consumed_tokens", "missing"))
    source = dig(result, "state", "source")
    facts = {
        "step": f"{result['step']:,}",
        "seen": joined({"{:,} samples": samples, "{:,} tokens": tokens}),
        "model": joined(dict(zip(MODEL_FACTS, result["model"].values(), strict=True))),
        "trained at": layout_line(result["layout"]),
        "data": data_line(dig(result, "state", "data", "segments")),
        "made from": " ".join(str(dig(source, key)) for key in ("kind", "name") if source is not None),
        "iteration": joined({"{:,}": dig(source, "iteration")}),
        "resharded to": layout_line(result["resharded_to"]),
        "files": f"{len(result['files']):,}, {format_bytes(result['bytes'])}",
        "dtypes": ", ".join(result["dtypes"]),
        "optimizer state": "yes" if result["optimizer_state"] else "no: weights alone",
        "loss scale": "" if result["loss_scale"] is None else str(result["loss_scale"]),
        "written by": layout_line(result["written_by"]),
        "save id": result["save_id"],
        "digest": result["digest"],
        "missing": missing and f"{', '.join(missing)}: not the state of a training run",
    }
    return {name: fact for name, fact in facts.items() if fact}


def joined(facts: dict[str, JSON]) -> str:
    """Numbers and words by their format, those that are known: `24 samples, 384 tokens`."""
    known = [
        form.format(value)
        for form, value in facts.items()
        if type(value) is int or (isinstance(value, str) and ":," not in form)
    ]
    return ", ".join(known)


def data_line(segments: JSON) -> str:
    """Name and share of each corpus of the newest blend: `wiki 30.00%, web 70.00% since sample 4,096`."""
    newest = segments[-1] if isinstance(segments, list) and segments else None
    sources, begin = dig(newest, "sources"), dig(newest, "from_sample")
    shares = [(dig(s, "name"), dig(s, "weight")) for s in (sources if isinstance(sources, list) else [])]
    line = ", ".join(f"{name} {share:.2%}" for name, share in shares if isinstance(share, float))
    return f"{line} since sample {begin:,}" if line and isinstance(begin, int) and begin else line


def layout_line(layout: JSON) -> str:
    """{"tp": 2, "pp": 1} as `tp=2 pp=1`."""
    if not isinstance(layout, dict):
        return "" if layout is None else str(layout)
    keys = sorted(layout, key=[*FIRST, *layout].index)
    return " ".join(f"{key}={str(layout[key]).lower()}" for key in keys if layout[key] is not None)


def show_tensors(out: Console, manifest: Manifest) -> None:
    """Return a table of every tensor, its split and the files of its pieces."""
    made = table("tensors", "", "shape", "dtype", "cut", "pieces")
    for name, entry in manifest.tensors.items():
        where = [
            f"{chunk.file.removesuffix('.safetensors')}{describe(chunk.region)}" for chunk in entry.chunks
        ]
        shown = where if len(where) <= 4 else [*where[:2], f"… {len(where) - 3} more …", where[-1]]
        add_row(
            made, name, list(entry.shape), DTYPE_NAMES[entry.dtype], cut(entry), one_line(", ".join(shown))
        )
    out.print(made)


def cut(entry: TensorEntry) -> str:
    """`dim 0 over tp, layer 3`: the split of a tensor over layouts."""
    if entry.split is None:
        return "not recorded"
    dim, stage = entry.split.tp_dim, entry.split.stage
    over = "whole on each tp rank" if dim is None else f"dim {dim} over tp"
    if entry.split.multiple > 1:
        over += f" by {entry.split.multiple} rows"
    return f"{over}, {f'layer {stage}' if isinstance(stage, int) else f'{stage} stage'}"
