"""Encodings of text: UTF-8, the user's choice, or the one that resiliparse detects (its uchardet)."""

import codecs
import re
from collections.abc import Iterable

from mlm.util.errors import UserError
from mlm.util.extras import load_extra

UTF_8 = "utf-8"
AUTO = "auto"
BOMS = {codecs.BOM_UTF8: UTF_8, codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
BOMS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
SAMPLE = 1 << 20
"""Bytes of non-ASCII lines from which an encoding is detected."""
NOT_ASCII = re.compile(rb"[^\n]*[\x80-\xff][^\n]*\n?")
UNDECODABLE = "mlm.undecodable"
"""Error handler that decodes to U+DCFF, which surrogateescape encodes as the byte 0xFF."""
codecs.register_error(UNDECODABLE, lambda error: ("\udcff", getattr(error, "end", 0)))


def codec_of(encoding: str) -> str:
    """Return the name of Python's codec for an encoding. Raises LookupError without a text codec."""
    codec = codecs.lookup(encoding)
    if not getattr(codec, "_is_text_encoding", True):
        raise LookupError(encoding)
    return codec.name


def detect(source: Iterable[bytes], path: str, *, is_page: bool) -> str:
    """Return the encoding of a text: by its byte order mark, UTF-8 if valid, else the most likely one.

    A web page may declare it. Raises UserError if none is likely, or resiliparse is missing.
    """
    decoder, is_utf8, sample, head = codecs.getincrementaldecoder(UTF_8)(), True, bytearray(), b""
    for block in source:
        if not head and (marked := next((name for bom, name in BOMS.items() if block.startswith(bom)), None)):
            return marked
        head = head or block[:1024]
        try:
            decoder.decode(block)
        except UnicodeDecodeError:
            is_utf8 = False
            decoder.reset()
        sample += b"".join(NOT_ASCII.findall(block))[: SAMPLE - len(sample)]
        if not is_utf8 and len(sample) >= SAMPLE:
            break
    if is_utf8 and not decoder.getstate()[0]:
        return UTF_8
    library = load_extra("resiliparse.parse.encoding", f"encoding={AUTO}")
    content = head * is_page + sample
    likeliest = library.detect_encoding(content, max_len=0, from_html_meta=is_page)
    # resiliparse returns UTF-8 for an unknown encoding; no 8-bit text holds NUL.
    if likeliest == UTF_8 or b"\0" in content:
        fix = "name it, such as encoding=latin-1; encoding=utf-8 names the first line that is not"
        raise UserError(f"input {path}: no encoding is likely; {fix}")
    return codec_of(likeliest)
