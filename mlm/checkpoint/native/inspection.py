"""Facts of a checkpoint, from its manifest alone."""

from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.format import DTYPE_NAMES, FORMAT, JSON, Manifest
from mlm.checkpoint.native.slices import describe

MODEL_KEYS = ("kind", "num_layers", "hidden_size", "num_heads", "vocab_size")


@dataclass
class TensorGroup:
    """Tensors of one purpose: "model", "optimizer.exp_avg"."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    dtypes: tuple[str, ...] = ()


def checkpoint_facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return all facts as JSON; null where the checkpoint does not record one."""
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
        "tensors": {
            name: {
                "shape": list(entry.shape),
                "dtype": DTYPE_NAMES[entry.dtype],
                "split": asdict(entry.split),
                "pieces": {chunk.file: describe(chunk.region) for chunk in entry.chunks},
            }
            for name, entry in manifest.tensors.items()
        },
        "state": {key: value for key, value in state.items() if key not in ("config", "versions")},
        "config": state.get("config"),
        "written_by": state.get("versions"),
        "save_id": manifest.save_id,
        "digest": manifest.digest,
    }


def dig(value: JSON, *keys: str) -> JSON:
    """Return value[key][key]…; None if a key is absent, as the state is not validated."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def groups(manifest: Manifest) -> dict[str, TensorGroup]:
    """Group tensors by purpose: `optimizer.exp_avg.X` belongs to optimizer.exp_avg, `model.X` to model."""
    grouped: dict[str, TensorGroup] = {}
    for name, entry in manifest.tensors.items():
        words = name.split(".")
        group = grouped.setdefault(".".join(words[: 2 if words[0] == "optimizer" else 1]), TensorGroup())
        group.tensors += 1
        group.elements += prod(entry.shape)
        group.bytes += entry.num_bytes
        group.dtypes = tuple(sorted({*group.dtypes, DTYPE_NAMES[entry.dtype]}))
    return dict(sorted(grouped.items()))
