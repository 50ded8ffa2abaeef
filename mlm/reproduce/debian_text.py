"""English documentation of Debian packages: python -m mlm.reproduce.debian_text --debs DEBS --out OUT.

`apt-get download` puts the packages into DEBS. Nothing is installed, no file of theirs is run or unpacked.
OUT gets train.jsonl, validation.jsonl and test.jsonl, of lines {"text": …, "source": "perl-doc/perlopentut"},
and LICENCES. A document is one file's prose. It is held out where the SHA-256 of its source, modulo 50, is 0
(validation) or 1 (test): 2 % each, the same ones whatever other packages are read.
"""

import argparse
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlm.data.corpus_files import SPLITS
from mlm.reproduce.deb import Package, read_files, read_package
from mlm.reproduce.documents import Document, write_documents
from mlm.reproduce.prose import READERS, Paragraph, paragraphs
from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

__all__ = ["CHOICES", "LICENCES", "find_debs", "write_text"]

HELD_OUT = {0: "validation", 1: "test"}
HELD_OUT_OF = 50

MIN_DOCUMENT_WORDS = 100
COMMON_WORDS = frozenset(
    ("the", "a", "of", "to", "and", "in", "is", "that", "for", "it", "be", "or", "if", "with")
)
MIN_COMMON_WORDS = 0.1
"""Least share of an English document's words that are these."""
MAX_REPEATS = 3
"""Documents of a package that may share a paragraph; what stands in more is a footer or a licence."""
MAX_COPYRIGHT_LINES = 25
LICENCES = "LICENCES"


@dataclass(frozen=True)
class Source:
    """A package's English prose: its files, and the licence of these files."""

    files: str
    """Regular expression of the names, relative to the root; group 1 becomes the document's name."""
    licence: str
    """Licence of the documentation as its copyright file states it, by SPDX name."""


SOURCES = {
    "apache2-doc": Source(r"usr/share/doc/apache2-doc/manual/en/(.*)\.html", "Apache-2.0"),
    "debian-handbook": Source(
        r"usr/share/doc/debian-handbook/html/en-US/(.*)\.html", "GPL-2.0-or-later OR CC-BY-SA-3.0"
    ),
    "developers-reference": Source(r"usr/share/developers-reference/_sources/(.*)\.rst\.txt", "GPL-2.0-only"),
    "exim4-doc-html": Source(r"usr/share/doc/exim4-doc-html/spec_html/(.*)\.html", "GPL-2.0-or-later"),
    "git-doc": Source(r"usr/share/doc/git-doc/(.*)\.html", "GPL-2.0-only"),
    "gnome-user-docs": Source(r"usr/share/help/C/(.*)\.page", "CC-BY-SA-3.0"),
    "installation-guide-amd64": Source(
        r"usr/share/doc/installation-guide-amd64/en/(.*)\.html", "GPL-2.0-only"
    ),
    "linux-doc": Source(
        r"usr/share/doc/linux-doc-[\d.]+/html/_sources/(?!translations/)(.*)\.rst\.txt", "GPL-2.0-only"
    ),
    "perl-doc": Source(
        r"usr/share/perl/[\d.]+/pod/(?!perl(?:cn|jp|ko|tw|toc|api|intern)\b)(.*)\.pod",
        "GPL-1.0-or-later OR Artistic-1.0-Perl",
    ),
    "postgresql-doc": Source(r"usr/share/doc/postgresql-doc-\d+/html/(.*)\.html", "PostgreSQL"),
    "python-django-doc": Source(
        r"usr/share/doc/python-django-doc/html/(?!_modules/)(.*)\.html", "BSD-3-Clause"
    ),
    "python-doc": Source(r"usr/share/doc/python[\d.]+/html/_sources/(.*)\.rst\.txt", "PSF-2.0"),
    "rust-doc": Source(
        r"usr/share/doc/rust-doc/html/((?:book|reference|nomicon|rustc|rustdoc|edition-guide|embedded-book"
        r"|rust-by-example)/(?!.*\bprint\b).*)\.html",
        "MIT OR Apache-2.0",
    ),
    "sqlite3-doc": Source(r"usr/share/doc/sqlite3/(?!requirements|doc_)(.*)\.html", "public domain"),
}
"""Sources by package, without the version that some packages' names hold."""
RELEASES = {
    "linux-doc": ("linux-doc-6.1", "linux-doc-6.12"),
    "postgresql-doc": ("postgresql-doc-15", "postgresql-doc-17"),
    "python-doc": ("python3.11-doc", "python3.13-doc"),
}
"""Packages of a source in Debian 12 and 13."""
CHOICES = tuple(RELEASES.get(source, (source,)) for source in SOURCES)
"""Packages to download: one of each tuple."""


def source_of(package: str) -> str:
    """Return the key in SOURCES of a package: linux-doc of linux-doc-6.1, python-doc of python3.11-doc."""
    stem = re.sub(r"-\d[\d.]*$", "", package)
    stem = re.sub(r"^python[\d.]+-doc$", "python-doc", stem)
    if stem not in SOURCES:
        raise UserError(f"packages={package}: not known here; choose among {', '.join(SOURCES)}")
    return stem


