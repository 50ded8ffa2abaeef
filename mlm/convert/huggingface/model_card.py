"""README.md of an exported model: name, base, training and scores, as its checkpoint records them.

License, intended uses and limits, which are not recorded, are for the owner to write.
"""

import json
from pathlib import Path

from mlm.checkpoint.native.format import JSON, Manifest
from mlm.checkpoint.native.run_state import FINETUNING
from mlm.config.fields import split_weight
from mlm.config.plain_yaml import parse
from mlm.config.tree import flatten
from mlm.convert.huggingface.folder import SAVE_AGAIN, find_file
from mlm.data.files_present import hub_id
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
TASKS = {"classification": "text-classification", "span": "question-answering"}
"""model.head -> the Hub's name of the task; text-generation for others."""


def model_card(manifest: Manifest, model: ModelConfig, architecture: str, adapted: str | None = None) -> str:
    """Return the card as Markdown, with metadata for the Hub; `adapted` is the base of adapters."""
    facts = flatten(dict(manifest.state))
    is_imported = "source" in manifest.state
    task, hub = facts.get(f"{FINETUNING}.depends_on.task.name"), facts.get(f"{FINETUNING}.data.hub")
    base = adapted or facts.get(f"{FINETUNING}.base") or facts.get("source.name")
    base_id = None if is_imported or not isinstance(base, str) else hub_id(base)
    # Names of the training files, without their folders, which are private.
    blend = facts.get("config.data.blend")
    paths = [facts.get(key) for key in (f"{FINETUNING}.data.path", "config.data.train", "config.data.path")]
    paths += [split_weight(str(entry))[1] for entry in blend] if isinstance(blend, list) else []
    data = [hub] if isinstance(hub, str) else [Path(path).name for path in paths if isinstance(path, str)]
    scores = {
        key.removeprefix(SCORES): value
        for key, value in facts.items()
        if key.startswith(SCORES) and isinstance(value, float)
    }
    rows = {
        "layers, hidden size, heads": f"{model.num_layers}, {model.hidden_size}, {model.num_heads}",
        "tokens read at most": model.max_positions,
        "vocabulary": model.vocab_size,
        "base model": base if is_imported or base_id else Path(str(base or "")).name,
        "finetuned on": task,
        "data": ", ".join(data),
        **({} if is_imported else {"step": manifest.step}),
        **({} if is_imported else {name: facts.get(f"config.{key}") for name, key in TRAINING.items()}),
        **{name.replace(".", ", ", 1): f"{value:.4f}" for name, value in scores.items()},
    }
    origin = manifest.state.get("source")
    card = origin.get("card") if isinstance(origin, dict) else None
    kind = model.kind.partition(":")[0]
    metadata = {"library_name": "transformers", "tags": [kind], **(card if isinstance(card, dict) else {})}
    if adapted:
        metadata["library_name"] = "peft"
    if base_id:
        metadata["base_model"] = base_id
    if isinstance(hub, str):
        metadata["datasets"] = [hub]
    if scores:
        result = {
            "task": {"type": TASKS.get(model.head, "text-generation")},
            "dataset": {"name": task, "type": hub or task},
            "metrics": [{"type": n.rpartition(".")[2], "name": n, "value": v} for n, v in scores.items()],
        }
        metadata["model-index"] = [{"name": facts.get("config.name"), "results": [result]}]
    lines = [f"| {_text(name)} | {cell} |" for name, value in rows.items() if (cell := _text(value))]
    parts = [
        "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()), "---"]),
        f"# {_text(facts.get('config.name')) or architecture}",
        f"{architecture} with {count_parameters(model):,} parameters, exported by mlm.",
        "\n".join(["| | |", "| --- | --- |", *lines]),
    ]
    return "\n\n".join(parts) + "\n"


def card_facts(folder: Path) -> dict[str, JSON]:
    """Return the FACTS of a model folder's card; {} without one, or where its metadata is not plain YAML."""
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
    """Return a recorded value for a table cell; "" for values other than text and numbers."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return escape_controls(str(value)[:LONGEST]).replace("|", "\\|").replace("<", "&lt;")
