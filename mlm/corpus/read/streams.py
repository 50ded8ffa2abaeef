"""Text of files in blocks of UTF-8, and its lines, of bounded length."""

from collections.abc import Iterator

from mlm.corpus.read.encoding import UTF_8, transcoded
from mlm.data.streams import blocks, raw_blocks


def text_blocks(path: str, encoding: str, begin: int = 0) -> Iterator[bytes]:
    """Yield a text from byte `begin` on, converted to UTF-8 (`transcoded`) from another encoding.

    Raises as `blocks` does.
    """
    content = blocks(path, begin)
    return content if encoding == UTF_8 else transcoded(content, encoding)


def lines(source: Iterator[bytes], max_bytes: int) -> Iterator[tuple[bytes | bytearray | None, int]]:
    """Yield lines without their newline, and their length with it; None for a line above `max_bytes`.

    Such a line is dropped while it is read: at most `max_bytes` and two blocks are held.
    """
    held, size = bytearray(), 0  # of the unfinished line
    for block in source:
        *ended, rest = block.split(b"\n")
        for piece in ended:
            size += len(piece)
            if size > max_bytes:
                yield None, size + 1
            else:
                yield (held + piece if held else piece), size + 1
            held, size = bytearray(), 0
        size += len(rest)
        if size > max_bytes:
            held = bytearray()
        else:
            held += rest
    if size:
        yield (None if size > max_bytes else held), size


def first_line(path: str, begin: int, end: int) -> int | None:
    """Return the start of the first line that begins in [begin, end); None if there is none.

    Reads to the end of the preceding line and holds none of it. Raises UserError if the file cannot be read.
    """
    if begin == 0:
        return begin
    # from the byte before: when it is a newline, a line starts at `begin`
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
