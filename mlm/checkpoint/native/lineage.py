"""Descent of checkpoints, and the file `latest`, which names the one to continue from.

A save names the saves it descends from, so that a damaged checkpoint gives way to one of its own past and
never to one of a branch that was abandoned by a roll-back. README.md specifies both forms.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlm.util.atomic import digest_bytes

STEP_NAME = re.compile(r"step-(\d{8,18})")
SAVE_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
MAX_ANCESTORS = 1000
"""Saves of the past that a checkpoint names, the newest ones."""
MAX_POINTER_BYTES = 1 << 18  # `latest` with MAX_ANCESTORS of the longest names
LINEAGE = "lineage"
"""Key of a checkpoint's state."""
DIGEST, SAVED, AFTER = "digest", "save", "after"
"""First words of the lines of `latest`."""


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
    saved_at: float = 0.0
    """Seconds since 1970: identifies the live branch if `latest` is lost."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Lineage | None":
        """The lineage in a checkpoint's state; None for one of an older version, or of none of ours."""
        said = state.get(LINEAGE)
        if not isinstance(said, dict):
            return None
        ancestors, saved_at = said.get("ancestors"), said.get("saved_at")
        if not isinstance(ancestors, list) or len(ancestors) > MAX_ANCESTORS:
            return None
        found = [_save(entry) for entry in ancestors]
        if None in found or isinstance(saved_at, bool) or not isinstance(saved_at, int | float):
            return None
        return cls(tuple(save for save in found if save), float(saved_at))

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "ancestors": [[save.step, save.save_id] for save in self.ancestors],
            "saved_at": self.saved_at,
        }

    def after(self, save: Save) -> tuple[Save, ...]:
        """The ancestors of the next checkpoint, when this one was saved as `save`."""
        return (*self.ancestors, save)[-MAX_ANCESTORS:]


def _save(said: Any) -> Save | None:
    if not isinstance(said, list) or len(said) != 2:
        return None
    step, save_id = said
    sound = type(step) is int and 0 <= step < 1 << 63 and isinstance(save_id, str)
    return Save(step, save_id) if sound and SAVE_ID.fullmatch(save_id) else None


@dataclass(frozen=True)
class Pointer:
    """Content of `latest`."""

    name: str | None
    """Name of the directory; None when there is no such file, or it cannot be believed."""
    save_id: str | None = None
    """None where a user, or an older version, wrote the name alone: the past is not known then."""
    ancestors: tuple[Save, ...] = ()
    problem: str | None = None
    """Reason why it cannot be believed."""


def encode_pointer(name: str, save_id: str, lineage: Lineage | None) -> bytes:
    """`latest` as it is written: the name, the save and its past where known, and a digest of these lines."""
    lines = [name]
    if lineage is not None and SAVE_ID.fullmatch(save_id):
        lines.append(f"{SAVED} {save_id}")
        lines += [f"{AFTER} {save.step} {save.save_id}" for save in lineage.ancestors]
    body = "".join(f"{line}\n" for line in lines).encode()
    return body + f"{DIGEST} {digest_bytes(body)}\n".encode()


def decode_pointer(content: bytes) -> Pointer:
    """The inverse of `encode_pointer`; a single line is a name that a user or an older version wrote."""
    try:
        lines = content.decode("ascii").strip().split("\n")
    except UnicodeDecodeError:
        return Pointer(None, problem="it is damaged")
    if len(lines) == 1:
        named = STEP_NAME.fullmatch(lines[0].strip())
        return Pointer(named[0]) if named else Pointer(None, problem="it names no checkpoint (step-…)")
    body = "".join(f"{line}\n" for line in lines[:-1]).encode()
    if lines[-1] != f"{DIGEST} {digest_bytes(body)}" or len(content) > MAX_POINTER_BYTES:
        return Pointer(None, problem="its digest does not match its content: it was altered or damaged")
    name, *facts = lines[:-1]
    save_id = facts[0].removeprefix(f"{SAVED} ") if facts else None
    past = tuple(save for line in facts[1:] if (save := _after(line)))
    if not STEP_NAME.fullmatch(name) or len(past) != len(facts[1:]):
        return Pointer(None, problem="it names no checkpoint (step-…)")
    return Pointer(name, save_id, past)


def _after(line: str) -> Save | None:
    word, _, rest = line.partition(" ")
    step, _, save_id = rest.partition(" ")
    sound = word == AFTER and step.isdecimal() and len(step) < 19
    return _save([int(step), save_id]) if sound else None
