"""Plain paragraphs of prose from documentation: HTML and Mallard, POD, reStructuredText and plain text.

Code, tables, menus and markup are left out: a language model is to learn English from the rest. Readers give
blocks in order; `paragraphs` keeps those that read as sentences, each section's heading before the first.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import NamedTuple

__all__ = ["READERS", "Block", "Paragraph", "paragraphs", "read_html", "read_pod", "read_rst"]


class Block(NamedTuple):
    """A paragraph, or a heading."""

    text: str
    is_heading: bool = False


class Paragraph(NamedTuple):
    """A paragraph of prose."""

    text: str
    heading: str = ""
    """Heading before it, if no other paragraph is between them."""


MIN_WORDS = 5
MIN_PLAIN_WORDS = 0.7
"""Least share of a paragraph's words that are letters alone: below it are listings and symbols."""
NAME = re.compile(r"[^\W\d_]{3}")
"""Letters in a row that a heading must have."""
RULE = re.compile(r"[-=_*~#+|]{5}")
"""Lines drawn with characters: tables and figures that no markup announces."""
WORD = re.compile(r"[(\"'“‘]*[^\W\d_]+(?:['’-][^\W\d_]+)*[)\"'”’.,;:!?]*")


def paragraphs(blocks: Iterator[Block]) -> list[Paragraph]:
    """List the paragraphs that are prose. A heading stays if prose comes before the next one."""
    kept, heading = list[Paragraph](), ""
    for block in blocks:
        text = " ".join(block.text.split())
        if block.is_heading:
            heading = text if NAME.search(text) else ""
        elif is_prose(text):
            kept.append(Paragraph(text, heading))
            heading = ""
    return kept


def is_prose(text: str) -> bool:
    """True if a paragraph reads as words rather than symbols."""
    words = text.split()
    plain = sum(WORD.fullmatch(word) is not None for word in words)
    return plain >= MIN_WORDS and plain >= MIN_PLAIN_WORDS * len(words) and RULE.search(text) is None


# HTML and Mallard, the XML of GNOME's help.

HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6", "title", "dt"}
SKIPPED = {
    *("head", "script", "style", "pre", "table", "nav", "form", "select", "svg", "button", "footer", "sup"),
    *("info", "comment", "screen"),  # Mallard
}
SKIPPED_CLASSES = {"navheader", "navfooter", "toc", "docnav", "nosearch", "toplang", "headerlink", "nav"}
INLINE = {
    *("a", "abbr", "acronym", "b", "big", "cite", "code", "dfn", "em", "font", "i", "img", "kbd", "q", "s"),
    *("samp", "small", "span", "strong", "sub", "tt", "u", "var", "wbr", "ins", "del", "mark", "label"),
    *("app", "cmd", "file", "gui", "guiseq", "input", "key", "keyseq", "link", "output", "sys"),  # Mallard
}
VOID = {"img", "br", "hr", "wbr", "input", "link", "meta", "col", "area", "base", "embed", "source"}
MAX_LINKED = 0.6
"""Largest share of a paragraph's letters that may be links: above it are menus and tables of contents."""


class HtmlBlocks(HTMLParser):
    """Collect the blocks of a page. Any tag that is not inline ends a paragraph: unclosed ones do no harm."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks = list[Block]()
        self.text = list[str]()
        self.links, self.linked = 0, 0
        self.heading: str | None = None
        self.skipped, self.depth = "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skipped:
            self.depth += tag == self.skipped
        elif tag in SKIPPED or (tag not in VOID and self.is_skipped_class(attrs)):
            if tag not in INLINE:
                self.end_block()
            self.skipped, self.depth = tag, 1
        elif tag == "a":
            self.links += 1
        elif tag not in INLINE:
            self.end_block()
            self.heading = tag if tag in HEADINGS else None

    def is_skipped_class(self, attrs: list[tuple[str, str | None]]) -> bool:
        """True if an element's class marks it as navigation."""
        return any(key == "class" and SKIPPED_CLASSES & set((value or "").split()) for key, value in attrs)

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            self.depth -= tag == self.skipped
            if not self.depth:
                self.skipped = ""
        elif tag == "a":
            self.links = max(0, self.links - 1)
        elif tag not in INLINE:
            self.end_block()

    def handle_data(self, data: str) -> None:
        if self.skipped:
            return
        self.text.append(data)
        if self.links:
            self.linked += len(data)

    def updatepos(self, i: int, j: int) -> int:
        """Keep no line numbers, which take a tenth of the time."""
        return j

    def end_block(self) -> None:
        """Store the text read since the last block."""
        text = "".join(self.text).replace("¶", "").strip()
        if text and (self.heading or self.linked <= MAX_LINKED * len(text)):
            self.blocks.append(Block(text, self.heading is not None))
        self.text, self.links, self.linked, self.heading = [], 0, 0, None


