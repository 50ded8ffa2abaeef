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
from collections.abc import Iterator

import ftfy

PIECE = 4096
CONFIG = ftfy.TextFixerConfig(fix_character_width=False, explain=False)
VERBATIM = CONFIG._replace(unescape_html=False)

# Every byte of “”‘’–—… in a Windows code page continues a UTF-8 sequence and none begins one (in Mac Roman
# it is the other way round), so such a line cannot be UTF-8 that was taken for something else.
UNUSUAL = re.compile("[^\t\n\x0c -%'-~“”‘’–—…]")
"""A letter that ftfy may change or take for a part of mojibake; `&` is one."""


def mend(text: str) -> str:
    """A text as ftfy leaves it, line by line."""
    found = UNUSUAL.search(text)
    if found is None:
        return straight(text)
    markup = text.find("<")
    parts, done = list[str](), 0
    while found is not None:
        begin = text.rfind("\n", done, found.start()) + 1 or done
        end = text.find("\n", found.start()) + 1 or len(text)
        parts.append(straight(text[done:begin]))
        config = VERBATIM if 0 <= markup < end else CONFIG
        parts += (ftfy.fix_text(piece, config) for piece in pieces(text[begin:end]))
        found, done = UNUSUAL.search(text, end), end
    parts.append(straight(text[done:]))
    return "".join(parts)


def straight(text: str) -> str:
    """A text with straight quotes."""
    if text.isascii():
        return text
    return text.replace("“", '"').replace("”", '"').replace("‘", "'").replace("’", "'")


def pieces(line: str) -> Iterator[str]:
    """A line in pieces of PIECE letters at the most, cut after a space where there is one."""
    begin = 0
    while len(line) - begin > PIECE:
        end = line.rfind(" ", begin, begin + PIECE) + 1 or begin + PIECE
        yield line[begin:end]
        begin = end
    yield line[begin:]
