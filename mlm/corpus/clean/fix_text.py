"""Mending text with ftfy (https://ftfy.readthedocs.io): mojibake, quotes, ligatures, control letters, breaks.

The settings are ftfy's own, as in Megatron-LM's cleaning of web text, but for two:

- `fix_character_width` is off. It would rewrite the punctuation of Chinese and Japanese, where the full-width
  forms are the proper ones, and changes nothing in English.
- Lines are mended in pieces of 4,096 letters at the most, cut after a space. ftfy takes up to a million
  letters at once, and some texts (long runs of combining marks, `&amp;amp;amp;…`) take it time that grows
  with the square of that: minutes for one document.

What that does to code: curly quotes become straight, CRLF becomes LF, HTML entities are resolved only before
the first `<` of a document (so not in HTML or XML), and indentation stays.

ftfy runs at 2 to 20 MB/s. A line that it cannot change is not shown to it: one of ASCII without `&` and
control letters, and of quotes, dashes and dots, whose curly forms are replaced here.
"""

import re
import sys
from collections.abc import Callable, Iterator

import ftfy

PIECE = 4096
HELD = 1 << 18  # letters of a line that are held back until it ends
CONFIG = ftfy.TextFixerConfig(fix_character_width=False, explain=False)
VERBATIM = CONFIG._replace(unescape_html=False)

# Every byte of “”‘’–—… in a Windows code page continues a UTF-8 sequence and none begins one (in Mac Roman
# it is the other way round), so such a line cannot be UTF-8 that was taken for something else.
UNUSUAL = re.compile("[^\t\n\x0c -%'-~“”‘’–—…]")
"""A letter that ftfy may change or take for a part of mojibake; `&` is one."""


def mend(text: str) -> str:
    """A text as ftfy leaves it, line by line."""
    return "".join(mend_lines(text, 0, line_of_markup(iter((text,)))))


def mend_pieces(pieces: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Result of `mend` for a text that comes in pieces; they are gone through twice.

    A line that is held back grows to a few pieces at the most: a longer one is mended from its beginning, in
    the same pieces of 4,096 letters. That ftfy is shown more of it than `mend` would show it changes nothing.
    """
    verbatim = line_of_markup(pieces())
    held, at, line = "", 0, 0  # `held` begins at letter `at`, in the line that begins at letter `line`
    for piece in pieces():
        held += piece
        if line < at and (
            first := held.find("\n") + 1
        ):  # the end of a line whose beginning is mended already
            yield from mend_rest(held[:first], line, verbatim)
            held, at = held[first:], at + first
            line = at
        if line == at and (end := held.rfind("\n") + 1):
            yield from mend_lines(held[:end], at, verbatim)
            held, at = held[end:], at + end
            line = at
        if len(held) > HELD:
            *whole, rest = pieces_of(held)
            for part in whole:
                yield from mend_rest(part, line, verbatim)
            held, at = rest, at + len(held) - len(rest)
    yield from mend_lines(held, at, verbatim) if line == at else mend_rest(held, line, verbatim)


def line_of_markup(pieces: Iterator[str]) -> int:
    """Letter at which the line of the first `<` begins; past any letter where there is none."""
    before, begin = 0, 0
    for piece in pieces:
        found = piece.find("<")
        end = piece.rfind("\n", 0, len(piece) if found < 0 else found)
        if end >= 0:
            begin = before + end + 1
        if found >= 0:
            return begin
        before += len(piece)
    return sys.maxsize


def mend_lines(text: str, begin: int, verbatim: int) -> Iterator[str]:
    """Whole lines, mended; they begin at letter `begin` of the text."""
    cut = min(max(verbatim - begin, 0), len(text))
    for part, config in ((text[:cut], CONFIG), (text[cut:], VERBATIM)):
        if part:
            yield mend_all(part, config)


def mend_rest(part: str, line: int, verbatim: int) -> Iterator[str]:
    """Rest of a line whose beginning is fixed already."""
    config = VERBATIM if line >= verbatim else CONFIG
    yield from (
        ftfy.fix_text(piece, config) if UNUSUAL.search(piece) else straight(piece)
        for piece in pieces_of(part)
    )


def mend_all(text: str, config: ftfy.TextFixerConfig) -> str:
    """A text of whole lines under one configuration."""
    parts, done = list[str](), 0
    while (found := UNUSUAL.search(text, done)) is not None:
        begin = text.rfind("\n", done, found.start()) + 1 or done
        end = text.find("\n", found.start()) + 1 or len(text)
        parts.append(straight(text[done:begin]))
        parts += (ftfy.fix_text(piece, config) for piece in pieces_of(text[begin:end]))
        done = end
    parts.append(straight(text[done:]))
    return "".join(parts)


def straight(text: str) -> str:
    """A text with straight quotes."""
    if text.isascii():
        return text
    return text.replace("“", '"').replace("”", '"').replace("‘", "'").replace("’", "'")


def pieces_of(line: str) -> Iterator[str]:
    """A line in pieces of PIECE letters at the most, cut after a space where there is one."""
    begin = 0
    while len(line) - begin > PIECE:
        end = line.rfind(" ", begin, begin + PIECE) + 1 or begin + PIECE
        yield line[begin:end]
        begin = end
    yield line[begin:]
