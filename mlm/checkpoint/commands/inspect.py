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
from mlm.util.terminal import add_row, console, plain, size, table

MODEL_KEYS = ("kind", "num_layers", "hidden_size", "num_heads", "vocab_size")
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
    found = groups(manifest)
    return {
        "task": "ckpt inspect",
        "path": str(path),
        "format": FORMAT,
        "step": manifest.step,
        "consumed_samples": samples,
        "consumed_tokens": samples * length if type(samples) is type(length) is int else None,
        "weights_only": weights_only,
        "optimizer_state": any(name.startswith("optimizer.") for name in found),
        "missing": [
            key for key in TRAINING_KEYS if key not in state and not (weights_only and key != "config")
        ],
        "model": {key: dig(state, "config", "model", key) for key in MODEL_KEYS}
        | {"parameters": found["model"].elements if "model" in found else None},
        "layout": dig(state, "config", "parallel"),
        "resharded_to": dig(state, "reshard", "layout"),
        "loss_scale": dig(state, "scaler", "scale"),
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "dtypes": sorted({DTYPE_NAMES[entry.dtype] for entry in manifest.tensors.values()}),
        "groups": {name: asdict(group) for name, group in found.items()},
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
    found: dict[str, Group] = {}
    for name, entry in manifest.tensors.items():
        words = name.split(".")
        group = found.setdefault(".".join(words[: 2 if words[0] == "optimizer" else 1]), Group())
        group.tensors += 1
        group.elements += prod(entry.shape)
        group.bytes += prod(entry.shape) * entry.dtype.itemsize
        group.dtypes = tuple(sorted({*group.dtypes, DTYPE_NAMES[entry.dtype]}))
    return dict(sorted(found.items()))


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
    for name, said in facts_of(result).items():
        add_row(facts, name, said)
    out.print(facts)
    made = table("tensors by purpose", "", "tensors#", "elements#", "size#", "dtype")
    for name, group in result["groups"].items():
        add_row(made, name, *_counts(group), ", ".join(group["dtypes"]))
    out.print(made)
    made = table("files", "", "size#", "digest")
    for name, file in result["files"].items():
        add_row(made, name, size(file["bytes"]), file["digest"])
    out.print(made)
    if with_tensors:
        show_tensors(out, manifest)


def _counts(group: dict[str, Any]) -> tuple[str, str, str]:
    return f"{group['tensors']:,}", f"{group['elements']:,}", size(group["bytes"])


def facts_of(result: dict[str, Any]) -> dict[str, str]:
    """Name and value of facts listed once."""
    written_by, files = result["written_by"], len(result["files"])
    facts = {
        "step": f"{result['step']:,}",
        "seen": seen(result),
        "model": model_line(result["model"]),
        "trained at": layout_line(result["layout"]),
        "data": data_line(dig(result, "state", "data", "segments")),
        "made from": source_line(dig(result, "state", "source")),
        "resharded to": layout_line(result["resharded_to"]),
        "files": f"{files:,}, {size(result['bytes'])}",
        "dtypes": ", ".join(result["dtypes"]),
        "optimizer state": "yes" if result["optimizer_state"] else "no: weights alone",
        "loss scale": str(result["loss_scale"]),
        "written by": layout_line(written_by),
        "save id": result["save_id"],
        "digest": result["digest"],
        "missing": ", ".join(result["missing"]),
    }
    if result["missing"]:
        facts["missing"] += ": not the state of a training run"
    return {name: said for name, said in facts.items() if said and said != "None"}


def seen(result: dict[str, Any]) -> str:
    """Samples and tokens."""
    samples, tokens = result["consumed_samples"], result["consumed_tokens"]
    if type(samples) is not int:
        return ""
    return f"{samples:,} samples" + (f", {tokens:,} tokens" if tokens is not None else "")


def model_line(model: dict[str, Any]) -> str:
    """`gpt2, layers 12, hidden 768, heads 12, vocabulary 50257, parameters 124,439,808`, as far as known."""
    words = {"num_layers": "layers {}", "hidden_size": "hidden {}", "num_heads": "heads {}"}
    words |= {"kind": "{}", "vocab_size": "vocabulary {}"}
    said = [words[key].format(model[key]) for key in MODEL_KEYS if model[key] is not None]
    if model["parameters"] is not None:
        said.append(f"parameters {model['parameters']:,}")
    return ", ".join(said)


def data_line(said: JSON) -> str:
    """Name and share of each corpus of the newest blend: `wiki 30.00%, web 70.00% since sample 4,096`."""
    newest = said[-1] if isinstance(said, list) and said else None
    sources, begin = dig(newest, "sources"), dig(newest, "from_sample")
    shares = [(dig(s, "name"), dig(s, "weight")) for s in (sources if isinstance(sources, list) else [])]
    line = ", ".join(f"{name} {share:.2%}" for name, share in shares if isinstance(share, float))
    return f"{line} since sample {begin:,}" if line and isinstance(begin, int) and begin else line


def source_line(said: JSON) -> str:
    """Source of an imported checkpoint: `megatron gpt2_345m, iteration 500,000`."""
    if said is None:
        return ""
    iteration = dig(said, "iteration")
    line = " ".join(str(dig(said, key)) for key in ("kind", "name"))
    return f"{line}, iteration {iteration:,}" if type(iteration) is int else line


def layout_line(said: JSON) -> str:
    """{"tp": 2, "pp": 1} as `tp=2 pp=1`."""
    if not isinstance(said, dict):
        return "" if said is None else str(said)
    ordered = sorted(said.items(), key=lambda item: FIRST.index(item[0]) if item[0] in FIRST else len(FIRST))
    return " ".join(f"{key}={str(value).lower()}" for key, value in ordered if value is not None)


def show_tensors(out: Console, manifest: Manifest) -> None:
    """Return a table of every tensor, its split and the files of its pieces."""
    made = table("tensors", "", "shape", "dtype", "cut", "pieces")
    for name, entry in manifest.tensors.items():
        where = [
            f"{chunk.file.removesuffix('.safetensors')}{describe(chunk.region)}" for chunk in entry.chunks
        ]
        shown = where if len(where) <= 4 else [*where[:2], f"… {len(where) - 3} more …", where[-1]]
        add_row(made, name, list(entry.shape), DTYPE_NAMES[entry.dtype], cut(entry), plain(", ".join(shown)))
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
