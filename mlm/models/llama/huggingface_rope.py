"""Rotary settings in a config.json: rope_theta and rope_scaling, in newer versions rope_parameters."""

from collections.abc import Mapping
from typing import Any

from mlm.models.config import ModelConfig
from mlm.models.huggingface import JSON, show
from mlm.models.llama.settings import ROPE_TYPES, LlamaSettings

Options = dict[str, bool | int | float | str]

_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_THEIRS = {
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_positions",
    },
    "yarn": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original_positions",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "attention_factor": "rope_attention_factor",
        "truncate": "rope_truncate",
    },
}
"""Scaling -> key of `transformers` -> our setting."""
_WHOLE = ("rope_original_positions",)
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def read_rope(config: Mapping[str, JSON], path: str, found: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """Return our settings, and a line for each that is not supported."""
    names = ("rope_scaling", "rope_parameters")  # of both the first counts in `transformers` too
    name = next((key for key in names if config.get(key)), names[0])
    given = config.get(name) or {}
    if not isinstance(given, dict):
        return {}, [f"{path}: {name}={show(given)} is no object of settings"]
    scaling = given.get("rope_type", given.get("type", "default"))
    if scaling not in ROPE_TYPES:
        return {}, [
            f"{path}: {name}.rope_type={show(scaling)} is not supported; supported: {', '.join(ROPE_TYPES)}"
        ]
    theta: Any = given.get("rope_theta", config.get("rope_theta", 10000.0))
    fraction = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    problems = []
    if type(theta) not in (int, float) or not 1 < theta < 1 << 31:
        problems.append(f"{path}: rope_theta={show(theta)} must be a number above 1")
    if fraction not in (1.0, None):  # these four classes of theirs turn whole heads
        problems.append(
            f"{path}: partial_rotary_factor={show(fraction)} is not what theirs computes; supported: 1"
        )
    out: Options = {"rope_scaling": scaling}
    known = _THEIRS.get(scaling, {})
    for key in sorted(given.keys() - known.keys() - set(_COMMON)):
        if scaling != "default" and given[key] is not None:
            problems.append(
                f"{path}: {name}.{key}={show(given[key])} is not supported with {scaling}; remove it"
            )
    for key in _REQUIRED.get(scaling, ()):
        if key not in given:
            problems.append(f"{path}: {name}.{key} is missing, which {scaling} needs")
    for key, ours in known.items():
        value: Any = given.get(key)
        if value is None:
            continue
        if type(value) is bool and ours == "rope_truncate":
            out[ours] = value
        elif (
            type(value) not in (int, float)
            or not 0 < value < 1 << 31
            or (ours in _WHOLE and value != int(value))
        ):
            problems.append(f"{path}: {name}.{key}={show(value)} must be a number above 0")
        else:
            out[ours] = int(value) if ours in _WHOLE else float(value)
    if problems:
        return {}, problems
    out["rope_theta"] = float(theta)
    return out, []


def write_rope(model: ModelConfig, settings: LlamaSettings) -> dict[str, JSON]:
    """Return the keys of config.json, which old and new versions read."""
    scaling = settings.rope_scaling
    if scaling == "default":
        return {"rope_theta": settings.rope_theta, "rope_scaling": None}
    values: dict[str, JSON] = {"rope_type": scaling}
    for key, ours in _THEIRS[scaling].items():
        value = getattr(settings, ours)
        if ours != "rope_attention_factor" or value:
            values[key] = value
    return {"rope_theta": settings.rope_theta, "rope_scaling": values}
