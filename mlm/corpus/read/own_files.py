"""Files that builds write, told apart from the user's: they are never read as input."""

import os
from collections.abc import Collection
from pathlib import Path

from mlm.data.receipt import INPUTS, RECEIPT, REJECTED
from mlm.errors import UserError
from mlm.files.folder_types import KINDS, kind_of_folder, matches

OF_BUILDS = ("corpus", "corpus-work")
IN_OUT = (REJECTED, INPUTS, RECEIPT, "tokenizer.json")


def own_names(folder: Path, names: Collection[str]) -> set[str]:
    """The entries of a folder that a build wrote: of a corpus, or of what lies between its stages."""
    kind = kind_of_folder(folder)
    return {name for name in names if matches(name, KINDS[kind].writes)} if kind in OF_BUILDS else set()


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
