"""The tokenizer that a checkpoint was trained with, known by its digest.

`state["tokenizer"]` holds the digest of tokenizer.json and, where the file was read, that of its vocabulary
alone and the id of the end-of-document token, which the file does not tell. The file lies in the run
directory, beside the folder of checkpoints.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.format import RESTORE
from mlm.util.errors import CorruptFileError
from mlm.util.files import digest_file
from mlm.util.ownership import file_type_name

TOKENIZER = "tokenizer.json"
KEY = "tokenizer"
"""Key of a checkpoint's state."""
DIGEST = re.compile(r"xxh3:[0-9a-f]{32}")


@dataclass(frozen=True)
class TokenizerDigest:
    """A tokenizer as a checkpoint knows it."""

    digest: str
    """Digest of tokenizer.json."""
    vocabulary: str | None = None
    """Digest of its tokens, ids and merges: the same for another file that spells the same vocabulary."""
    eod_id: int | None = None
    """The token that ends a document in what was trained on; None in checkpoints of older versions."""

    def is_same(self, other: "TokenizerDigest") -> bool:
        """True if both turn text into the same tokens, as far as the digests tell."""
        return self.digest == other.digest or (
            self.vocabulary is not None and self.vocabulary == other.vocabulary
        )

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "TokenizerDigest | None":
        """Entry of a checkpoint's state; None for one of an older version, or without a tokenizer."""
        entry = state.get(KEY)
        if not isinstance(entry, dict):
            return None
        digest, vocabulary = entry.get("digest"), entry.get("vocabulary")
        if not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
            return None
        known = isinstance(vocabulary, str) and DIGEST.fullmatch(vocabulary)
        eod_id = entry.get("eod_id")
        return cls(digest, vocabulary if known else None, eod_id if type(eod_id) is int else None)


def tokenizer_path(directory: Path) -> Path:
    """tokenizer.json of the run whose checkpoint the step-… `directory` is."""
    return directory.parent.parent / TOKENIZER


def check_run_tokenizer(directory: Path, state: Mapping[str, Any]) -> None:
    """Raise CorruptFileError if tokenizer.json is no file, or not the one the checkpoint was trained with."""
    known, path = TokenizerDigest.of(state), tokenizer_path(directory)
    if os.path.lexists(path) and not path.is_file():
        raise CorruptFileError(f"{path}: is {file_type_name(path)}, no regular file. {RESTORE}")
    if known is None or not path.is_file():
        return
    if (digest := digest_file(path)) != known.digest:
        raise CorruptFileError(
            f"{path}: damaged or replaced, digest {digest}, {directory.name} was trained with "
            f"{known.digest}. {RESTORE}"
        )
