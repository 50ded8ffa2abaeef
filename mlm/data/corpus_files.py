"""What lies in a corpus folder, and what is said about it for machines."""

import json
import os
from pathlib import Path
from typing import Any

import mlm
from mlm.data.indexed import bin_path, idx_path
from mlm.data.parts import SPLITS
from mlm.data.receipt import Receipt, read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.errors import UserError
from mlm.files import results as result_files

TOKENIZER = "tokenizer.json"
ORIGINS = ".origins"  # ends the prefix of a file that says where documents came from
MARKER = ".building"  # left in a folder by a build that is under way, or was killed


def corpora_at(path: str) -> tuple[Path, list[Path]]:
    """The folder of the corpora that `path` names, and their prefixes: all in a folder, or one.

    Train, validation and test come first. Raises UserError when there is none.
    """
    place = Path(path)
    if place.is_dir():
        files = [file for file in place.iterdir() if file.suffix in (".bin", ".idx")]
        found = {file.with_suffix("") for file in files if not file.name.startswith(".")}
        found -= {prefix for prefix in found if prefix.name.endswith(ORIGINS)}
        if not found:
            raise UserError(f"path={path} holds no .bin and .idx: name a corpus folder, or a prefix")
        return place, sorted(found, key=_order)
    prefix = place.with_suffix("") if place.suffix in (".bin", ".idx") else place
    if not (bin_path(prefix).is_file() or idx_path(prefix).is_file()):
        raise UserError(
            f"no corpus at path={path}: name a folder with .bin and .idx files, or a prefix of two"
        )
    return prefix.parent, [prefix]


def _order(prefix: Path) -> tuple[int, str]:
    name = prefix.name
    return (SPLITS.index(name) if name in SPLITS else len(SPLITS), name)


def size_of(path: Path) -> int:
    """Bytes of a file, 0 where there is none."""
    return path.stat().st_size if path.is_file() else 0


def tokenizer_beside(folder: Path) -> Tokenizer | None:
    """The tokenizer in a corpus folder, if there is one. Raises UserError, CorruptFileError."""
    path = folder / TOKENIZER
    if not os.path.lexists(path):
        return None
    eod = (read_receipt(folder) or {}).get("eod")
    return Tokenizer.load(path, eod=eod if isinstance(eod, str) else None)


def eod_of(receipt: Receipt | None, tokenizer: Tokenizer | None) -> int | None:
    """The end-of-document token, None when nothing says which it is."""
    eod_id = (receipt or {}).get("eod_id")
    if type(eod_id) is int:
        return eod_id
    return None if tokenizer is None else tokenizer.eod_id


def origins_of(prefix: Path) -> Path:
    """Prefix of the file that says where the documents of another came from."""
    return prefix.with_name(prefix.name + ORIGINS)


def write_result(out: str, result: dict[str, Any]) -> None:
    """Write the JSON for machines. Raises UserError."""
    text = json.dumps({**result, "versions": {"mlm": mlm.__version__}}, indent=2, allow_nan=False) + "\n"
    result_files.write_result(out, text.encode())