def read_html(content: str) -> Iterator[Block]:
    """Yield the blocks of an HTML or Mallard page."""
    parser = HtmlBlocks()
    parser.feed(content)
    parser.close()
    parser.end_block()
    yield from parser.blocks


# Perl's POD (perlpod, perlpodspec).

POD_CODE = re.compile(r"([A-Z])(<{2,}(?=\s)|<)")
POD_NAMES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/"}


def read_pod(content: str) -> Iterator[Block]:
    """Yield the blocks of a POD file; an item's label counts as a heading."""
    in_pod, skipping = False, False
    for block in re.split(r"\n[ \t]*(?:\n[ \t]*)+", "\n" + content):
        block = block.strip("\n")
        command = re.match(r"=([a-zA-Z]\w*)\s*(.*)", block, re.DOTALL)
        if command is None:
            if in_pod and not skipping and not block[:1].isspace():
                yield Block(pod_text(block))
            continue
        name, rest = command.groups()
        in_pod = name != "cut"
        if name in ("begin", "end"):
            skipping = name == "begin"
        elif not skipping and (name.startswith("head") or name == "item"):
            text = pod_text(re.sub(r"^(?:\*|\d+[.)]?)(?:\s+|$)", "", rest))
            yield Block(text, is_heading=len(text.split()) < MIN_WORDS or name != "item")


def pod_text(text: str) -> str:
    """Return text without formatting codes, which may nest."""
    out, stack, at = list[str](), list[tuple[str, str, int]](), 0
    while at < len(text):
        if stack and text.startswith(stack[-1][1], at):
            letter, closing, begin = stack.pop()
            at += len(closing)
            inner = "".join(out[begin:])
            out[begin:] = [pod_code(letter, inner.strip() if len(closing) > 1 else inner)]
        elif found := POD_CODE.match(text, at):
            opening = found[2]
            closing = opening.replace("<", ">")
            stack.append((found[1], closing, len(out)))
            at = found.end()
        else:
            out.append(text[at])
            at += 1
    return "".join(out)


def pod_code(letter: str, inner: str) -> str:
    """Return the plain form of one formatting code."""
    if letter in "XZ":  # index entries, and nothing
        return ""
    if letter == "E":
        number = inner.removeprefix("0x")
        if inner.isdigit() or number != inner:
            return safe_chr(number, 16 if number != inner else 10)
        return POD_NAMES.get(inner, "")
    if letter == "L":
        label, bar, target = inner.partition("|")
        return label if bar else target or inner.replace("/", " in ", 1) if inner[:1] != "/" else inner[1:]
    return inner


def safe_chr(digits: str, base: int) -> str:
    """Return the character of a number, nothing where there is none."""
    try:
        return chr(int(digits, base))
    except (ValueError, OverflowError):
        return ""


# reStructuredText; plain text is the part of it without marks.

DIRECTIVE = re.compile(r"\.\.\s+(?:[\w.+-]+:)?([\w-]+)::\s*(.*)")
PROSE_DIRECTIVES = {
    *("note", "warning", "tip", "important", "caution", "attention", "hint", "seealso", "danger", "topic"),
    *("admonition", "sidebar", "rubric", "versionadded", "versionchanged", "deprecated", "impl-detail"),
}
DESCRIBED = {
    *("function", "method", "class", "data", "attribute", "exception", "describe", "option", "type"),
    *("decorator", "classmethod", "staticmethod", "module", "member", "var", "opcode", "pdbcommand"),
    *("struct", "macro", "cmdoption", "envvar", "confval", "abstractmethod", "coroutinefunction"),
    *("coroutinemethod", "glossary"),
}
"""Directives whose argument is a signature and whose content is text."""
UNDERLINE = re.compile(r"([=\-`:'\"~^_*+#<>.])\1{2,}\s*")
BULLET = re.compile(r"(?:[-*•+]|\(?(?:\d{1,2}|[a-zA-Z]|#|[ivx]{1,4})[.)])\s+(?=\S)")
FIELD = re.compile(r":[^:`]+:(?:\s|$)")
TABLE = re.compile(r"\s*(?:\+[-=+]{2,}|\||[=-]+\s+[=-]{2,}|>>>|\.\.\. )")


