"""Reading a shard: its documents in order, and everything that is none named by file and line.

A `.jsonl` file holds one object per line; a byte order mark before the first is passed over, and so are empty
lines. A `.txt` file is one document, or several that end at lines holding only `<|endoftext|>`. Empty texts
are documents. NUL is a letter like any other: it is valid in UTF-8 and in JSON (ftfy removes it).

A core reads about 330 MB/s of text from .jsonl, parsed with the standard library's json; orjson would parse
in half the time, which is nothing beside tokenising at 3 MB/s.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from mlm.corpus.read.hub import read_hub
from mlm.corpus.read.long_json import LongLine
from mlm.corpus.read.long_text import LONG, JsonText, Utf8Text
from mlm.corpus.read.one_text import TEXT_END
from mlm.corpus.read.openers import DamagedError, blocks, first_line, lines
from mlm.corpus.read.records import (
    ID,
    RULES,
    BadRecordError,
    Document,
    Intake,
    LinesBefore,
    Place,
    Rejected,
    Shard,
)
from mlm.corpus.read.tables import read_parquet

__all__ = ["RULES", "TEXT_END", "Document", "Place", "Rejected", "read_shard"]

BOM = b"\xef\xbb\xbf"


class Advance:
    """Tells a progress bar of what is done: `end - begin` of the shard in all, whatever its reader does."""

    def __init__(self, tell: Callable[[int], None], total: int) -> None:
        self.tell, self.left = tell, total

    def __call__(self, count: int) -> None:
        count = min(count, self.left)
        self.left -= count
        if count:
            self.tell(count)

    def finish(self) -> None:
        self(self.left)


def read_shard(
    shard: Shard,
    *,
    text_key: str,
    id_key: str | None,
    max_bytes: int,
    reject: Callable[[Rejected], None],
    advance: Callable[[int], None],
    keep_ids: bool = False,
) -> Iterator[Document]:
    """The documents of a shard in corpus order.

    `reject` hears of every record that gives no document; when it returns, reading goes on. `advance` hears
    of bytes, rows or shards done (the unit of `shard.begin`), `shard.end - shard.begin` in all. Memory holds
    one record and a few blocks, whatever the file holds. Raises UserError for a file that cannot be opened
    or a Hub that cannot be reached.
    """
    intake = Intake(text_key, id_key, max_bytes, reject, keep_ids)
    moved = Advance(advance, shard.end - shard.begin)
    match shard.kind.partition(".")[0]:
        case "jsonl":
            yield from read_jsonl(shard, intake, moved)
        case "txt":
            yield from read_text(shard, intake, moved)
        case "slice":
            yield from read_slice(shard, intake, moved)
        case "parquet":
            yield from read_parquet(shard, intake, moved)
        case "hub":
            yield from read_hub(shard, intake)
        case _:
            raise AssertionError(f"shard of unknown kind {shard.kind}")
    moved.finish()


def read_jsonl(shard: Shard, intake: Intake, moved: Callable[[int], None]) -> Iterator[Document]:
    """Documents of the lines whose first byte lies in the shard."""
    begin = first_line(shard.path, shard.begin, shard.end)
    if begin is None:
        return
    found = lines(blocks(shard.path, begin=begin, moved=moved), intake.max_bytes)
    before, position, number = LinesBefore(shard.path, begin), begin, 0
    plain = shard.kind == "jsonl"  # its bytes are those of the file
    try:
        for line, length in found:
            if plain and position >= shard.end:
                break
            number += 1
            place = Place(shard.path, number, before=before)
            if line is not None and position == 0:
                line = line.removeprefix(BOM)
            if line is None or (line and not line.isspace()):
                try:
                    document = json_document(line, intake, place)
                except BadRecordError as fault:
                    intake.reject(place, fault)
                else:
                    yield document
                    del document  # a long one is let go before the next is read
            position += length
            del line
    except DamagedError as error:
        intake.damaged(Place(shard.path, number + 1, before=before), error)


def json_document(line: bytes | bytearray | None, intake: Intake, place: Place) -> Document:
    """The document of one line, None for one that is too long. Raises BadRecordError."""
    if line is None:
        raise intake.too_long("line")
    if len(line) > LONG:
        return long_json_document(line, intake, place)
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRecordError("not_utf8", f"not UTF-8 ({error.reason} at byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise BadRecordError(
            "not_json", f"not a line of JSON ({error.msg} at letter {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, lists in lists without end
        raise BadRecordError("not_json", f"not a line of JSON ({type(error).__name__})") from error
    if not isinstance(record, dict):
        raise BadRecordError("not_object", f"a JSON {type(record).__name__}, not an object")
    return intake.document(record, place)


def long_json_document(line: bytes | bytearray, intake: Intake, place: Place) -> Document:
    """The document of a long line. Raises BadRecordError."""
    found = LongLine(line)
    if not isinstance(found.record, dict):
        raise BadRecordError("not_object", f"a JSON {type(found.record).__name__}, not an object")
    text = found.value(intake.text_key) if intake.text_key in found.record else None
    record: dict[str, Any] = {}
    for key in {intake.id_key or ID, ID} & found.record.keys():
        value = found.value(key)
        record[key] = "".join(value.pieces()) if isinstance(value, JsonText) else value
    if isinstance(text, JsonText):
        return intake.long_document(text, record, place)
    return intake.document(found.record | record | ({} if text is None else {intake.text_key: text}), place)


def read_text(shard: Shard, intake: Intake, moved: Callable[[int], None]) -> Iterator[Document]:
    """Documents of plain text; a document's place is its first line."""
    place = Place(shard.path, 1)
    try:
        for content, size, first in text_pieces(shard, intake.max_bytes, moved):
            place = Place(shard.path, first)
            try:
                document = text_document(content, size, intake, place)
            except BadRecordError as fault:
                intake.reject(place, fault)
            else:
                yield document
                del document
            del content
    except DamagedError as error:
        intake.damaged(Place(shard.path, error.line or place.number), error)


