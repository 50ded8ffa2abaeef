"""Keys of a checkpoint's `state`: counters, lineage, tokenizer; all are validated."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlm.util.errors import CorruptFileError, reading_from
from mlm.util.files import DIGEST, READABLE, digest_file
from mlm.util.ownership import file_type_name

RESTORE = "Restore it from a copy, or load another checkpoint with ckpt=…"

FINETUNING = "finetuning"
"""Key of the state of a finetuning run."""
INCIDENTS = "incidents"
"""Key of a run's incidents, on which later decisions depend."""
VALIDATION_DUE = "validation_due"
"""Key set if a stop interrupted a validation: the resumed run validates first. False if only the observers'
work after the validation remains."""
BEST_VALIDATION = "best_validation"
"""Key of a run's lowest validation loss, and of the validations since."""
EMA = "ema_updates"
"""Key of the number of updates in the average of the weights."""
NOT_FINITE_SINCE = "not_finite_since"
"""Key in a run's incidents: the first of the newest steps that are not finite; 0 if the newest is finite."""
DOUBTFUL_SINCE = "doubtful_since"
"""Same for steps that are not finite, whose loss is far above the best, or whose replicas differ."""
LORA = "lora"
"""Key of the name and digest of the base that the adapters in a checkpoint belong to."""
LINEAGE = "lineage"
"""Key of the saves that a checkpoint descends from."""
TOKENIZER = "tokenizer"
"""Key of the tokenizer that a checkpoint was trained with."""
TOKENIZER_FILE = "tokenizer.json"
"""File in the run directory, next to the folder of checkpoints."""
MAX_COUNT = 1 << 62  # steps, samples
MAX_SCALER_COUNT = (1 << 31) - 1  # of the loss scaler's counters: i32 on the device
SAVE_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
MAX_ANCESTORS = 1000
"""Most recent ancestors that a checkpoint records."""


def is_weights_only(state: Mapping[str, Any]) -> bool:
    """True if a checkpoint holds a model without training state: imported, or reduced to weights."""
    return state.get("weights_only") is True


def check_run_state(state: Mapping[str, Any], step: int, path: Path) -> None:
    """Raise CorruptFileError unless the counters and the loss scale belong to a run at this step."""
    scaler = state.get("scaler")
    counts = {
        "step": (state, step, step),
        "consumed_samples": (state, 0, MAX_COUNT),
        "applied_steps": (state, 0.0, float(MAX_COUNT)),
        "scale": (scaler, math.ulp(0.0), 2.0**127),
        "clean_steps": (scaler, 0, MAX_SCALER_COUNT),
        "skipped": (scaler, 0, MAX_SCALER_COUNT),
    }
    for key, (values, least, most) in counts.items():
        value: Any = values.get(key) if isinstance(values, Mapping) else None
        kinds = (int,) if isinstance(most, int) else (int, float)
        if type(value) not in kinds or not least <= value <= most:
            raise CorruptFileError(f"{path}: its {key}={str(value)[:40]} is out of range. {RESTORE}")


def not_finite_since(state: Mapping[str, Any], key: str = NOT_FINITE_SINCE) -> int:
    """Return the first of the newest steps whose numbers are not finite; 0 if the newest is finite."""
    incidents = state.get(INCIDENTS)
    since = incidents.get(key) if isinstance(incidents, dict) else 0
    return since if type(since) is int else 0


def doubtful_since(state: Mapping[str, Any]) -> int:
    """Return the first of the newest steps that have gone wrong; 0 if the newest is sound."""
    return not_finite_since(state, DOUBTFUL_SINCE) or not_finite_since(state)


def as_strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        return ()
    return tuple(value)


@dataclass(frozen=True)
class Save:
    """One save of a run. Two saves of one step differ in their id."""

    step: int
    save_id: str


@dataclass(frozen=True)
class Lineage:
    """Ancestors of a checkpoint."""

    ancestors: tuple[Save, ...] = ()
    """Saves it descends from, the oldest first; the last one is its parent."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Lineage":
        """Read the lineage in a checkpoint's state; empty if no training run saved it."""
        try:
            saves = [Save(step, save_id) for step, save_id in state[LINEAGE]["ancestors"]]
            is_valid = all(type(save.step) is int and SAVE_ID.fullmatch(save.save_id) for save in saves)
        except (KeyError, TypeError, ValueError):
            return cls()
        return cls(tuple(saves)) if is_valid and len(saves) <= MAX_ANCESTORS else cls()

    def encode(self) -> dict[str, Any]:
        return {"ancestors": [[save.step, save.save_id] for save in self.ancestors]}

    def next_ancestors(self, save: Save) -> tuple[Save, ...]:
        """Return the ancestors of the next checkpoint if this one was saved as `save`."""
        return (*self.ancestors, save)[-MAX_ANCESTORS:]


@dataclass(frozen=True)
class TokenizerDigest:
    """Identity of the tokenizer that a checkpoint was trained with."""

    digest: str
    """Digest of tokenizer.json."""
    vocabulary: str | None = None
    """Digest of its tokens, ids and merges: equal for another file with the same vocabulary."""
    eod_id: int | None = None
    """End-of-document token of the training data, which the file does not record."""
    bos_id: int | None = None
    """Token that begins a sequence; None without one, or if not recorded."""

    def is_same(self, other: "TokenizerDigest") -> bool:
        """True if both encode text alike, by their digests."""
        return self.digest == other.digest or (
            self.vocabulary is not None and self.vocabulary == other.vocabulary
        )

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "TokenizerDigest | None":
        """Read the entry in a checkpoint's state; None without a tokenizer."""
        entry = state.get(TOKENIZER)
        digest, vocabulary, *ids = (
            entry.get(key) if isinstance(entry, dict) else None
            for key in ("digest", "vocabulary", "eod_id", "bos_id")
        )
        if not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
            return None
        has_vocabulary = isinstance(vocabulary, str) and DIGEST.fullmatch(vocabulary)
        return cls(
            digest, vocabulary if has_vocabulary else None, *(id if type(id) is int else None for id in ids)
        )


def tokenizer_path(directory: Path) -> Path:
    """Return the path of tokenizer.json for a step-… `directory` of a run."""
    return directory.parent.parent / TOKENIZER_FILE


def check_run_tokenizer(directory: Path, state: Mapping[str, Any]) -> None:
    """Raise CorruptFileError if tokenizer.json is not a file, or differs from the checkpoint's tokenizer."""
    recorded, path = TokenizerDigest.of(state), tokenizer_path(directory)
    if os.path.lexists(path) and not path.is_file():
        raise CorruptFileError(f"{path}: is {file_type_name(path)}, no regular file. {RESTORE}")
    if recorded is None or not path.is_file():
        return
    with reading_from(path, READABLE):
        digest = digest_file(path)
    if digest != recorded.digest:
        raise CorruptFileError(
            f"{path}: damaged or replaced, digest {digest}, {directory.name} was trained with "
            f"{recorded.digest}. {RESTORE}"
        )
