"""Fixing text with ftfy (https://ftfy.readthedocs.io), and the check of a fixed document against all rules.

ftfy fixes mojibake, quotes, ligatures, control characters and line breaks. The settings are its own, as in
Megatron-LM's cleaning of web text, but for two:

- `fix_character_width` is off. It would rewrite the punctuation of Chinese and Japanese, where the full-width
  forms are the proper ones, and changes nothing in English.
- Lines are fixed in pieces of at most 4,096 letters, split after a space. ftfy takes up to a million letters
  at once, and on some texts (long runs of combining marks, `&amp;amp;amp;…`) its time grows with the
  square of that: minutes for one document.

In code, curly quotes become straight, CRLF becomes LF, HTML entities are resolved only before the first `<`
of a document (so not in HTML or XML), and indentation stays.

ftfy runs at 2 to 20 MB/s. It is not given a line that it cannot change: one of ASCII without `&` and control
characters, and of quotes, dashes and dots, whose curly forms are replaced here.
"""

import re
import sys
from collections.abc import Callable, Iterator

import ftfy

from mlm.corpus.filter import (
    SAMPLE,
    LanguageFilter,
    LongMeasures,
    active_rules,
    broken_by,
    broken_rule,
    long_sample,
)
from mlm.corpus.read.long_text import Letters, LongText, Scratch
from mlm.corpus.sections import FilterConfig, NormaliseConfig

PIECE = 4096
HELD = 1 << 18  # letters of a line that are held back until it ends
CONFIG = ftfy.TextFixerConfig(fix_character_width=False, explain=False)
VERBATIM = CONFIG._replace(unescape_html=False)

# Every byte of “”‘’–—… in a Windows code page continues a UTF-8 sequence and none begins one (in Mac Roman
# it is the other way round), so such a line cannot be UTF-8 that was taken for something else.
UNUSUAL = re.compile("[^\t\n\x0c -%'-~“”‘’–—…]")
"""A letter that ftfy may change or treat as mojibake; `&` is one."""


def fixed(text: str) -> str:
    """Return a text as ftfy fixes it, line by line."""
    return "".join(fix_lines(text, 0, line_of_markup(iter((text,)))))


def fix_pieces(pieces: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Yield the result of `fixed` for a text that comes in pieces, which are read twice.

    A line that is held back grows to at most a few pieces: a longer one is fixed from its beginning, in
    the same pieces of 4,096 letters. That ftfy sees more of it here than in `fixed` changes nothing.
    """
    verbatim = line_of_markup(pieces())
    held, at, line = "", 0, 0  # `held` begins at letter `at`, in the line that begins at letter `line`
    for piece in pieces():
        held += piece
        if line < at and (first := held.find("\n") + 1):  # the end of a line whose beginning is fixed already
            yield from fix_rest(held[:first], line, verbatim)
            held, at = held[first:], at + first
            line = at
        if line == at and (end := held.rfind("\n") + 1):
            yield from fix_lines(held[:end], at, verbatim)
            held, at = held[end:], at + end
            line = at
        if len(held) > HELD:
            *whole, rest = pieces_of(held)
            for part in whole:
                yield from fix_rest(part, line, verbatim)
            held, at = rest, at + len(held) - len(rest)
    yield from fix_lines(held, at, verbatim) if line == at else fix_rest(held, line, verbatim)


def line_of_markup(pieces: Iterator[str]) -> int:
    """Return the letter at which the line of the first `<` begins; beyond the text if there is none."""
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


def fix_lines(text: str, begin: int, verbatim: int) -> Iterator[str]:
    """Fix whole lines that begin at letter `begin` of the text."""
    cut = min(max(verbatim - begin, 0), len(text))
    for part, config in ((text[:cut], CONFIG), (text[cut:], VERBATIM)):
        if part:
            yield fix_all(part, config)


def fix_rest(part: str, line: int, verbatim: int) -> Iterator[str]:
    """Fix the rest of a line whose beginning is fixed already."""
    config = VERBATIM if line >= verbatim else CONFIG
    yield from (
        ftfy.fix_text(piece, config) if UNUSUAL.search(piece) else straight(piece)
        for piece in pieces_of(part)
    )


def fix_all(text: str, config: ftfy.TextFixerConfig) -> str:
    """Fix a text of whole lines under one configuration."""
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
    """Return a text with straight quotes."""
    if text.isascii():
        return text
    return text.replace("“", '"').replace("”", '"').replace("‘", "'").replace("’", "'")


def pieces_of(line: str) -> Iterator[str]:
    """Split a line into pieces of at most PIECE letters, after a space if there is one."""
    begin = 0
    while len(line) - begin > PIECE:
        end = line.rfind(" ", begin, begin + PIECE) + 1 or begin + PIECE
        yield line[begin:end]
        begin = end
    yield line[begin:]


LANGUAGE = "language"


class Cleaner:
    """Fixes a text and names the rule that drops it.

    Raises UserError for languages that are not known or when the detector is not installed.
    """

    def __init__(self, normalise: NormaliseConfig, filter: FilterConfig) -> None:
        self.fixes, self.rules = normalise.ftfy, active_rules(filter)
        self.is_wanted = (
            LanguageFilter(normalise.languages, normalise.min_language_score) if normalise.languages else None
        )

    def __call__(self, text: str) -> tuple[str, str | None]:
        """Return the fixed text, and `language` or the key of FilterConfig that drops it; None to keep it.

        A blank text passes (`min_words` aside); `min_tokens` is tested with the tokenizer.
        """
        if self.fixes:
            text = fixed(text)
        if not text or text.isspace():
            return text, broken_rule(text, self.rules)
        if self.is_wanted is not None and not self.is_wanted(text):
            return text, LANGUAGE
        return text, broken_rule(text, self.rules)

    def long(self, text: LongText, scratch: Scratch) -> str | None:
        """Write a long text to `scratch`, fixed; return the rule that drops it, None to keep it."""
        for piece in fix_pieces(text.pieces) if self.fixes else text.pieces():
            scratch.add(piece)
        if self.is_wanted is not None and not scratch.is_blank:
            letters = Letters(scratch.text)
            short = len(letters) <= 3 * SAMPLE
            if not self.is_wanted.accepts(scratch.text.read() if short else long_sample(letters)):
                return LANGUAGE
        return broken_by(LongMeasures(scratch.text.pieces), self.rules) if self.rules else None
