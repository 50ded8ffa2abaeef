"""English documentation of Debian packages as JSON lines: python -m reproduce.debian OUT

`apt-get download` and `dpkg-deb --extract` put HTML pages into a temporary folder; nothing is installed, no
file of theirs is run. Paragraphs of prose remain: code, tables, menus and repeated footers are left out. OUT
gets train.jsonl, validation.jsonl and test.jsonl, of lines {"text": …, "source": "git-doc/giteveryday"}, and
LICENCES. Where the SHA-256 of a source, modulo 50, is 0 or 1, the document is for validation or test: 2 %
each.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

from mlm.util.errors import UserError

PACKAGES = {
    "apache2-doc": ("doc/apache2-doc/manual/en/**/*.html", "Apache-2.0"),
    "debian-handbook": ("doc/debian-handbook/html/en-US/*.html", "GPL-2.0-or-later OR CC-BY-SA-3.0"),
    "developers-reference": ("developers-reference/*.html", "GPL-2.0-only"),
    "exim4-doc-html": ("doc/exim4-doc-html/spec_html/*.html", "GPL-2.0-or-later"),
    "git-doc": ("doc/git-doc/**/*.html", "GPL-2.0-only"),
    "gnome-user-docs": ("help/C/**/*.page", "CC-BY-SA-3.0"),
    "installation-guide-amd64": ("doc/installation-guide-amd64/en/*.html", "GPL-2.0-only"),
    "linux-doc": ("doc/linux-doc-*/html/[!t]*/**/*.html", "GPL-2.0-only"),
    "postgresql-doc-15": ("doc/postgresql-doc-15/html/*.html", "PostgreSQL"),
    "python-django-doc": ("doc/python-django-doc/html/**/*.html", "BSD-3-Clause"),
    "python3-doc": ("doc/python3*/html/**/*.html", "PSF-2.0"),
    "rust-doc": ("doc/rust-doc/html/*book*/**/*.html", "MIT OR Apache-2.0"),
    "sqlite3-doc": ("doc/sqlite3/*.html", "public domain"),
}
"""Package → (pages below usr/share, licence of the documentation as its copyright file states it)."""
PROVIDERS = {"linux-doc": "linux-doc-6.1", "python3-doc": "python3.11-doc"}
"""Packages that hold the pages of a package without any."""
PARTS = {0: "validation", 1: "test"}
MIN_WORDS, MIN_DOCUMENT_WORDS = 5, 100
MIN_PLAIN_WORDS = 0.7
"""Least share of a paragraph's words that are letters alone: below it are listings and symbols."""
MAX_REPEATS = 3
"""Documents of a package that may share a paragraph; what stands in more is a footer or a licence."""
MAX_LINKED = 0.6
"""Largest share of a paragraph's letters that may be links: above it are menus and tables of contents."""
COMMON_WORDS = {"the", "a", "of", "to", "and", "in", "is", "that", "for", "it", "be", "or", "if", "with"}
MIN_COMMON_WORDS = 0.1
"""Least share of an English document's words that are these."""
WORD = re.compile(r"[(\"'“‘]*[^\W\d_]+(?:['’-][^\W\d_]+)*[)\"'”’.,;:!?]*")
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6", "title", "dt"}
SKIPPED = {
    *("head", "script", "style", "pre", "table", "nav", "form", "select", "svg", "button", "footer"),
    *("sup", "info", "comment", "screen"),
}
SKIPPED_CLASSES = {
    *("navheader", "navfooter", "toc", "docnav", "nosearch", "toplang", "headerlink", "nav", "related"),
    *("sphinxsidebar", "footer"),
}
INLINE = {
    *("a", "abbr", "acronym", "b", "big", "cite", "code", "dfn", "em", "font", "i", "img", "kbd", "q"),
    *("s", "samp", "small", "span", "strong", "sub", "tt", "u", "var", "wbr", "ins", "del", "mark"),
    *("label", "app", "cmd", "file", "gui", "guiseq", "input", "key", "keyseq", "link", "output", "sys"),
}
VOID = {"img", "br", "hr", "wbr", "input", "link", "meta", "col", "area", "base", "embed", "source"}


