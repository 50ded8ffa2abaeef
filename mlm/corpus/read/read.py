"""Readers of lines and plain text: the documents of a shard in order, and every bad record by file and line.

A `.jsonl` file holds one object per line; a byte order mark before the first is skipped, and so are empty
lines. A `.txt` or `.md` file is one document, or several that end at lines holding only `<|endoftext|>`. A
`.html` file is one, its main text by resiliparse. Empty texts are documents. NUL is a character like any
other: it is valid in UTF-8 and in JSON (ftfy removes it).
"""

import json
from collections.abc import Callable, Iterator

from mlm.corpus.read.encoding import UTF_8
from mlm.corpus.read.records import BadRecordError, Document, InputShard, Intake, Location, lines_before
from mlm.corpus.read.shards import TEXT_END
from mlm.corpus.read.streams import first_line, lines, text_blocks
from mlm.corpus.read.tables import read_hub, read_parquet
from mlm.data.records import BOM, json_problem
from mlm.data.streams import DamagedError
from mlm.util.errors import decode_problem, type_of
from mlm.util.extras import load_extra

CONVERT = "set encoding=auto, or its name, such as encoding=latin-1, or convert it by iconv"


def read_shard(
    shard: InputShard,
    *,
    text_key: str,
    max_bytes: int,
    reject: Callable[[BadRecordError], None],
) -> Iterator[Document]:
    """Yield the documents of a shard in corpus order.

    `reject` receives every bad record; when it returns, reading continues. Memory holds one record and a few
    blocks, whatever the file holds. Raises UserError for a file that cannot be opened or a Hub that cannot be
    reached.
    """
    lines_before.cache_clear()  # another file may have this name now
    readers = {
        "jsonl": read_jsonl,
        "txt": read_text,
        "html": read_html,
        "parquet": read_parquet,
        "hub": read_hub,
    }
    return readers[shard.kind.partition(".")[0]](shard, Intake(text_key, max_bytes, reject))


def read_jsonl(shard: InputShard, intake: Intake) -> Iterator[Document]:
    """Yield documents of the lines whose first byte is in the shard."""
    begin, encoding = first_line(shard.path, shard.begin, shard.end), shard.input.encoding
    if begin is None:
        return
    position, number, is_all = begin, 0, shard.kind != "jsonl" or encoding != UTF_8
    try:
        for line, length in lines(text_blocks(shard.path, encoding, begin), intake.max_bytes):
            if not is_all and position >= shard.end:
                break
            number += 1
            location = Location(shard.path, number, begin=begin)
            if line is not None and position == 0:
                line = line.removeprefix(BOM)
            position += length
            if line is not None and (not line or line.isspace()):
                continue
            yield from intake.attempt(location, json_document, line, intake, location, encoding)
    except DamagedError as error:
        intake.damaged(Location(shard.path, number + 1, begin=begin), error)


def json_document(
    line: bytes | bytearray | None, intake: Intake, location: Location, encoding: str
) -> Document:
    if line is None:
        raise intake.too_long("line")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise undecodable(encoding, json_problem(error), location) from error
    except (ValueError, RecursionError) as error:
        raise BadRecordError("not_json", json_problem(error)) from error
    if not isinstance(record, dict):
        raise BadRecordError("not_object", f"{type_of(record)}, not a JSON object")
    return intake.document(record, location)


def read_text(shard: InputShard, intake: Intake) -> Iterator[Document]:
    """Yield documents of plain text; a document's location is its first line."""
    location = Location(shard.path, 1)
    try:
        for content, size, first in text_pieces(shard, intake.max_bytes):
            location = Location(shard.path, first)
            arguments = content, size, intake, location, shard.input.encoding
            yield from intake.attempt(location, text_document, *arguments)
    except DamagedError as error:
        intake.damaged(Location(shard.path, error.line or location.number), error)


def read_html(shard: InputShard, intake: Intake) -> Iterator[Document]:
    """Yield the text of a web page, without navigation and the like; links and layout are dropped."""
    library = load_extra("resiliparse.extract.html2text", f"input {shard.path}")
    content, location = bytearray(), Location(shard.path, 1)
    try:
        for block in text_blocks(shard.path, shard.input.encoding):
            content += block
            if len(content) > intake.max_bytes:
                break
        page = text_document(content, len(content), intake, location, shard.input.encoding)
        text = library.extract_plain_text(page.text, main_content=True)
        yield Document(text, len(text.encode()), location)
    except BadRecordError as error:
        intake.reject(location, error)
    except DamagedError as error:
        intake.damaged(location, error)


def text_pieces(shard: InputShard, max_bytes: int) -> Iterator[tuple[bytearray, int, int]]:
    """Yield content, size and first line of every document; no content for one above `max_bytes`."""
    content, size, first, number = bytearray(), 0, 1, 0
    try:
        for line, length in lines(text_blocks(shard.path, shard.input.encoding), max_bytes):
            number += 1
            if line is not None and line.strip() == TEXT_END:
                yield content, size, first
                content, size, first = bytearray(), 0, number + 1
                continue
            size += length
            if line is None or size > max_bytes:
                content = bytearray()  # dropped while it is read
            else:
                content += line
                if length > len(line):
                    content += b"\n"
    except DamagedError as error:
        error.line = number + 1
        raise
    if size:
        yield content, size, first


def text_document(
    content: bytearray, size: int, intake: Intake, location: Location, encoding: str
) -> Document:
    if size > intake.max_bytes:
        raise intake.too_long("document")
    begin = len(BOM) if location.number == 1 and content.startswith(BOM) else 0
    try:
        text = str(memoryview(content)[begin:], "utf-8")
    except UnicodeDecodeError as error:
        line = location.number + content.count(b"\n", 0, begin + error.start)
        raise undecodable(encoding, decode_problem(error), Location(location.source, line)) from error
    return Document(text, len(content) - begin, location)


def undecodable(encoding: str, problem: str, location: Location) -> BadRecordError:
    if encoding != UTF_8:
        problem = f"not {encoding}, as encoding= has it"
    return BadRecordError("not_utf8", problem, location, CONVERT)
