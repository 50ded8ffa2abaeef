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
from collections.abc import Iterator

import ftfy

from mlm.corpus.config import FilterConfig, NormaliseConfig
from mlm.corpus.filter import LanguageFilter, active_rules, broken_rule

PART = 4096
CONFIG = ftfy.TextFixerConfig(fix_character_width=False, explain=False)
VERBATIM = CONFIG._replace(unescape_html=False)

# Every byte of “”‘’–—… in a Windows code page continues a UTF-8 sequence and none begins one (in Mac Roman
# it is the other way round), so such a line cannot be UTF-8 that was taken for something else.
UNUSUAL = re.compile("[^\t\n\x0c -%'-~“”‘’–—…]")
"""A letter that ftfy may change or treat as mojibake; `&` is one."""


def fix_text(text: str) -> str:
    """Return a text as ftfy fixes it, line by line."""
    if (markup := text.find("<")) < 0:
        return fix_lines(text, CONFIG)
    begin = text.rfind("\n", 0, markup) + 1
    return fix_lines(text[:begin], CONFIG) + fix_lines(text[begin:], VERBATIM)


def fix_lines(text: str, config: ftfy.TextFixerConfig) -> str:
    """Fix a text of whole lines under one configuration."""
    parts, done = list[str](), 0
    while (found := UNUSUAL.search(text, done)) is not None:
        begin = text.rfind("\n", done, found.start()) + 1 or done
        end = text.find("\n", found.start()) + 1 or len(text)
        parts.append(straight(text[done:begin]))
        parts += (ftfy.fix_text(piece, config) for piece in parts_of_line(text[begin:end]))
        done = end
    parts.append(straight(text[done:]))
    return "".join(parts)


def straight(text: str) -> str:
    """Return a text with straight quotes."""
    if text.isascii():
        return text
    return text.replace("“", '"').replace("”", '"').replace("‘", "'").replace("’", "'")


def parts_of_line(line: str) -> Iterator[str]:
    """Split a line into parts of at most PART letters, after a space if there is one."""
    begin = 0
    while len(line) - begin > PART:
        end = line.rfind(" ", begin, begin + PART) + 1 or begin + PART
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
            text = fix_text(text)
        if not text or text.isspace():
            return text, broken_rule(text, self.rules)
        if self.is_wanted is not None and not self.is_wanted(text):
            return text, LANGUAGE
        return text, broken_rule(text, self.rules)