class Paragraphs(HTMLParser):
    """The paragraphs of a page, headings marked. Any tag that is not inline ends one."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks = list[tuple[str, bool]]()
        self.text, self.links, self.linked, self.is_heading = list[str](), 0, 0, False
        self.skipped, self.depth = "", 0
        self.feed(page)
        self.close()
        self.end_block()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = {name for key, value in attrs if key == "class" for name in (value or "").split()}
        if self.skipped:
            self.depth += tag == self.skipped
        elif tag in SKIPPED or (tag not in VOID and classes & SKIPPED_CLASSES):
            if tag not in INLINE:
                self.end_block()
            self.skipped, self.depth = tag, 1
        elif tag == "a":
            self.links += 1
        elif tag not in INLINE:
            self.end_block()
            self.is_heading = tag in HEADINGS

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            self.depth -= tag == self.skipped
            self.skipped = self.skipped if self.depth else ""
        elif tag == "a":
            self.links = max(0, self.links - 1)
        elif tag not in INLINE:
            self.end_block()

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.text.append(data)
            self.linked += len(data) if self.links else 0

    def end_block(self) -> None:
        text = " ".join("".join(self.text).replace("¶", "").split())
        if text and (self.is_heading or self.linked <= MAX_LINKED * len(text)):
            self.blocks.append((text, self.is_heading))
        self.text, self.links, self.linked, self.is_heading = [], 0, 0, False


def prose(page: str) -> list[str]:
    """Return the paragraphs that read as words rather than symbols, each section's heading before its
    first."""
    kept, heading = list[str](), ""
    for text, is_heading in Paragraphs(page).blocks:
        words = text.split()
        plain = sum(WORD.fullmatch(word) is not None for word in words)
        if is_heading:
            heading = text
        elif plain >= max(MIN_WORDS, MIN_PLAIN_WORDS * len(words)):
            kept.append(f"{heading}\n\n{text}" if heading else text)
            heading = ""
    return kept


def documents_of(pages: dict[str, str]) -> dict[str, str]:
    """Return the English documents of a package by name, without paragraphs that many share."""
    paragraphs = {name: prose(page) for name, page in sorted(pages.items())}
    count = Counter(text for texts in paragraphs.values() for text in set(texts))
    texts = {
        name: "\n\n".join(text for text in its if count[text] <= MAX_REPEATS)
        for name, its in paragraphs.items()
    }
    return {name: text for name, text in texts.items() if is_english(text)}


def is_english(text: str) -> bool:
    """True for a text that is long enough and has the share of English function words that prose has."""
    words = text.lower().split()
    common = sum(word in COMMON_WORDS for word in words)
    return len(words) >= MIN_DOCUMENT_WORDS and common >= MIN_COMMON_WORDS * len(words)


def part_of(source: str) -> str:
    return PARTS.get(int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") % 50, "train")


def unpack(package: str, folder: Path) -> tuple[str, str]:
    """Download and extract a package; return its name with its version, and its copyright file."""
    name = PROVIDERS.get(package, package)
    try:
        subprocess.run(["apt-get", "-q", "download", name], cwd=folder, check=True, capture_output=True)
        deb = next(folder.glob(f"{name}_*.deb"))
        subprocess.run(["dpkg-deb", "--extract", deb, folder], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"{name}: {error}; run `apt-get update`, or use --corpus=plays") from error
    version = subprocess.run(["dpkg-deb", "-f", deb, "Version"], check=True, capture_output=True, text=True)
    notice = (folder / "usr" / "share" / "doc" / name / "copyright").read_text("utf-8", errors="replace")
    return f"{name} {version.stdout.strip()}", notice


def main(out: Path) -> None:
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    licences = ["Text taken from packages of Debian, and its licences."]
    for package, (pattern, licence) in PACKAGES.items():
        with TemporaryDirectory() as folder:
            title, notice = unpack(package, Path(folder))
            share = Path(folder) / "usr" / "share"
            pages = {
                f"{package}/{path.relative_to(share).with_suffix('')}": path.read_text(
                    "utf-8", errors="replace"
                )
                for path in share.glob(pattern)
                if path.is_file() and not path.is_symlink()
            }
        documents = documents_of(pages)
        print(
            f"{title}: {len(documents)} documents, {sum(map(len, documents.values())):,} characters",
            flush=True,
        )
        for source, text in documents.items():
            line = json.dumps({"text": text, "source": source}, ensure_ascii=False)
            parts[part_of(source)].append(line + "\n")
        licences.append(f"{title}\nLicence of the documentation: {licence}\n\n{notice.strip()}")
    out.mkdir(parents=True, exist_ok=True)
    for part, lines in parts.items():
        (out / f"{part}.jsonl").write_text("".join(lines), "utf-8", errors="replace")
    (out / "LICENCES").write_text("\n\n".join(licences) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