def part_of(source: str) -> str:
    """Return the part of the corpus that a document belongs to."""
    number = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big")
    return HELD_OUT.get(number % HELD_OUT_OF, "train")


@dataclass
class Documents:
    """The prose of one package."""

    package: Package
    source: Source
    copyright: str
    texts: dict[str, str]
    """Text by the document's source, sorted."""


def read_documents(deb: Path) -> Documents:
    """Read the prose of one package."""
    package = read_package(deb)
    stem = source_of(package.name)
    source = SOURCES[stem]
    pattern = re.compile(source.files + r"(?:\.gz)?")
    notice = f"usr/share/doc/{package.name}/copyright"
    texts, statement = dict[str, list[Paragraph]](), ""
    for name, content in read_files(deb, lambda name: name == notice or pattern.fullmatch(name) is not None):
        if name == notice:
            statement = decoded(content)
            continue
        found = pattern.fullmatch(name)
        assert found is not None  # wanted names match
        reader = READERS[name.removesuffix(".gz").rpartition(".")[2]]
        texts[f"{stem}/{found[1]}"] = paragraphs(reader(decoded(content)))
    if not texts:
        raise UserError(
            f"debs={deb}: no English text where {package.name} keeps it; leave it out of --packages"
        )
    return Documents(package, source, statement, without_boilerplate(dict(sorted(texts.items()))))


def decoded(content: bytes) -> str:
    """Return text of UTF-8, else of Latin-1."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def without_boilerplate(documents: dict[str, list[Paragraph]]) -> dict[str, str]:
    """Join the paragraphs of each document but those that many share; drop short and foreign documents."""
    count = Counter(text for found in documents.values() for text in {paragraph.text for paragraph in found})
    texts = dict[str, str]()
    for name, found in documents.items():
        kept = [paragraph for paragraph in found if count[paragraph.text] <= MAX_REPEATS]
        text = "\n\n".join(part for text, heading in kept for part in (heading, text) if part)
        if is_english(text):
            texts[name] = text
    return texts


def is_english(text: str) -> bool:
    """True for a text that is long enough and has the share of English function words that prose has."""
    words = text.lower().split()
    common = sum(word in COMMON_WORDS for word in words)
    return len(words) >= MIN_DOCUMENT_WORDS and common >= MIN_COMMON_WORDS * len(words)


def copyright_statement(notice: str) -> str:
    """Return the copyright and licence lines for a package's files, of its copyright file."""
    stanzas = re.split(r"\n\s*\n", notice.strip())
    for stanza in stanzas:
        if re.search(r"^Files:\s*\*\s*$", stanza, re.MULTILINE):
            return stanza
    return "\n".join(notice.strip().splitlines()[:MAX_COPYRIGHT_LINES])


def licences(found: list[Documents]) -> str:
    """Return the file LICENCES: package, version, licence and copyright statement."""
    entries = []
    for documents in found:
        package = documents.package
        statement = copyright_statement(documents.copyright) or "(the package ships no copyright file)"
        entries.append(
            f"{package.name} {package.version}\nLicence of the documentation: {documents.source.licence}\n"
            f"From usr/share/doc/{package.name}/copyright:\n\n"
            + "\n".join(f"    {line}".rstrip() for line in statement.splitlines())
        )
    head = "Text taken from packages of Debian, and its licences. The full notices are in the packages.\n\n"
    return head + "\n\n".join(entries) + "\n"


def write_text(debs: Sequence[Path], out: Path) -> Iterator[str]:
    """Write the parts and LICENCES; yield a line on each package and part. Raises UserError."""
    found, parts = list[Documents](), {part: list[Document]() for part in SPLITS}
    for deb in debs:
        documents = read_documents(deb)
        found.append(documents)
        size = sum(len(text.encode("utf-8", "replace")) for text in documents.texts.values())
        yield f"{documents.package.name}: {len(documents.texts)} documents, {size:,} bytes"
        for source, text in documents.texts.items():
            parts[part_of(source)].append({"text": text, "source": source})
    for part, size in write_documents(parts, out).items():
        yield f"{part}: {len(parts[part])} documents, {size:,} bytes of text"
    write_atomic(out / LICENCES, licences(found).encode())


def find_debs(folder: Path, packages: Sequence[str] | None) -> list[Path]:
    """List the files of packages in a folder, sorted by name. Raises UserError for one that is missing."""
    have = {path.name.partition("_")[0]: path for path in sorted(folder.glob("*.deb"))}
    names = sorted(have) if packages is None else packages
    if missing := [name for name in names if name not in have]:
        raise UserError(
            f"debs={folder}: no .deb of {', '.join(missing)}; run in it: apt-get download {' '.join(missing)}"
        )
    if not names:
        first = " ".join(choice[0] for choice in CHOICES)
        raise UserError(f"debs={folder}: no .deb files; run in it: apt-get download {first}")
    return [have[name] for name in names]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, clean, divide, write, count."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--packages", nargs="+", help="packages to read; all in DEBS if left out")
    parser.add_argument("--debs", type=Path, required=True, help="folder of .deb files")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    try:
        for line in write_text(find_debs(options.debs, options.packages), options.out):
            print(line)
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
