"""README.md of an exported model: its architecture, its base, and what an imported card declared.

A license that was not imported, intended uses, limits and scores are for the owner to write.
"""

import json
from pathlib import Path

from mlm.checkpoint.native.format import JSON, Manifest
from mlm.checkpoint.native.run_state import FINETUNING
from mlm.config.plain_yaml import parse
from mlm.config.tree import flatten
from mlm.convert.huggingface.folder import SAVE_AGAIN, find_file
from mlm.data.files_present import hub_id
from mlm.models.config import ModelConfig
from mlm.models.shape import count_parameters
from mlm.util.errors import UserError
from mlm.util.files import read_bounded

CARD = "README.md"
LONGEST = 200
"""Characters of a recorded value."""
FACTS = (
    *("license", "license_name", "license_link", "language"),
    *("datasets", "base_model", "pipeline_tag", "tags"),
)
"""Metadata of an imported model's card that an export writes again."""


def model_card(manifest: Manifest, model: ModelConfig, architecture: str, adapted: str | None = None) -> str:
    """Return the card as Markdown, with metadata for the Hub; `adapted` is the base of adapters."""
    facts, origin = flatten(dict(manifest.state)), manifest.state.get("source")
    card = origin.get("card") if isinstance(origin, dict) else None
    base, hub = adapted or facts.get(f"{FINETUNING}.base"), facts.get(f"{FINETUNING}.data.hub")
    metadata = {
        "library_name": "peft" if adapted else "transformers",
        "tags": [model.kind.partition(":")[0]],
        **(card if isinstance(card, dict) else {}),
    }
    if isinstance(base, str) and (base_id := hub_id(base)):
        metadata["base_model"] = base_id
    if isinstance(hub, str):
        metadata["datasets"] = [hub]
    parts = [
        "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()), "---"]),
        f"# {architecture}",
        f"{architecture} with {count_parameters(model):,} parameters, exported by mlm.",
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
