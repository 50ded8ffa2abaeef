"""The texts that stage `clean` kept, read from their files.

They are read, not mapped: the pages of a map count as memory of the process, up to the size of the file.
"""

import os
from pathlib import Path

from mlm.corpus.read.long_text import LONG, StoredText
from mlm.data.indexed import IndexedDataset


class StoredTexts:
    """Texts by number. A file stays open."""

    def __init__(self, prefix: Path) -> None:
        self._index = IndexedDataset(prefix, allow_empty=True)
        self._file = open(self._index.bin_path, "rb", buffering=0)  # noqa: SIM115

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Of all texts."""
        return self._index.num_tokens

    def raw(self, number: int) -> bytes | StoredText:
        """A text in UTF-8; a long one stays in its file."""
        begin, size = int(self._index.pointers[number]), int(self._index.lengths[number])
        if size > LONG:
            return StoredText(self._file.fileno(), begin, size)
        return os.pread(self._file.fileno(), size, begin)

    def text(self, number: int) -> str | StoredText:
        """A text."""
        found = self.raw(number)
        return found.decode() if isinstance(found, bytes) else found

    def close(self) -> None:
        self._file.close()
