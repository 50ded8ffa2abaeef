"""Types shared by the readers of all formats: inputs, shards, documents, locations, and bad records."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

from mlm.corpus.read.encoding import UTF_8
from mlm.data.streams import DAMAGED, open_binary, readable
from mlm.util.errors import CorruptFileError, UserError, type_of


@dataclass(frozen=True, slots=True)
class Input:
    """One file, object of a store, or Hub dataset."""

    name: str
    """Path below the user's folder or glob; unique in a build."""
    path: str
    bytes: int
    """Size of the file, or of a Hub dataset by its card; 0 if unknown."""
    digest: str
    """Content digest, "" for files before they are read; commit of a Hub dataset, ETag of an object."""
    split: str | None
    """Part of the corpus, None if documents are assigned to parts."""
    state: tuple[int, ...] = ()
    """Size and modification times when it was digested; () for a Hub dataset."""
    encoding: str = UTF_8
    """Python's name of its encoding."""


@dataclass(frozen=True, slots=True)
class InputShard:
    """Range of an input that one task reads."""

    input: Input
    kind: str
    """jsonl, txt, html (also .gz, .zst, .bz2, .xz), parquet or hub."""
    begin: int
    """In bytes of a file, rows of a Parquet file (at row groups), or shards of a Hub dataset."""
    end: int

    @property
    def path(self) -> str:
        return self.input.path


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Location of a record; `str(location)` is `file:12`, or `file:row 12` in a table."""

    source: str
    number: int
    """Line or row, counted from 1 at byte `begin` of the file."""
    unit: str = ""
    begin: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.unit}{self.number + lines_before(self.source, self.begin)}"


@lru_cache(maxsize=4)
def lines_before(path: str, begin: int) -> int:
    """Count newlines in the first `begin` bytes of a file, for errors. Raises UserError."""
    if begin == 0:
        return 0
    count, remaining = 0, begin
    with readable(path), open_binary(path) as f:
        while remaining and (block := f.read(min(remaining, 1 << 20))):
            count += block.count(b"\n")
            remaining -= len(block)
    return count


@dataclass(slots=True)
class Document:
    """A text, which may be empty, and its location."""

    text: str
    num_bytes: int
    """Bytes of the text in UTF-8, as it was read."""
    location: RecordLocation


class BadRecordError(Exception):
    """A record that is not a document: the violated rule, and the problem in one line.

    Attributes:
        location: set by a reader with a more exact location than `reject` receives
        fix: None for the command's default
    """

    def __init__(
        self, rule: str, detail: str, location: RecordLocation | None = None, fix: str | None = None
    ) -> None:
        super().__init__(rule, detail)
        self.rule, self.detail, self.location, self.fix = rule, detail, location, fix

    def to_user_error(self, fix: str) -> UserError:
        kind = CorruptFileError if self.rule == "damaged" else UserError
        return kind(f"{self.location}: {self.detail}: {self.fix or fix}")


@dataclass(frozen=True, slots=True)
class Intake:
    """Settings shared by the readers of all formats, and a callback for bad records."""

    text_key: str
    max_bytes: int
    """Longest line or text."""
    on_reject: Callable[[BadRecordError], None] = field(repr=False)

    def reject(self, location: RecordLocation, error: BadRecordError) -> None:
        error.location = error.location or location
        self.on_reject(error)

    def attempt(
        self, location: RecordLocation, make: Callable[..., Document], *arguments: Any
    ) -> Iterator[Document]:
        """Yield the document that `make` returns, or reject the bad record that it raises."""
        try:
            document = make(*arguments)
        except BadRecordError as error:
            self.reject(location, error)
        else:
            yield document

    def damaged(self, location: RecordLocation, reason: object) -> None:
        line = " ".join(str(reason).split())
        self.reject(location, BadRecordError("damaged", f"the file is {DAMAGED}; its rest is lost ({line})"))

    def document(self, record: Mapping[str, Any], location: RecordLocation) -> Document:
        """Make the document of a JSON object or table row. Raises BadRecordError."""
        if self.text_key not in record:
            raise self.without_text(record)
        text = record[self.text_key]
        if not isinstance(text, str):
            raise BadRecordError("text_type", f'"{self.text_key}" holds {type_of(text)}, not a text')
        try:
            size = len(text) if text.isascii() else len(text.encode("utf-8"))
        except UnicodeEncodeError as error:  # JSON can spell what UTF-8 cannot encode
            raise BadRecordError("surrogate", f"half a surrogate pair at letter {error.start + 1}") from error
        if size > self.max_bytes:
            raise self.too_long("text")
        return Document(text, size, location)

    def without_text(self, keys: Iterable[str]) -> BadRecordError:
        """Return the error of a record whose keys or columns lack the text."""
        listed = ", ".join(islice((" ".join(str(key).split())[:40] for key in keys), 20)) or "none"
        detail = f'no key "{self.text_key}" (its keys: {listed}; text_key names the one with the text)'
        return BadRecordError("no_text", detail)

    def too_long(self, noun: str) -> BadRecordError:
        return BadRecordError("too_long", f"a {noun} of more than max_document_bytes={self.max_bytes} bytes")
