"""Files that builds write, told apart from the user's: they are never read as input."""

import os
import re
from collections.abc import Collection
from pathlib import Path

from mlm.config.errors import CorruptFileError, UserError
from mlm.data.corpus_files import MARKER, TOKENIZER
from mlm.data.receipt import INPUTS, RECEIPT, REJECTED, read_receipt

FORMAT = "mlm-corpus-"  # how the format of our receipts begins
STAGE = re.compile(r"(clean|match|group|verify|gather|tokenise|merge)-[0-9a-f]{16}")
IN_WORK = frozenset(("digests.json", "plan.json", "lock", "jobs.json", "evaluation.jsonl", TOKENIZER))
WORK_MARKS = frozenset(("digests.json", "lock"))
IN_OUT = frozenset((REJECTED, INPUTS, TOKENIZER, RECEIPT))


def own_names(folder: Path, folders: Collection[str], files: Collection[str]) -> set[str]:
    """The entries of a folder that a build wrote.

    A corpus is known by its receipt, which lists its files, or by the marker of a build under way; a work
    folder by its lock and its digests.
    """
    names = set(files)
    own = set[str]()
    if RECEIPT in names:
        own |= listed_in_receipt(folder)
    if MARKER in names:
        own |= IN_OUT & names
    if names >= WORK_MARKS:
        own |= (IN_WORK & names) | {name for name in folders if STAGE.fullmatch(name)}
    return own


def listed_in_receipt(folder: Path) -> set[str]:
    """A receipt of ours and the files it lists; nothing where corpus.json is someone else's."""
    try:
        receipt = read_receipt(folder)
    except (CorruptFileError, OSError):
        return set()
    if receipt is None or not str(receipt.get("format", "")).startswith(FORMAT):
        return set()
    return {RECEIPT, *receipt.get("files", {})}


def check_apart(inputs: Collection[str], setting: str, out: str, work: str | None) -> None:
    """Reject a build that could not tell its files from its inputs, or would write over one.

    `inputs` are paths of files. Raises UserError.
    """
    place = os.path.realpath(out)
    between = os.path.realpath(work) if work is not None else os.path.join(place, "work")
    given = os.path.realpath(setting.partition("=")[2])
    written = {os.path.join(place, name) for name in IN_OUT}
    for path in inputs:
        real = os.path.realpath(path)
        key, folder = ("work", between) if is_below(real, between) else ("out", place)
        shown = work if key == "work" and work is not None else out
        if real in written:
            raise UserError(f"out={out} would replace the input {path}; set another out=")
        # what lies in `out` beside the corpus is the user's only where `out` is the input folder itself
        if is_below(real, folder) and not is_below(given, folder):
            raise UserError(
                f"{key}={shown} lies inside {setting} and holds {path}, which no build wrote; set another "
                f"{key}=, or move the file"
            )
        if key == "work" and is_below(real, between):
            raise UserError(f"{key}={shown} holds the input {path}; set another {key}=")


def is_below(path: str, folder: str) -> bool:
    """True if a path is a folder or lies in it. Both are real paths."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
