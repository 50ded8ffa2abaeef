"""Descent of checkpoints: a save names the saves it descends from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SAVE_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
MAX_ANCESTORS = 1000
"""Saves of the past that a checkpoint names, the newest ones."""
LINEAGE = "lineage"
"""Key of a checkpoint's state."""


@dataclass(frozen=True)
class Save:
    """One save of a run. Two saves of one step differ in their id."""

    step: int
    save_id: str


@dataclass(frozen=True)
class Lineage:
    """The past of a checkpoint."""

    ancestors: tuple[Save, ...] = ()
    """Saves it descends from, the oldest first: the last one is its parent."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Lineage":
        """The lineage in a checkpoint's state; empty for one that no training run saved."""
        lineage = state.get(LINEAGE)
        ancestors = lineage.get("ancestors") if isinstance(lineage, dict) else None
        if not isinstance(ancestors, list) or len(ancestors) > MAX_ANCESTORS:
            return cls()
        return cls(tuple(save for entry in ancestors if (save := _save(entry))))

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        return {"ancestors": [[save.step, save.save_id] for save in self.ancestors]}

    def after(self, save: Save) -> tuple[Save, ...]:
        """The ancestors of the next checkpoint, when this one was saved as `save`."""
        return (*self.ancestors, save)[-MAX_ANCESTORS:]


def _save(entry: Any) -> Save | None:
    if not isinstance(entry, list) or len(entry) != 2:
        return None
    step, save_id = entry
    is_valid = type(step) is int and 0 <= step < 1 << 63 and isinstance(save_id, str)
    return Save(step, save_id) if is_valid and SAVE_ID.fullmatch(save_id) else None
