"""Pieces of HTML. Whatever a run's files hold becomes text: it is escaped here and nowhere else."""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from mlm.util.errors import show, visible

LONGEST = 300
"""Characters of a value that a page shows."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object, longest: int = LONGEST) -> Html:
    """Escape a value, control characters and half characters written out."""
    if isinstance(value, Html):
        return value
    found = value if isinstance(value, str) else show(value)
    cut = "…" if len(found) > longest else ""
    return Html(escape("\n".join(map(visible, found[:longest].split("\n"))) + cut))


def join(parts: Iterable[str], between: str = "") -> Html:
    """Join pieces of HTML."""
    return Html(between.join(text(part) for part in parts))


def section(name: str, title: str, *parts: str) -> Html:
    """Return a section with an anchor; nothing if it has no content."""
    content = join(part for part in parts if part)
    if not content:
        return Html()
    return Html(f'<section id="{name}"><h2>{text(title)}</h2>\n{content}</section>\n')


def paragraph(*parts: object) -> Html:
    """Return a paragraph of text and pieces of HTML."""
    return Html(f"<p>{''.join(text(part, 4000) for part in parts)}</p>\n")


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> Html:
    """Return a table whose first column names its rows; empty without rows. It scrolls where it is wide."""
    lines = [
        f'<tr><th scope="row">{text(row[0])}</th>'
        + "".join(f"<td>{text(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    ]
    if not lines:
        return Html()
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in headings)
    named = f"<caption>{text(caption)}</caption>" if caption else ""
    label = text(caption or headings[0])
    return Html(
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table>{named}'
        f"<thead><tr>{head}</tr></thead><tbody>\n" + "\n".join(lines) + "\n</tbody></table></div>\n"
    )


def details(title: str, *parts: str) -> Html:
    """Return content behind a title that opens it."""
    return Html(f"<details><summary>{text(title)}</summary>{join(parts)}</details>\n")


def block(content: str, longest: int = 20_000) -> Html:
    """Return preformatted text."""
    return Html(f'<pre tabindex="0">{text(content, longest)}</pre>\n')


def image(png: bytes, described: str) -> Html:
    """Return a picture inside the page, which scrolls where it is wide; `described` stands for it unseen."""
    name, content = text(described), b64encode(png).decode()
    return Html(
        f'<div class="wide" tabindex="0" role="region" aria-label="{name}">'
        f'<img alt="{name}" src="data:image/png;base64,{content}"></div>\n'
    )


def embedded(name: str, values: Mapping[str, Any]) -> Html:
    """Return values as JSON inside a page, which no text in them can end."""
    found = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        found = found.replace(char, f"\\u{ord(char):04x}")
    return Html(f'<script type="application/json" id="{name}">{found}</script>\n')
