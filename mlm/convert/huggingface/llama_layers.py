"""Settings of a config.json that differ by layer: windows, rotary positions, experts.

`transformers` lists a type for each layer; mlm repeats a pattern, the shortest that gives the list.
"""

from collections.abc import Mapping

from mlm.config.fields import Options
from mlm.convert.huggingface.mapping import JSON, show
from mlm.convert.huggingface.variant import Variant
from mlm.models.config import ModelConfig
from mlm.models.llama.settings import LlamaSettings
from mlm.util.errors import ConfigError

TYPES = {"sliding_attention": "s", "full_attention": "f"}
NAMES = {letter: name for name, letter in TYPES.items()}


def read_layers(config: Mapping[str, JSON], layers: int, row: Variant, path: str) -> Options:
    """Return the options that differ by layer: rotary positions (r) or none (n), windows, experts.

    Raises ConfigError.
    """
    rotary, flags = "r", config.get("no_rope_layers")
    if "no_rope_layers" in row.layer_keys and flags is None:
        interval = config.get("no_rope_layer_interval", 4)
        rotary = shortest_pattern(_every(interval, "no_rope_layer_interval", "rn", layers, path))
    elif "no_rope_layers" in row.layer_keys:
        if not isinstance(flags, list) or len(flags) < layers or not all(x in (0, 1) for x in flags):
            setting = f"no_rope_layers={show(flags)}"
            raise ConfigError([f"{path}: {setting} must be a 0 or 1 for each of the {layers} layers"])
        rotary = shortest_pattern("".join("r" if x else "n" for x in flags[:layers]))
    options = _read_window(config, layers, rotary, row, path)
    if row.full_layers_lack_rotary:
        types = (options["window_layers"] or "s") if options["window"] else "f"
        rotary = str(types).replace("s", "r").replace("f", "n")
    options["rotary_layers"] = rotary if "n" in rotary else ""
    # Only the first layers may lack experts.
    dense = config[row.dense_key] if row.dense_key not in ("", "mlp_only_layers") else 0
    if row.dense_key == "mlp_only_layers":
        numbers = config.get("mlp_only_layers")
        numbers = [] if numbers is None else numbers
        if not isinstance(numbers, list) or numbers != list(range(len(numbers))):
            setting = f"mlp_only_layers={show(numbers)}"
            raise ConfigError([f"{path}: {setting}: supported: the first layers, [0, 1, …], or []"])
        dense = len(numbers)
    elif type(dense) is not int or dense < 0:
        raise ConfigError([f"{path}: {row.dense_key}={show(dense)} must be a whole number from 0"])
    end = config.get("moe_layer_end_index", -1)
    if row.dense_key == "moe_layer_start_index" and end not in (-1, layers - 1):
        setting = f"moe_layer_end_index={show(end)}"
        raise ConfigError([f"{path}: {setting}: supported: experts to the last layer, {layers - 1}"])
    return {**options, "dense_layers": min(dense, layers)}


