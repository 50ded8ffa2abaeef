"""Rotary settings in a config.json: rope_theta and rope_scaling, in newer versions rope_parameters.

Precedence of keys, defaults and null are as in `transformers` (modeling_rope_utils.py,
standardize_rope_params).
"""

import math
from collections.abc import Mapping
from typing import Any

from mlm.config.fields import Options
from mlm.convert.huggingface.mapping import JSON, show
from mlm.models.llama.settings import ROPE_TYPES, LlamaSettings
from mlm.util.errors import ConfigError

_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_ORIGINAL = "original_max_position_embeddings"
_THEIRS = {
    "linear": {"factor": "rope_factor"},
    "dynamic": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        _ORIGINAL: "rope_original_positions",
    },
    "yarn": {
        "factor": "rope_factor",
        _ORIGINAL: "rope_original_positions",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "attention_factor": "rope_attention_factor",
        "truncate": "rope_truncate",
    },
    "longrope": {
        "factor": "rope_factor",
        _ORIGINAL: "rope_original_positions",
        "attention_factor": "rope_attention_factor",
        "short_factor": "rope_short_factors",
        "long_factor": "rope_long_factors",
    },
}
"""Scaling -> key of `transformers` -> model.options."""
_REQUIRED = ("factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor")
_LISTS = ("short_factor", "long_factor")
_BETAS = ("beta_fast", "beta_slow")
_MSCALES = ("mscale", "mscale_all_dim")
"""Keys of yarn: weights of the temperature's logarithm, whose ratio is an attention_factor (DeepSeek-V2)."""


def read_rope(
    config: Mapping[str, JSON],
    path: str,
    positions: int,
    usual_theta: float = 10000.0,
    usual_fraction: float | None = None,
    *,
    sliding_theta: float | None = None,
    scales_scores: bool = False,
) -> Options:
    """Return the rotary options. Raises ConfigError for unsupported settings.

    `positions` is the length of the full context, `sliding_theta` the default base of layers with a window if
    they have separate settings. Without `usual_fraction` full heads are rotated. With `scales_scores`
    mscale_all_dim scales the scores too, as in DeepSeek-V3.
    """
    if sliding_theta is not None:
        return _read_by_type(config, path, positions, usual_theta, sliding_theta)
    keys = ("rope_scaling", "rope_parameters")  # the first counts, as in `transformers`
    source_key = next((key for key in keys if config.get(key) not in (None, {})), keys[0])
    parameters = config.get(source_key)
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, dict):
        raise ConfigError([f"{path}: {source_key}={show(parameters)} is not an object of settings"])
    if nested := [key for key, value in parameters.items() if isinstance(value, dict)]:
        key = f"{source_key}.{show(nested[0])}"
        raise ConfigError([f"{path}: {key}: settings of some layers alone are not supported"])
    scaling = parameters.get("rope_type", parameters.get("type", "default"))
    scaling = "longrope" if scaling == "su" else scaling  # its first name
    if scaling not in ROPE_TYPES:
        supported, key = ", ".join(ROPE_TYPES), f"{source_key}.rope_type={show(scaling)}"
        raise ConfigError([f"{path}: {key} is not supported; supported: {supported}"])
    theta: Any = parameters.get("rope_theta", config.get("rope_theta", usual_theta))
    if not _is_number(theta):
        raise ConfigError([f"{path}: rope_theta={show(theta)} must be a number above 0"])
    usual = 1.0 if usual_fraction is None else usual_fraction
    fraction: Any = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", usual))
    key = f"partial_rotary_factor={show(fraction)}"
    if usual_fraction is None and fraction not in (1.0, None):
        raise ConfigError([f"{path}: {key} is not what theirs computes; supported: 1"])
    if usual_fraction is not None and not (_is_number(fraction) and fraction <= 1):
        raise ConfigError([f"{path}: {key} must be a number above 0 and at most 1"])
    options: Options = {
        "rotary_fraction": 1.0 if fraction is None else float(fraction),
        "rope_scaling": scaling,
        "rope_theta": float(theta),
    }
    if scaling != "default":
        resolved = _resolved(scaling, parameters, config, positions)
        options |= _read_scaling(scaling, resolved, f"{path}: {source_key}")
        if scales_scores and _is_number(parameters.get("mscale_all_dim")):
            options["rope_mscale"] = float(parameters["mscale_all_dim"])
    return options


def _read_by_type(
    config: Mapping[str, JSON], path: str, positions: int, usual_theta: float, sliding_theta: float
) -> Options:
    """Return options for full and sliding layers, as in Gemma 3: only full layers may be scaled."""
    names = ("full_attention", "sliding_attention")
    by_type, scaling = (
        {} if (value := config.get(key)) is None else value for key in ("rope_parameters", "rope_scaling")
    )
    is_split = isinstance(by_type, dict) and not by_type.keys() - {*names}
    parts: list[Any] = [None]
    if is_split:
        parts = [{} if (part := by_type.get(name)) is None else part for name in names]
    if not isinstance(scaling, dict):
        raise ConfigError([f"{path}: rope_scaling={show(scaling)} is not an object of settings"])
    if not all(isinstance(part, dict) for part in parts):
        key = f"rope_parameters={show(by_type)}"
        raise ConfigError([f"{path}: {key}: give settings of {' and '.join(names)}"])
    full, sliding = parts[0] | scaling, parts[1]
    full = {"rope_theta": config.get("rope_theta", usual_theta), **full}
    sliding = {"rope_theta": config.get("rope_local_base_freq", sliding_theta), **sliding}
    flat = {key: value for key, value in config.items() if key != "rope_scaling"}
    options = read_rope(flat | {"rope_parameters": full}, path, positions)
    if sliding == full:
        return options
    plain = read_rope({"rope_parameters": sliding}, path, positions)
    if plain["rope_scaling"] != "default":
        key = f"rope_parameters.sliding_attention.rope_type={plain['rope_scaling']}"
        raise ConfigError([f"{path}: {key} is not supported; supported: default, or that of full_attention"])
    is_same = options["rope_scaling"] == "default" and options["rope_theta"] == plain["rope_theta"]
    return options | {"window_rope_theta": 0.0 if is_same else plain["rope_theta"]}