@dataclass
class Lines:
    """Lines of a text and the position in them."""

    lines: list[str]
    at: int = 0

    def indent(self, at: int) -> int:
        """Columns before a line's text."""
        return len(self.lines[at]) - len(self.lines[at].lstrip())

    def skip_deeper(self, than: int) -> None:
        """Move past blank lines and those with a deeper indent."""
        while self.at < len(self.lines) and (not self.lines[self.at].strip() or self.indent(self.at) > than):
            self.at += 1


def read_rst(content: str) -> Iterator[Block]:
    """Yield the blocks of a reStructuredText or plain file."""
    lines = Lines(content.expandtabs(8).splitlines())
    while lines.at < len(lines.lines):
        line, begin = lines.lines[lines.at].strip(), lines.at
        if not line:
            lines.at += 1
        elif line == ".." or line.startswith(".. "):
            yield from read_directive(lines, line)
        elif UNDERLINE.fullmatch(line):
            lines.at += 1
        elif TABLE.match(line):
            while lines.at < len(lines.lines) and lines.lines[lines.at].strip():
                lines.at += 1
        elif begin + 1 < len(lines.lines) and is_title(line, lines.lines[begin + 1]):
            lines.at += 2
            yield Block(rst_text(line), is_heading=True)
        else:
            yield from read_paragraph(lines)


def is_title(line: str, following: str) -> bool:
    """True if the second line underlines the first."""
    return UNDERLINE.fullmatch(following) is not None and len(following.strip()) >= 0.8 * len(line)


def read_directive(lines: Lines, line: str) -> Iterator[Block]:
    """Move past a directive or comment; only what holds text is read on."""
    indent = lines.indent(lines.at)
    lines.at += 1
    found = DIRECTIVE.match(line)
    name = found[1] if found else ""
    if found and name in PROSE_DIRECTIVES:
        argument = re.sub(r"^\d[\w.]*\s*", "", found[2])  # a version
        words = [argument]
        while lines.at < len(lines.lines) and lines.lines[lines.at].strip() and argument:
            words.append(lines.lines[lines.at].strip())
            lines.at += 1
        yield Block(rst_text(" ".join(words)))
        if words[-1].endswith("::"):
            lines.skip_deeper(indent)
    elif not found or name not in DESCRIBED:
        lines.skip_deeper(indent)


def read_paragraph(lines: Lines) -> Iterator[Block]:
    """Read consecutive lines of one indent; a literal block after `::` is skipped."""
    indent = lines.indent(lines.at)
    first = lines.lines[lines.at].strip()
    bullet = BULLET.match(first)
    inner = indent + bullet.end() if bullet else indent
    words = [first[bullet.end() :] if bullet else first]
    lines.at += 1
    while lines.at < len(lines.lines) and (line := lines.lines[lines.at].strip()):
        if lines.indent(lines.at) != inner:
            break
        words.append(line)
        lines.at += 1
    text = " ".join(words)
    if not FIELD.match(text):
        yield Block(rst_text(text))
    if text.endswith("::"):
        lines.skip_deeper(indent)


RST_MARKS = [
    (re.compile(r":pep:`(\d+)`"), r"PEP \1"),
    (re.compile(r"``(.+?)``"), r"\1"),
    (re.compile(r"(?::[\w.+-]+)+:`!?~?([^`<]*?)\s*<[^`>]*>`"), r"\1"),
    (re.compile(r"(?::[\w.+-]+)+:`!?~?([^`]*)`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?"), r"\1"),
    (re.compile(r"`([^`]+)`_{0,2}"), r"\1"),
    (re.compile(r"\|(\w[\w -]*)\|_{0,2}"), r"\1"),  # a substitution
    (re.compile(r"\s*\[[#\d*][\w-]*\]_"), ""),
    (re.compile(r"(?<![\w*])\*\*(?=\S)(.+?)(?<=\S)\*\*(?![\w*])"), r"\1"),
    (re.compile(r"(?<![\w*])\*(?=\S)([^*]+?)(?<=\S)\*(?![\w*])"), r"\1"),
    (re.compile(r"\b(\w[\w-]*)__?(?=[\s.,;:)]|$)(?<!\b_)"), r"\1"),
    (re.compile(r"\\(?=[^\w\s])"), ""),
]
RST_CHARACTERS = frozenset("`*_|[\\")


def rst_text(text: str) -> str:
    """Return text without inline markup."""
    if not RST_CHARACTERS.isdisjoint(text):
        for pattern, plain in RST_MARKS:
            text = pattern.sub(plain, text)
    return re.sub(":{2,}$", ":", text)


READERS: dict[str, Callable[[str], Iterator[Block]]] = {
    "html": read_html,
    "page": read_html,
    "pod": read_pod,
    "rst": read_rst,
    "txt": read_rst,
}
"""Readers by the suffix of a file's name, `.gz` left out."""
