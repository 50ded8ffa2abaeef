"""Readers of lines and plain text: the documents of a shard in order, and every bad record by file and line.

A `.jsonl` file holds one object per line; a byte order mark before the first is skipped, and so are empty
lines. A `.txt` file is one document, or several that end at lines holding only `<|endoftext|>`. Empty texts
are documents. NUL is a character like any other: it is valid in UTF-8 and in JSON (ftfy removes it).

Of a long line of JSON the long strings are left in place and the rest is parsed. Quotes occur only in
strings, so these are found without parsing; each long one is replaced by a short name, and what is left, the
skeleton, is given to json.loads.

A core reads about 330 MB/s of text from .jsonl, parsed with the standard library's json; orjson would parse
in half the time, which is nothing beside tokenising at 3 MB/s.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from mlm.corpus.read.long_text import LONG, JsonText, Utf8Text
from mlm.corpus.read.records import (
    ID,
    BadRecordError,
    Document,
    Intake,
    LinesBefore,
    Place,
    Rejected,
    Shard,
)
from mlm.corpus.read.shards import TEXT_END
from mlm.corpus.read.streams import DamagedError, blocks, first_line, lines
from mlm.corpus.read.tables import read_hub, read_parquet
from mlm.util.errors import type_of

INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
HELD = 1 << 12
"""Bytes above which a string is left in the line."""
MOST = 1 << 22
"""Longest skeleton: as Python objects it takes up to thirty times its size."""


class LongLine:
    """A JSON object of more than LONG bytes. Raises BadRecordError."""

    def __init__(self, line: bytes | bytearray) -> None:
        self.line = line
        while (name := f"long string {secrets.token_hex(8)} ").encode() in line:
            pass
        self._name, self._strings = name, list[JsonText]()
        skeleton = self._skeleton()
        try:
            self.record = json.loads(skeleton.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BadRecordError("not_utf8", f"not UTF-8 ({error.reason})") from error
        except json.JSONDecodeError as error:
            raise BadRecordError("not_json", f"not a line of JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:
            raise BadRecordError("not_json", f"not a line of JSON ({type(error).__name__})") from error
        for text in self._strings:
            for _ in decoded(text):
                pass

    def value(self, key: str) -> Any:
        """Return a value of the object: a JsonText if it is a long string."""
        found = self.record[key]
        if not (isinstance(found, str) and found.startswith(self._name)):
            return found
        text = self._strings[int(found.removeprefix(self._name))]
        return text if text.end - text.begin > LONG else "".join(text.pieces())

    def _skeleton(self) -> bytes:
        """Return the line with its long strings replaced by names."""
        parts, copied, at = bytearray(), 0, 0
        while (begin := self.line.find(b'"', at) + 1) > 0:
            found = INSIDE.match(self.line, begin)
            end = found.end() if found else begin
            if end >= len(self.line) or self.line[end] != ord('"'):
                raise BadRecordError("not_json", "not a line of JSON (Unterminated string)")
            if end - begin > HELD:
                parts += self.line[copied:begin] + f"{self._name}{len(self._strings)}".encode()
                self._strings.append(JsonText(self.line, begin, end))
                copied = end
            at = end + 1
            if len(parts) + at - copied > MOST:
                break
        if len(parts) + len(self.line) - copied > MOST:
            raise BadRecordError("too_long", f"a line of more than {MOST} bytes beside its long strings")
        return bytes(parts + self.line[copied:])


def decoded(text: JsonText) -> Iterator[str]:
    """Yield the pieces of a string. Raises BadRecordError if it is not one."""
    try:
        yield from text.pieces()
    except UnicodeDecodeError as error:
        raise BadRecordError("not_utf8", f"not UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise BadRecordError("not_json", f"not a line of JSON ({error.msg})") from error


BOM = b"\xef\xbb\xbf"


class Advance:
    """Progress of a shard: `end - begin` in all, whatever its reader reports."""

    def __init__(self, report: Callable[[int], None], total: int) -> None:
        self.report, self.left = report, total

    def __call__(self, count: int) -> None:
        """Report `count` more units, at most the total."""
        count = min(count, self.left)
        self.left -= count
        if count:
            self.report(count)

    def finish(self) -> None:
        """Report the rest."""
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
    """Yield the documents of a shard in corpus order.

    `reject` receives every bad record; when it returns, reading continues. `advance` receives the bytes,
    rows or shards done (the unit of `shard.begin`), `shard.end - shard.begin` in all. Memory holds one record
    and a few blocks, whatever the file holds. Raises UserError for a file that cannot be opened or a Hub that
    cannot be reached.
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
    """Yield documents of the lines whose first byte is in the shard."""
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
                except BadRecordError as error:
                    intake.reject(place, error)
                else:
                    yield document
                    del document  # free a long one before the next is read
            position += length
            del line
    except DamagedError as error:
        intake.damaged(Place(shard.path, number + 1, before=before), error)


def json_document(line: bytes | bytearray | None, intake: Intake, place: Place) -> Document:
    """Make the document of one line, None if it is too long. Raises BadRecordError."""
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
        raise BadRecordError("not_object", f"{type_of(record)}, not a JSON object")
    return intake.document(record, place)


def long_json_document(line: bytes | bytearray, intake: Intake, place: Place) -> Document:
    """Make the document of a long line. Raises BadRecordError."""
    found = LongLine(line)
    if not isinstance(found.record, dict):
        raise BadRecordError("not_object", f"{type_of(found.record)}, not a JSON object")
    text = found.value(intake.text_key) if intake.text_key in found.record else None
    record: dict[str, Any] = {}
    for key in {intake.id_key or ID, ID} & found.record.keys():
        value = found.value(key)
        record[key] = "".join(value.pieces()) if isinstance(value, JsonText) else value
    if isinstance(text, JsonText):
        return intake.long_document(text, record, place)
    return intake.document(found.record | record | ({} if text is None else {intake.text_key: text}), place)


def read_text(shard: Shard, intake: Intake, moved: Callable[[int], None]) -> Iterator[Document]:
    """Yield documents of plain text; a document's location is its first line."""
    place = Place(shard.path, 1)
    try:
        for content, size, first in text_pieces(shard, intake.max_bytes, moved):
            place = Place(shard.path, first)
            try:
                document = text_document(content, size, intake, place)
            except BadRecordError as error:
                intake.reject(place, error)
            else:
                yield document
                del document
            del content
    except DamagedError as error:
        intake.damaged(Place(shard.path, error.line or place.number), error)


def read_slice(shard: Shard, intake: Intake, moved: Callable[[int], None]) -> Iterator[Document]:
    """Yield the document of bytes begin … end - 1 of the content of a file."""
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
    except BadRecordError as error:
        intake.reject(Place(shard.path, first), error)
    except DamagedError as error:
        intake.damaged(Place(shard.path, first), error)


def text_pieces(
    shard: Shard, max_bytes: int, moved: Callable[[int], None]
) -> Iterator[tuple[bytearray, int, int]]:
    """Yield content, size and first line of every document; no content for one above `max_bytes`."""
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
                content = bytearray()  # dropped while it is read
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
    """Make a plain-text document of `size` bytes. Raises BadRecordError."""
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