def read_slice(shard: Shard, intake: Intake, moved: Callable[[int], None]) -> Iterator[Document]:
    """The document that bytes begin … end - 1 of the content of a file are."""
    content, position, first = bytearray(), 0, 1
    try:
        for block in blocks(shard.path, moved=moved):
            begin, end = (min(max(at - position, 0), len(block)) for at in (shard.begin, shard.end))
            first += block.count(b"\n", 0, begin)
            content += block[begin:end]
            position += len(block)
            if position >= shard.end or len(content) > intake.max_bytes:
                break
        yield text_document(content, len(content), intake, Place(shard.path, first))
    except BadRecordError as fault:
        intake.reject(Place(shard.path, first), fault)
    except DamagedError as error:
        intake.damaged(Place(shard.path, first), error)


def text_pieces(
    shard: Shard, max_bytes: int, moved: Callable[[int], None]
) -> Iterator[tuple[bytearray, int, int]]:
    """Content, size and first line of every document; no content for one above `max_bytes`."""
    content, size, first, number = bytearray(), 0, 1, 0
    try:
        for line, length in lines(blocks(shard.path, moved=moved), max_bytes):
            number += 1
            if line is not None and line.strip() == TEXT_END:
                yield content, size, first
                content, size, first = bytearray(), 0, number + 1
                continue
            size += length
            if line is None or size > max_bytes:
                content = bytearray()  # dropped as it comes
            else:
                if isinstance(line, bytearray) and not content:
                    content = line  # a long one is not copied
                else:
                    content += line
                if length > len(line):
                    content += b"\n"
            del line
    except DamagedError as error:
        error.line = number + 1
        raise
    if size:
        yield content, size, first


def text_document(content: bytearray, size: int, intake: Intake, place: Place) -> Document:
    """A plain-text document of `size` bytes. Raises BadRecordError."""
    if size > intake.max_bytes:
        raise intake.too_long("document")
    if intake.id_key is not None:
        raise intake.without_id()
    begin = len(BOM) if place.number == 1 and content.startswith(BOM) else 0
    text = Utf8Text(content, begin, len(content))
    if (problem := text.problem()) is not None:
        reason, at = problem
        line = place.number + content.count(b"\n", 0, at)
        raise BadRecordError("not_utf8", f"not UTF-8 ({reason})", Place(place.source, line))
    size = len(content) - begin
    return Document(text if size > LONG else content[begin:].decode("utf-8"), size, place)
