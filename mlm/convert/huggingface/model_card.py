"""README.md of an exported model: what its checkpoint records of name, base, training and scores.

What is not recorded is left out: a license, intended uses and limits are for the owner to write.
"""

import json
from pathlib import Path

from mlm.checkpoint.native.format import JSON, Manifest
from mlm.checkpoint.native.run_state import FINETUNING
from mlm.config.plain_yaml import parse
from mlm.config.tree import flatten
from mlm.convert.huggingface.folder import SAVE_AGAIN, find_file
from mlm.models.config import ModelConfig
from mlm.models.shape import count_parameters
from mlm.util.errors import UserError, escape_controls
from mlm.util.files import read_bounded

CARD = "README.md"
LONGEST = 200
"""Characters of a recorded value."""
TRAINING = {
    "seed": "seed",
    "steps": "train.steps",
    "sequences per step": "train.global_batch_size",
    "tokens per sequence, at most": "data.seq_length",
    "optimizer": "optimizer.kind",
    "peak learning rate": "optimizer.lr",
    "precision": "precision.dtype",
}
"""Rows on training, by their key in the saved settings."""
FACTS = (
    *("license", "license_name", "license_link", "language"),
    *("datasets", "base_model", "pipeline_tag", "tags"),
)
"""Metadata of an imported model's card that an export writes again."""
SCORES = f"{FINETUNING}.progress.scores."


def model_card(manifest: Manifest, model: ModelConfig, architecture: str) -> str:
    """Return the card as Markdown, with the metadata that the Hub reads."""
    facts = flatten(dict(manifest.state))
    is_imported = "source" in manifest.state
    rows = {
        "layers, hidden size, heads": f"{model.num_layers}, {model.hidden_size}, {model.num_heads}",
        "tokens read at most": model.max_positions,
        "vocabulary": model.vocab_size,
        "base model": facts.get(f"{FINETUNING}.base") or facts.get("source.name"),
        "finetuned on": facts.get(f"{FINETUNING}.depends_on.task.name"),
        **({} if is_imported else {"step": manifest.step}),
        **({} if is_imported else {name: facts.get(f"config.{key}") for name, key in TRAINING.items()}),
        **{
            key.removeprefix(SCORES).replace(".", ", ", 1): f"{value:.4f}"
            for key, value in facts.items()
            if key.startswith(SCORES) and isinstance(value, float)
        },
    }
    origin = manifest.state.get("source")
    card = origin.get("card") if isinstance(origin, dict) else None
    kind = model.kind.partition(":")[0]
    metadata = {"library_name": "transformers", "tags": [kind], **(card if isinstance(card, dict) else {})}
    lines = [f"| {_text(name)} | {shown} |" for name, value in rows.items() if (shown := _text(value))]
    parts = [
        "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()), "---"]),
        f"# {_text(facts.get('config.name')) or architecture}",
        f"{architecture} with {count_parameters(model):,} parameters, exported by mlm.",
        "\n".join(["| | |", "| --- | --- |", *lines]),
    ]
    return "\n\n".join(parts) + "\n"


def card_facts(folder: Path) -> dict[str, JSON]:
    """Return the FACTS of a model folder's card; {} without one, or where its metadata is no plain YAML."""
    path = find_file(folder, CARD)
    if path is None:
        return {}
    try:
        text = read_bounded(path, 1 << 20, SAVE_AGAIN).decode(errors="replace")
        begin, metadata, *_ = text.split("---\n", 2)
        facts = {} if begin else parse(metadata, path)
    except (UserError, OSError, ValueError):
        return {}

    def is_short(value: JSON) -> bool:
        texts = value if isinstance(value, list) else [value]
        return len(texts) <= 100 and all(isinstance(text, str) and len(text) <= LONGEST for text in texts)

    return {key: facts[key] for key in FACTS if is_short(facts.get(key))}


def _text(value: JSON) -> str:
    """Return a recorded value on one line of a table; empty for what is no text or number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return escape_controls(str(value)[:LONGEST]).replace("|", "\\|").replace("<", "&lt;")
