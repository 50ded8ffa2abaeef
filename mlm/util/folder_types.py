"""Folders that mlm makes: their marker, the names written in each type, recognition of older ones."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mlm.util.atomic import read_regular

MARKER = ".mlm.json"
FORMAT = "mlm-folder-1"
HEAD = 1 << 16  # bytes read of a marker, or to recognise a file
LOCK = ".lock"  # of a folder of checkpoints: made before anything else


@dataclass(frozen=True)
class Kind:
    """A type of folder that mlm makes."""

    noun: str
    """In messages: "a run"."""
    writes: tuple[str, ...]
    """Patterns of the names written at its top: in the way if they exist, and deleted by `delete_owned`."""
    inside: tuple[str, ...] = ()
    """Patterns of the names written in its subfolders; none: all of these folders is ours."""
    older: Callable[[Path], bool] = lambda folder: False
    """True for a folder without a marker that an earlier version wrote."""


def _head(path: Path) -> bytes:
    """Return the beginning of a regular file, empty if it cannot be read."""
    try:
        return read_regular(path, HEAD)
    except OSError:
        return b""


def is_run_config(path: Path) -> bool:
    """True if a config.yaml was written by a run."""
    return _head(path).startswith(b"defaults:\n- hydra_quiet\n- ")


SUMMARY_MARK = "<!-- Written by mlm, which replaces this file. -->"


def is_summary(path: Path) -> bool:
    """True if a README.md is the summary of a run."""
    head = _head(path).decode(errors="replace")
    return SUMMARY_MARK in head or ("\n## What ran\n" in head and "\n## Results\n" in head)


def _is_older_run(folder: Path) -> bool:
    config, summary = folder / "config.yaml", folder / "README.md"
    if os.path.lexists(config) and not is_run_config(config):
        return False
    if os.path.lexists(summary) and not is_summary(summary):
        return False
    return config.exists() or any(folder.glob("checkpoints/step-*/manifest.json"))


def _is_older_corpus(folder: Path) -> bool:
    marker = folder / ".building"
    if marker.is_file() and not marker.is_symlink() and marker.stat().st_size == 0:
        return True
    head = _head(folder / "corpus.json")
    return b'"format": "mlm-corpus-' in head or (b'"vocab_size"' in head and b'"eod_id"' in head)


def _is_older_work(folder: Path) -> bool:
    names = os.listdir(folder)
    return "lock" in names and all(matches(name, KINDS["corpus-work"].writes) for name in names)


def _is_older_unfinished(folder: Path) -> bool:
    """True for `.NAME.partial` with only its lock and NAME."""
    return set(os.listdir(folder)) <= {LOCK, folder.name.removeprefix(".").removesuffix(".partial")}


def _is_older_predictions(folder: Path) -> bool:
    """True for `predictions` in a run, or tables of predictions alone."""
    if folder.name == "predictions" and is_ours(folder.parent, "run"):
        return True
    files = list(folder.iterdir())
    return bool(files) and all(_head(file).startswith(b"index\tprediction\n") for file in files)


KINDS: dict[str, Kind] = {
    "run": Kind(
        "a run",
        (
            *("config.yaml", "tokenizer.json", "metrics.jsonl", "loss.png", "README.md", "checkpoints"),
            *("best", "result.json", "predictions", "incidents", "profile"),
        ),
        older=_is_older_run,
    ),
    "corpus": Kind(
        "a corpus",
        (
            *(f"{part}.{end}" for part in ("train", "validation", "test") for end in ("bin", "idx")),
            *(f"{part}.origins.{end}" for part in ("train", "validation", "test") for end in ("bin", "idx")),
            *("corpus.json", "tokenizer.json", "rejected.jsonl", "corpus-inputs.jsonl", ".building", "work"),
        ),
        older=_is_older_corpus,
    ),
    "corpus-work": Kind(
        "the work of a build",
        (
            *("lock", "plan.jsonl", "plan.json", "digests.json", "jobs.json"),
            *("tokenizer.json", "evaluation.jsonl"),
            *(f"{stage}-{'[0-9a-f]' * 8}*" for stage in ("clean", "match", "group", "verify", "gather")),
            *(f"{stage}-{'[0-9a-f]' * 8}*" for stage in ("tokenise", "merge")),
        ),
        (
            *(f"{'[0-9]' * 5}{rest}" for rest in (".*", "*.npy", "*.bin", "*.idx")),
            *(f".{'[0-9]' * 5}.*", ".*.partial", "*.partial", "datatrove", "rejected.jsonl"),
            *("members.npy", "bounds.npy", "near.npy", "again.npy", "firsts.npy"),
            *(f"{part}[.-]*" for part in ("train", "validation", "test")),
        ),
        _is_older_work,
    ),
    "exported-model": Kind("an exported model", ("*",)),
    "predictions": Kind("predictions", ("*.tsv", "*.json"), older=_is_older_predictions),
    "verify-resume": Kind("a verify-resume", ()),
    "unfinished": Kind("an import or export that did not finish", (), older=_is_older_unfinished),
}
"""Folders that mlm makes. In a user's folder, names in `writes` are never replaced."""


def read_marker(folder: Path) -> dict[str, Any] | None:
    """Read the marker of a folder, None if it has none of ours."""
    try:
        found = json.loads(read_regular(folder / MARKER, HEAD))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def kind_of_folder(folder: Path) -> str | None:
    """Return the type (a key of KINDS) of a folder that mlm made, by marker or content; else None."""
    if (marker := read_marker(folder)) is not None:
        kind = marker.get("kind")
        return kind if isinstance(kind, str) and kind in KINDS else None
    if not folder.is_dir():
        return None
    try:
        return next((name for name in ("run", "corpus", "corpus-work") if KINDS[name].older(folder)), None)
    except OSError:
        return None


def is_ours(folder: Path, kind: str) -> bool:
    """True if mlm made `folder`, of this type. Raises OSError if it cannot be read."""
    if not folder.is_dir():
        return False
    marker = read_marker(folder)
    return KINDS[kind].older(folder) if marker is None else marker.get("kind") == kind


def matches(name: str, patterns: Iterable[str]) -> bool:
    """True if a name fits one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
