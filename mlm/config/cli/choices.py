"""The choices of a config group: purpose, settings and other names."""

from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mlm.config.paths import CONFIG_DIR
from mlm.config.tree import flatten
from mlm.models.config import ModelConfig
from mlm.util.errors import show

LONGEST_LINE = 200  # characters of a YAML's comment that help shows
MOST_LINES = 10  # of a comment that are read
ALSO = "Also: "


def choice_rows(group: str, names: list[str], config_dir: str | None) -> list[tuple[str, str]]:
    """(choice, meaning) of each. Of the user's own YAML only the comment is shown."""
    rows = []
    for name in names:
        path = _file_of(group, name, config_dir)
        effect = effect_of(group, path) if path.is_relative_to(CONFIG_DIR) else ""
        rows.append((name, " ".join(filter(None, (first_comment(path), effect)))))
    return rows


def other_names(group: str, names: Iterable[str], config_dir: str | None) -> dict[str, str]:
    """Names that other programs have for choices → the choice: `# Also: gpt2_medium` in its comment."""
    lines = [(name, line) for name in names for line in _comment(_file_of(group, name, config_dir))]
    return {
        theirs: name
        for name, line in lines
        if line.startswith(ALSO)
        for theirs in line.removeprefix(ALSO).replace(",", " ").split()
    }


def _file_of(group: str, name: str, config_dir: str | None) -> Path:
    """The YAML of a choice, shipped or the user's."""
    shipped = CONFIG_DIR / group / f"{name}.yaml"
    return shipped if shipped.is_file() or config_dir is None else Path(config_dir, group, f"{name}.yaml")


def first_comment(path: Path) -> str:
    """The first line of the comment that a YAML begins with."""
    text = next((text for text in _comment(path) if not text.startswith("@")), "")
    return "".join(c for c in text if c.isprintable())


def _comment(path: Path) -> list[str]:
    """The lines of the comment that a YAML begins with."""
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            lines = [f.readline(LONGEST_LINE) for _ in range(MOST_LINES)]
    except OSError:
        return []
    return [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines)]


def effect_of(group: str, path: Path) -> str:
    """The size of a shipped model; of another choice, the values that it sets."""
    values = _values(path)
    if group == "model":
        shape = {key: value for key, value in values.get("model", values).items() if key != "defaults"}
        model = ModelConfig(**shape)
        millions = model.num_parameters() / 1e6
        size = f"{millions:.1f}M" if millions < 1000 else f"{millions / 1000:.1f}B"
        layers = f"{model.num_layers} layers, hidden size {model.hidden_size}"
        return f"[{layers}, {model.num_heads} heads, {size} parameters]"
    chosen = [
        f"{name.removeprefix('override /')}={choice}"
        for entry in values.pop("defaults", [])
        if isinstance(entry, dict)
        for name, choice in entry.items()
    ]
    each = [*chosen, *(f"{key}={show(value)}" for key, value in flatten(values).items())]
    return f"[{' '.join(each)}]" if each else ""


def _values(path: Path) -> dict[str, Any]:
    """Values that a shipped YAML sets, with the file of its group that it begins with."""
    values: dict[str, Any] = yaml.safe_load(path.read_text("utf-8")) or {}
    for entry in values.get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            base = _values(path.parent / f"{entry.partition('@')[0]}.yaml")
            own = values.get("model", values)
            for key, value in base.items():
                own.setdefault(key, value)
    return values