def shortest_pattern(types: str) -> str:
    """Return the shortest string that, repeated, begins with `types`."""
    length = len(types)
    return next(types[:n] for n in range(1, length + 1) if (types[:n] * (length // n + 1))[:length] == types)


def repeat_pattern(pattern: str, layers: int) -> str:
    return (pattern * (layers // len(pattern) + 1))[:layers]


def _every(interval: JSON, key: str, letters: str, layers: int, path: str) -> str:
    """Return the types of layers, of which every `interval`-th has the second letter. Raises ConfigError."""
    if type(interval) is not int or interval < 1:
        raise ConfigError([f"{path}: {key}={show(interval)} must be a whole number from 1"])
    return repeat_pattern(letters[0] * (min(interval, layers + 1) - 1) + letters[1], layers)


def _read_window(config: Mapping[str, JSON], layers: int, rotary: str, row: Variant, path: str) -> Options:
    """Return the sliding window, and which layers have it. Raises ConfigError for types that do not fit.

    `layer_types` has the type of each layer: s (sliding) or f (full); without it the model type decides.
    """
    is_switched = "use_sliding_window" in row.window_keys
    size = config.get("sliding_window", row.window)
    if is_switched and not config.get("use_sliding_window", False):
        size = None
    if size is not None and (type(size) is not int or size < 1 or not row.window_keys):
        valid = "a whole number from 1, or null" if row.window_keys else "null"
        problem = f"is not what our {row.classes} computes; supported: {valid}"
        raise ConfigError([f"{path}: sliding_window={show(size)} {problem}"])
    usual = _usual_types(config, layers, size, rotary, row, path)
    types, listed = usual, config.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != layers or not {*map(str, listed)} <= TYPES.keys():
            valid = f"{' or '.join(TYPES)} for each of the {layers} layers"
            raise ConfigError([f"{path}: layer_types={show(listed)}: supported: {valid}"])
        types = "".join(map(TYPES.__getitem__, listed))
    is_read = is_switched or "layer_types" in row.layer_keys
    if types != usual and not is_read:
        fix = f"all layers of {row.classes} are alike, by sliding_window={show(size)}; remove layer_types"
        raise ConfigError([f"{path}: layer_types={show(listed)}: {fix}"])
    if "s" in types and size is None:
        setting = f"layer_types={NAMES['s']}"
        raise ConfigError([f"{path}: {setting} does not go with sliding_window={show(size)}; fix one"])
    pattern = shortest_pattern(types)
    return {
        "window": size or 0 if "s" in pattern else 0,
        "window_layers": pattern if {*pattern} == {*"sf"} else "",
    }


def _usual_types(
    config: Mapping[str, JSON], layers: int, size: int | None, rotary: str, row: Variant, path: str
) -> str:
    """Return the types of layers without layer_types: s (sliding) or f (full) for each."""
    key = "sliding_window_pattern"
    if row.sliding_layers and key in row.layer_keys and (interval := config.get(key)) is not None:
        return _every(interval, key, "sf", layers, path)
    if row.sliding_layers:
        return repeat_pattern(row.sliding_layers, layers)
    if "no_rope_layers" in row.layer_keys and size is not None:
        return repeat_pattern(rotary, layers).replace("r", "f").replace("n", "s")
    first = 0 if row.full_layers is None else config.get("max_window_layers", row.full_layers)
    if type(first) is not int:
        raise ConfigError([f"{path}: max_window_layers={show(first)} must be a whole number"])
    full = layers if size is None else min(max(first, 0), layers)
    return "f" * full + "s" * (layers - full)


def write_layers(model: ModelConfig, settings: LlamaSettings, row: Variant) -> dict[str, JSON]:
    """Return the keys of config.json that differ by layer."""
    layers, width = model.num_layers, settings.window
    window = {
        "sliding_window": width or None,
        "use_sliding_window": width > 0,
        "max_window_layers": 0 if width else layers,
    }
    config: dict[str, JSON] = {key: window[key] for key in row.window_keys}
    if "layer_types" in row.layer_keys or settings.window_layers:
        pattern = repeat_pattern(settings.window_layers or ("s" if width else "f"), layers)
        config["layer_types"] = [NAMES[letter] for letter in pattern]
    if "no_rope_layers" in row.layer_keys:
        pattern = repeat_pattern(settings.rotary_layers or "r", layers)
        config["no_rope_layers"] = [int(letter == "r") for letter in pattern]
        is_interval = pattern.startswith("r" * (len(settings.rotary_layers) - 1) + "n")
        config["no_rope_layer_interval"] = len(settings.rotary_layers) if is_interval else 4
    if row.dense_key:
        dense = settings.dense_layers if settings.num_experts else layers
        config[row.dense_key] = list(range(dense)) if row.dense_key == "mlp_only_layers" else dense
    return config