def _resolved(
    scaling: str, parameters: Mapping[str, JSON], config: Mapping[str, JSON], positions: int
) -> dict[str, JSON]:
    """Return the settings of a scaling, with values that `transformers` takes from other keys."""
    resolved = dict(parameters)
    if _ORIGINAL in _THEIRS[scaling]:
        nested = parameters.get(_ORIGINAL, positions)
        resolved[_ORIGINAL] = config.get(_ORIGINAL, nested) if _is_number(nested) else nested
    original: Any = resolved.get(_ORIGINAL)
    if scaling == "longrope" and resolved.get("factor") is None and _is_number(original):
        resolved["factor"] = max(positions / original, 1.0)
    if scaling != "yarn" or not _is_number(original):
        return resolved
    if "factor" in resolved and resolved["factor"] is None:
        resolved["factor"] = positions / original
    factor: Any = resolved.get("factor")
    scales = [resolved.get(key) or 0 for key in _MSCALES]
    if all(_is_number(scale) or scale == 0 for scale in scales) and _is_number(factor):
        resolved = {key: value for key, value in resolved.items() if key not in _MSCALES}
        if all(scales) and resolved.get("attention_factor") is None:
            log = 0.1 * math.log(max(factor, 1.0))
            resolved["attention_factor"] = (scales[0] * log + 1.0) / (scales[1] * log + 1.0)
    return resolved


def _read_scaling(scaling: str, parameters: Mapping[str, JSON], location: str) -> Options:
    """Return the options of a scaling. Raises ConfigError with a line for each unsupported key."""
    options_by_key, options = _THEIRS[scaling], Options()
    problems = [
        f"{location}.{key}={show(parameters[key])} is not supported with {scaling}; remove it"
        for key in sorted(parameters.keys() - options_by_key.keys() - set(_COMMON))
        if parameters[key] is not None
    ]
    for key, option in options_by_key.items():
        value: Any = parameters.get(key)
        is_absent = key not in parameters or (key in _BETAS and not value)
        if key in _LISTS and isinstance(value, list) and value and all(map(_is_number, value)):
            options[option] = " ".join(repr(float(number)) for number in value)
        elif key == "truncate" and (is_absent or value is None or type(value) is bool):
            options[option] = is_absent or value is True  # null is false in `transformers`
        elif is_absent or (key == "attention_factor" and value is None):
            if key in _REQUIRED:
                problems.append(f"{location}.{key} is missing, which {scaling} needs")
        elif key in _LISTS:
            problems.append(f"{location}.{key}={show(value)} must be a list of numbers above 0")
        elif not _is_number(value) or (key == _ORIGINAL and value != int(value)):
            kind = "a whole number" if key == _ORIGINAL else "a number"
            problems.append(f"{location}.{key}={show(value)} must be {kind} above 0")
        elif key == "factor" and value < 1:
            problems.append(f"{location}.{key}={show(value)} must be 1 or more")
        else:
            options[option] = int(value) if key == _ORIGINAL else float(value)
    if problems:
        raise ConfigError(problems)
    return options


def _is_number(value: JSON) -> bool:
    """True for a number above 0 and in range."""
    return type(value) in (int, float) and 0 < value < 1 << 31


def write_rope(
    settings: LlamaSettings, *, has_fraction: bool = False, differs_by_type: bool = False
) -> dict[str, JSON]:
    """Return keys of config.json for old and new versions of `transformers`."""
    if differs_by_type:
        flat, theta = write_rope(settings), settings.window_rope_theta
        full = {"rope_type": "default", "rope_theta": settings.rope_theta, **(flat["rope_scaling"] or {})}
        sliding = {"rope_type": "default", "rope_theta": theta} if theta else full
        by_type = {"full_attention": full, "sliding_attention": sliding}
        return {**flat, "rope_local_base_freq": sliding["rope_theta"], "rope_parameters": by_type}
    scaling = settings.rope_scaling
    keys: dict[str, JSON] = {"rope_theta": settings.rope_theta, "rope_scaling": None}
    if has_fraction:
        keys["partial_rotary_factor"] = settings.rotary_fraction
    if scaling == "default":
        return keys
    values: dict[str, JSON] = {"rope_type": scaling}
    for key, option in _THEIRS[scaling].items():
        value = getattr(settings, option)
        if key in _LISTS:
            value = [float(number) for number in value.split()]
        if option != "rope_attention_factor" or value:
            values[key] = value
    if settings.rope_mscale:
        values["mscale_all_dim"] = settings.rope_mscale
        if settings.rope_attention_factor == 1:  # of equal ones
            values["mscale"] = values.pop("attention_factor") * settings.rope_mscale
    if scaling == "longrope":  # read with it, too
        keys[_ORIGINAL] = settings.rope_original_positions
    return {**keys, "rope_scaling": values}
