"""Types that the readers of all formats share: inputs, shards, documents, locations, and bad records."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mlm.data.records import open_binary, readable
from mlm.util.errors import CorruptFileError, UserError, type_of

COUNT_BLOCK = 1 << 20  # bytes read at a time when lines are counted: 1 MiB


@dataclass(frozen=True, slots=True)
class Input:
    """One file, object of a store, or Hub dataset."""

    name: str
    """Its path below the folder or glob that was given: names are unique in a build."""
    path: str
    bytes: int
    """Size of the file; of a Hub dataset the size on its card, 0 if unknown."""
    digest: str
    """Content digest: empty for files until they are read; a Hub dataset's is its commit, an object's its
    ETag."""
    split: str | None
    """The part it belongs to, None if its documents are divided."""
    state: tuple[int, ...] = ()
    """Size and times of change when it was digested; empty for a Hub dataset."""


@dataclass(frozen=True, slots=True)
class InputShard:
    """Range of an input that one task reads. Plain values, which JSON can hold."""

    input: Input
    kind: str
    """jsonl, txt, slice (also .gz, .zst, .bz2, .xz), parquet or hub. A slice is a part of one text."""
    begin: int
    """In bytes of a file (of a slice: of its content), rows of a Parquet file (where row groups begin), or
    shards of a Hub dataset."""
    end: int
    split: str | None

    @property
    def path(self) -> str:
        """Path of the input."""
        return self.input.path


@dataclass(slots=True)
class LinesBefore:
    """Lines of a file before byte `begin`, counted when first asked for: only errors need the number."""

    path: str
    begin: int
    known: int | None = None

    def count(self) -> int:
        """Count newlines in the first `begin` bytes. Raises UserError if the file can no longer be read."""
        if self.known is None:
            self.known, left = 0, self.begin
            with readable(self.path), open_binary(self.path) as f:
                while left and (block := f.read(min(left, COUNT_BLOCK))):
                    self.known += block.count(b"\n")
                    left -= len(block)
        return self.known


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a record; `str(place)` is shown to users: `file:12`, or `file:row 12` in a table."""

    source: str
    number: int
    """Line or row, from 1 on, after `before`."""
    unit: str = ""
    before: LinesBefore | None = None

    @property
    def line(self) -> int:
        """Line or row in its file, from 1 on."""
        return self.number + (self.before.count() if self.before else 0)

    def __str__(self) -> str:
        return f"{self.source}:{self.unit}{self.line}"


@dataclass(slots=True)
class Document:
    """One text and its location. The text may be empty."""

    text: str
    num_bytes: int
    """Bytes of the text in UTF-8, as it was read."""
    place: Place


class BadRecordError(Exception):
    """A record that is not a document: the rule it breaks, and the problem in one line, without a fix."""

    def __init__(self, rule: str, detail: str, place: Place | None = None) -> None:
        super().__init__(rule, detail)
        self.rule, self.detail, self.place = rule, detail, place
        """Its location, which its reader sets where `reject` would not know it exactly."""

    def to_user_error(self, fix: str) -> UserError:
        """Return the error of a command that stops here."""
        kind = CorruptFileError if self.rule == "damaged" else UserError
        return kind(f"{self.place}: {self.detail}: {fix}")


@dataclass(frozen=True, slots=True)
class Intake:
    """Settings that the readers of all formats share, and a callback for bad records."""

    text_key: str
    max_bytes: int
    """Longest line or text."""
    on_reject: Callable[[BadRecordError], None] = field(repr=False)

    def reject(self, place: Place, error: BadRecordError) -> None:
        """Report a bad record; the caller decides if that ends the build."""
        error.place = error.place or place
        self.on_reject(error)

    def damaged(self, place: Place, reason: object) -> None:
        """Report that the rest of a file cannot be read."""
        why = " ".join(str(reason).split())
        self.reject(place, BadRecordError("damaged", f"the file is damaged and its rest is lost ({why})"))

    def document(self, record: Mapping[str, Any], place: Place) -> Document:
        """Make the document of a JSON object or table row. Raises BadRecordError."""
        if self.text_key not in record:
            raise self.without_text(record)
        text = record[self.text_key]
        if not isinstance(text, str):
            raise BadRecordError("text_type", f'"{self.text_key}" holds {type_of(text)}, not a text')
        return Document(text, self.measure(text), place)

    def without_text(self, keys: Iterable[str]) -> BadRecordError:
        """Return the error of a record that has only these keys or columns."""
        known = ", ".join(islice((" ".join(str(key).split())[:40] for key in keys), 20)) or "none"
        detail = f'no key "{self.text_key}" (its keys: {known}; text_key names the one with the text)'
        return BadRecordError("no_text", detail)

    def measure(self, text: str) -> int:
        """Count UTF-8 bytes of a text. Raises BadRecordError."""
        if text.isascii():
            size = len(text)
        else:
            try:
                size = len(text.encode("utf-8"))
            except UnicodeEncodeError as error:  # JSON can spell what UTF-8 cannot encode
                detail = f"half a surrogate pair at letter {error.start + 1}"
                raise BadRecordError("surrogate", detail) from error
        if size > self.max_bytes:
            raise self.too_long("text")
        return size

    def too_long(self, what: str) -> BadRecordError:
        """Return the error of a line, text or document above `max_bytes`."""
        return BadRecordError("too_long", f"a {what} of more than max_document_bytes={self.max_bytes} bytes")
