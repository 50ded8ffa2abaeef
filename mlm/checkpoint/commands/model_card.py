"""README.md of an exported model: what its checkpoint records of name, base, training and scores.

What is not recorded is left out: a license, intended uses and limits are for the owner to write.
"""

from collections.abc import Mapping
from typing import Any

from mlm.checkpoint.native.format import JSON, Manifest
from mlm.checkpoint.native.run_state import FINETUNING
from mlm.models.config import ModelConfig
from mlm.util.errors import escape_controls

CARD = "README.md"
LONGEST = 200  # characters of a recorded value
TRAINING = {
    "seed": ("seed",),
    "steps": ("train", "steps"),
    "sequences per step": ("train", "global_batch_size"),
    "tokens per sequence, at most": ("data", "seq_length"),
    "optimizer": ("optimizer", "kind"),
    "peak learning rate": ("optimizer", "lr"),
    "precision": ("precision", "dtype"),
}
"""Rows on training, by their key in the saved settings."""


def model_card(manifest: Manifest, model: ModelConfig, architecture: str) -> str:
    """Return the card as Markdown, with the metadata that the Hub reads."""
    state = manifest.state
    finetuning = _mapping(state.get(FINETUNING))
    task = _mapping(finetuning.get("depends_on")).get("task.name")
    config, source = _mapping(state.get("config")), _mapping(state.get("source"))
    base = finetuning.get("base") or source.get("name")
    parts = [
        f"---\nlibrary_name: transformers\ntags:\n- {model.kind.partition(':')[0]}\n---",
        f"# {_text(config.get('name')) or architecture}",
        f"{architecture} with {model.num_parameters():,} parameters, exported by mlm.",
        _table(
            {
                "layers, hidden size, heads": f"{model.num_layers}, {model.hidden_size}, {model.num_heads}",
                "tokens read at most": model.max_positions,
                "vocabulary": model.vocab_size,
                "base model": base,
                "finetuned on": task,
                "step": manifest.step if "source" not in state else None,
            }
        ),
        _section("Training", {} if "source" in state else _training(config)),
        _section("Scores", _scores(finetuning)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _training(config: Mapping[str, Any]) -> dict[str, JSON]:
    rows: dict[str, JSON] = {}
    for name, keys in TRAINING.items():
        value: JSON = config
        for key in keys:
            value = _mapping(value).get(key)
        rows[name] = value
    return rows


def _scores(finetuning: Mapping[str, Any]) -> dict[str, JSON]:
    """Return the metrics of the best checkpoint, by which it was chosen."""
    scores = _mapping(_mapping(finetuning.get("progress")).get("scores"))
    return {
        f"{split}, {name}": f"{value:.4f}"
        for split, metrics in scores.items()
        for name, value in _mapping(metrics).items()
        if isinstance(value, float)
    }


def _section(title: str, rows: Mapping[str, JSON]) -> str:
    table = _table(rows)
    return table and f"## {title}\n\n{table}"


def _table(rows: Mapping[str, JSON]) -> str:
    """Return a table of what is known; empty without any."""
    lines = [f"| {_text(name)} | {shown} |" for name, value in rows.items() if (shown := _text(value))]
    return "\n".join(["| | |", "| --- | --- |", *lines]) if lines else ""


def _text(value: JSON) -> str:
    """Return a recorded value on one line of a table; empty for what is no text or number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return escape_controls(str(value)[:LONGEST]).replace("|", "\\|").replace("<", "&lt;")


def _mapping(value: JSON) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
