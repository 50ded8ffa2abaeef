"""README.md of an exported model: what its checkpoint records of name, base, training and scores.

What is not recorded is left out: a license, intended uses and limits are for the owner to write.
"""

from mlm.checkpoint.native.format import JSON, Manifest
from mlm.checkpoint.native.run_state import FINETUNING
from mlm.config.tree import flatten
from mlm.models.config import ModelConfig
from mlm.util.errors import escape_controls

CARD = "README.md"
LONGEST = 200  # characters of a recorded value
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
    lines = [f"| {_text(name)} | {shown} |" for name, value in rows.items() if (shown := _text(value))]
    parts = [
        f"---\nlibrary_name: transformers\ntags:\n- {model.kind.partition(':')[0]}\n---",
        f"# {_text(facts.get('config.name')) or architecture}",
        f"{architecture} with {model.num_parameters():,} parameters, exported by mlm.",
        "\n".join(["| | |", "| --- | --- |", *lines]),
    ]
    return "\n\n".join(parts) + "\n"


def _text(value: JSON) -> str:
    """Return a recorded value on one line of a table; empty for what is no text or number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return escape_controls(str(value)[:LONGEST]).replace("|", "\\|").replace("<", "&lt;")
