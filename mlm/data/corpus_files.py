"""Files of a corpus folder, and the assignment of documents to its parts (train, validation, test)."""

import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import xxhash

from mlm.data.config import SPLITS
from mlm.data.indexed import bin_path, idx_path
from mlm.data.receipt import Receipt, read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError

TOKENIZER = "tokenizer.json"


def parse_split(text: str) -> tuple[float, ...]:
    """Parse shares of train, validation and test. Raises UserError unless they are three and sum to 1."""
    try:
        shares = tuple(float(share) for share in text.replace("/", ",").split(","))
    except ValueError:
        shares = ()
    is_valid = len(shares) == len(SPLITS) and all(0 <= share <= 1 for share in shares) and shares[0] > 0
    if not is_valid or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise UserError(
            f"split={text} is not three shares that sum to 1; write for example split=0.98/0.01/0.01"
        )
    return shares


def split_of_document(text: bytes, shares: Iterable[float], seed: int) -> str:
    """Return the part of a document, a function of seed and text alone.

    So a document keeps its part if others are added or removed, and equal documents are in one part.
    """
    draw = xxhash.xxh3_64_intdigest(struct.pack("<Q", seed % (1 << 64)) + text) / 2**64
    bound, part = 0.0, SPLITS[0]
    for name, share in zip(SPLITS, shares, strict=True):
        if share > 0:
            bound, part = bound + share, name
            if draw < bound:
                return part
    return part  # the shares sum to a hair less than 1


def corpora_at(path: str) -> tuple[Path, list[Path]]:
    """Return the folder of the corpora at `path`, and their prefixes: all in a folder, or one.

    Train, validation and test come first. Raises UserError without a corpus.
    """
    folder = Path(path)
    if folder.is_dir():
        files = [file for file in folder.iterdir() if file.suffix in (".bin", ".idx")]
        names = sorted({file.stem for file in files if not file.name.startswith(".")})
        if not names:
            raise UserError(f"path={path} holds no .bin and .idx: name a corpus folder, or a prefix")
        parts = [name for name in SPLITS if name in names]
        return folder, [folder / name for name in (*parts, *(name for name in names if name not in parts))]
    prefix = folder.with_suffix("") if folder.suffix in (".bin", ".idx") else folder
    if not (bin_path(prefix).is_file() or idx_path(prefix).is_file()):
        raise UserError(
            f"no corpus at path={path}: name a folder with .bin and .idx files, or a prefix of two"
        )
    return prefix.parent, [prefix]


def tokenizer_beside(folder: Path) -> Tokenizer | None:
    path = folder / TOKENIZER
    if not os.path.lexists(path):
        return None
    receipt = read_receipt(folder) or {}
    eod, bos = receipt.get("eod_id"), receipt.get("bos_id")
    return Tokenizer.load(path, eod=eod if type(eod) is int else None, bos=bos if type(bos) is int else None)


def eod_of(receipt: Receipt | None, tokenizer: Tokenizer | None) -> int | None:
    eod_id = (receipt or {}).get("eod_id")
    if type(eod_id) is int:
        return eod_id
    return None if tokenizer is None else tokenizer.eod_id
