"""Readers of lines and plain text: the documents of a shard in order, and bad records by file and line.

A `.jsonl` file holds one object per line; a leading byte order mark and empty lines are skipped. A `.txt` or
`.md` file is one document, or several that end at lines with only `<|endoftext|>`. A `.html` file is one
document, its main text by resiliparse. Empty texts are documents. NUL is an ordinary character: it is valid
in UTF-8 and in JSON (ftfy removes it).
"""

import codecs
import json
from collections.abc import Callable, Iterator

from mlm.corpus.read.encoding import UNDECODABLE, UTF_8
from mlm.corpus.read.records import BadRecordError, Document, InputShard, Intake, RecordLocation, lines_before
from mlm.corpus.read.shards import TEXT_END
from mlm.corpus.read.tables import read_hub, read_parquet
from mlm.data.records import BOM, json_problem
from mlm.data.streams import DamagedError, blocks, raw_blocks
from mlm.util.errors import decode_problem, type_of
from mlm.util.extras import load_extra


def read_shard(
    shard: InputShard,
    *,
    text_key: str,
    max_bytes: int,
    reject: Callable[[BadRecordError], None],
) -> Iterator[Document]:
    """Yield the documents of a shard in corpus order.

    `reject` receives every bad record; if it returns, reading continues. Memory holds one record and a few
    blocks. Raises UserError if a file cannot be opened or the Hub cannot be reached.
    """
    lines_before.cache_clear()  # the file may have changed
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
            location = RecordLocation(shard.path, number, begin=begin)
            if line is not None and position == 0:
                line = line.removeprefix(BOM)
            position += length
            if line is not None and (not line or line.isspace()):
                continue
            yield from intake.attempt(location, json_document, line, intake, location, encoding)
    except DamagedError as error:
        intake.damaged(RecordLocation(shard.path, number + 1, begin=begin), error)


def json_document(
    line: bytes | bytearray | None, intake: Intake, location: RecordLocation, encoding: str
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
    encoding, content, size, number = shard.input.encoding, bytearray(), 0, 0
    location = RecordLocation(shard.path, 1)
    try:
        for line, length in lines(text_blocks(shard.path, encoding), intake.max_bytes):
            number += 1
            if line is not None and line.strip() == TEXT_END:
                yield from intake.attempt(location, text_document, content, size, intake, location, encoding)
                content, size, location = bytearray(), 0, RecordLocation(shard.path, number + 1)
                continue
            size += length
            if line is None or size > intake.max_bytes:
                content = bytearray()  # too long: dropped while it is read
            else:
                content += line
                if length > len(line):
                    content += b"\n"
    except DamagedError as error:
        intake.damaged(RecordLocation(shard.path, number + 1), error)
        return
    if size:
        yield from intake.attempt(location, text_document, content, size, intake, location, encoding)


def read_html(shard: InputShard, intake: Intake) -> Iterator[Document]:
    """Yield the text of a web page, without navigation and the like; links and layout are dropped."""
    library = load_extra("resiliparse.extract.html2text", f"input {shard.path}")
    content, location = bytearray(), RecordLocation(shard.path, 1)
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


def text_document(
    content: bytearray, size: int, intake: Intake, location: RecordLocation, encoding: str
) -> Document:
    if size > intake.max_bytes:
        raise intake.too_long("document")
    begin = len(BOM) if location.number == 1 and content.startswith(BOM) else 0
    try:
        text = str(memoryview(content)[begin:], "utf-8")
    except UnicodeDecodeError as error:
        line = location.number + content.count(b"\n", 0, begin + error.start)
        raise undecodable(encoding, decode_problem(error), RecordLocation(location.source, line)) from error
    return Document(text, len(content) - begin, location)


def undecodable(encoding: str, problem: str, location: RecordLocation) -> BadRecordError:
    if encoding != UTF_8:
        problem = f"not {encoding}, as encoding= has it"
    fix = "set encoding=auto, or its name, such as encoding=latin-1, or convert it by iconv"
    return BadRecordError("not_utf8", problem, location, fix)


def text_blocks(path: str, encoding: str, begin: int = 0) -> Iterator[bytes]:
    """Yield a text from byte `begin` on as UTF-8, with the byte 0xFF for undecodable input.

    Raises as `blocks` does.
    """
    if encoding == UTF_8:
        yield from blocks(path, begin)
        return
    decoder = codecs.getincrementaldecoder(encoding)(UNDECODABLE)
    for block in blocks(path, begin):
        if text := decoder.decode(block):
            yield text.encode(UTF_8, "surrogateescape")
    if text := decoder.decode(b"", final=True):
        yield text.encode(UTF_8, "surrogateescape")


def lines(source: Iterator[bytes], max_bytes: int) -> Iterator[tuple[bytes | bytearray | None, int]]:
    """Yield lines without their newline, and their length with it; None for a line above `max_bytes`.

    Such a line is dropped while it is read: memory holds at most `max_bytes` and two blocks.
    """
    unfinished, size = bytearray(), 0
    for block in source:
        *complete, remainder = block.split(b"\n")
        for piece in complete:
            size += len(piece)
            if size > max_bytes:
                yield None, size + 1
            else:
                yield (unfinished + piece if unfinished else piece), size + 1
            unfinished, size = bytearray(), 0
        size += len(remainder)
        if size > max_bytes:
            unfinished = bytearray()
        else:
            unfinished += remainder
    if size:
        yield (None if size > max_bytes else unfinished), size


def first_line(path: str, begin: int, end: int) -> int | None:
    """Return the start of the first line that begins in [begin, end); None without one.

    Reads to the end of the preceding line. Raises UserError if the file cannot be read.
    """
    if begin == 0:
        return begin
    # Search from the byte before: if it is a newline, a line starts at `begin`.
    position = begin - 1
    for block in raw_blocks(path, position):
        newline = block.find(b"\n")
        if newline >= 0:
            start = position + newline + 1
            return start if start < end else None
        position += len(block)
        if position >= end:
            break
    return None
