"""The identity of a run: settings that may not change from its first step to its last, and recorded changes.

A resumed run is compared with the settings in its checkpoint: differences of identity are errors, allowed
changes are recorded in the checkpoint. Data is compared by content, in resume.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mlm.checkpoint.native.run_state import LINEAGE, Lineage, Save
from mlm.config.build import to_dict
from mlm.config.tree import HOISTED, flatten, leaves
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import SWITCHES, fill_eod_id
from mlm.util.errors import Problem, format_settings, format_value

OPTIONS = "model.options"
PLACES = ("rollback", "out")
"""Keys of recorded changes other than settings: a run went back, or continued in another folder."""
MAX_CHANGES = 1000
"""Changes that a checkpoint records, the newest ones."""


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}{name}" for name in names.split())


IDENTITY = (
    "seed",
    *_keys(
        "model.",
        "kind num_layers hidden_size num_heads ffn_hidden_size max_positions vocab_size hidden_dropout "
        "attention_dropout init_std mup_base_width layer_norm_eps norm activation token_types head "
        "num_labels options",
    ),
    *_keys(
        "data.",
        "kind seq_length reset_positions reset_attention mask_eod_loss masked_lm_prob short_seq_prob "
        "max_ngram eod_id",
    ),
    "optimizer.kind",
    *_keys("lora.", "rank alpha targets rslora dora quantize"),
)
"""Keys that may not change."""
DATA = _keys("data.", "path train blend tokenizer")
"""Keys whose data is compared by content; data.change=true allows another."""
FREE = (
    *_keys("", "name out ckpt profile incident.keep data.validation data.cache data.cache_gb data.change"),
    *_keys("check.", "every ranks_every slow_factor expert_steps expert_share"),
    *_keys("", "ema.validate train.keep_best train.patience"),
    *_keys("train.", "validate_every validate_batches observers"),
    *_keys("train.", "sample_prompts sample_tokens sample_temperature"),
    *_keys("checkpoint.", "save_every keep_last keep_every resume asynchronous mirror from_mirror from_step"),
    "checkpoint.from_run",
    *_keys("log.", "every tensorboard wandb_project"),
    *_keys("dist.", "device backend timeout_s checkpoint_timeout_s threads_per_rank master_port peak_tflops"),
)
"""Keys that no number of the run depends on."""
RECORDED = tuple(key for key in leaves(PretrainConfig) if key not in {*IDENTITY, *DATA, *FREE})
"""All others: changes are allowed, logged and recorded in the checkpoint."""

FUNCTION_KEYS = tuple(
    f"model.{setting.name}"
    for setting in fields(ModelConfig)
    if setting.name not in ("hidden_dropout", "attention_dropout", "init_std", "vocab_multiple")
)
"""Keys that decide the function of a model; a fresh run from weights may not change them."""


@dataclass(frozen=True)
class RunAncestry:
    """Saves that a run descends from, and changes of its settings; checkpoints carry it."""

    lineage: Lineage = field(default_factory=Lineage)
    changes: tuple[dict[str, Any], ...] = ()
    """Allowed changes so far: step, key, from, to."""

    def encode(self) -> dict[str, Any]:
        return {**self.lineage.encode(), "changes": list(self.changes)}

    def changed_at(self, step: int) -> tuple[dict[str, Any], ...]:
        """Return the changes since the checkpoint of a step that a run continues from."""
        return tuple(change for change in self.changes if change["step"] == step)

    def after(self, save: Save) -> "RunAncestry":
        return replace(self, lineage=replace(self.lineage, ancestors=self.lineage.next_ancestors(save)))


def flat_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A saved run spec by keys as typed; a default MLP width is null."""
    settings = {key.removeprefix(f"{HOISTED}."): value for key, value in flatten(dict(config)).items()}
    width = settings.get("model.hidden_size")
    if isinstance(width, int) and settings.get("model.ffn_hidden_size") == 4 * width:
        settings["model.ffn_hidden_size"] = None
    return settings


def current_settings(config: PretrainConfig) -> dict[str, Any]:
    """This run's spec by keys as typed. Raises UserError as `fill_eod_id` does."""
    return flat_settings(to_dict(replace(config, data=fill_eod_id(config.data))))


def identity_errors(config: PretrainConfig, saved: Mapping[str, Any], run: str) -> list[str]:
    """Return a line for each identity key whose value differs from the saved one of the folder `run`.

    Keys that the checkpoint lacks are not compared.
    """
    current, stored = current_settings(config), flat_settings(saved)
    if isinstance(stored.get(OPTIONS), Mapping):  # compared one by one, defaults filled in
        for settings in (current, stored):
            options = {**family_of(config.model.kind).options, **settings.pop(OPTIONS)}
            settings |= {f"{OPTIONS}.{name}": value for name, value in options.items()}
    # masking keys matter to BERT alone, eod_id only where both runs have a switch that reads it
    unused = {"data.masked_lm_prob", "data.short_seq_prob", "data.max_ngram"}
    unused.difference_update(family_of(config.model.kind).data_keys)
    if not any(getattr(config.data, switch) and stored.get(f"data.{switch}") for switch in SWITCHES):
        unused.add("data.eod_id")
    return [
        f"{key}={format_value(current[key])}: the run in {run} was trained with {format_value(stored[key])}; "
        f"set {key}={format_value(stored[key])}, or another out=… (ckpt={run} begins it with these weights)"
        for key in (*IDENTITY, *(key for key in current if key.startswith(f"{OPTIONS}.")))
        if key in stored and current[key] != stored[key] and key not in unused
    ]


def function_errors(config: PretrainConfig, saved: Mapping[str, Any], path: str) -> list[str]:
    """Return the problems of a model whose function differs from the one its weights were trained for."""
    current, stored = current_settings(config), flat_settings(saved)
    differing = {key: stored[key] for key in FUNCTION_KEYS if key in stored and current[key] != stored[key]}
    if len(differing) < 2:
        return [
            f"{key}={format_value(current[key])}: the weights in {path} are of a model with "
            f"{format_value(value)}; set {key}={format_value(value)}, or another ckpt=…"
            for key, value in differing.items()
        ]
    typed = format_settings({key: current[key] for key in differing})
    problem = f"{typed}: the weights in {path} are of another model"
    fix = f"choose no model=…, which takes the checkpoint's, or set {format_settings(differing)}"
    return [Problem(differing, problem, fix)]


def changes_since(config: PretrainConfig, saved: Mapping[str, Any], step: int) -> tuple[dict[str, Any], ...]:
    """Allowed changes that affect numbers, as recorded in checkpoints."""
    current, stored = current_settings(config), flat_settings(saved)
    return tuple(
        {"step": step, "key": key, "from": stored[key], "to": current[key]}
        for key in RECORDED
        if key in stored and current[key] != stored[key]
    )


def changes_line(changes: tuple[dict[str, Any], ...]) -> str:
    pairs = [f"{c['key']} {format_value(c['from'])} → {format_value(c['to'])}" for c in changes]
    return f"changed at step {changes[0]['step']:,}: {', '.join(pairs)}"


def recorded_changes(state: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    lineage = state.get(LINEAGE)
    changes = lineage.get("changes") if isinstance(lineage, dict) else None
    return tuple(c for c in changes if isinstance(c, dict)) if isinstance(changes, list) else ()
