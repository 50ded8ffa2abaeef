"""Griffe extension: what docstrings write in brackets is shown as it is typed.

Griffe's Google style would fold the lines under `Shapes:` into a paragraph, and Markdown would take
`[heads][q, k, v]` for a link.
"""

import re
from typing import Any

from griffe import Extension, Object

TABLE = re.compile(r"^(Shapes\b[^\n]*):\n((?:[ ]{4}[^\n]*\n?)+)", re.MULTILINE)


class Shapes(Extension):
    """Tables of shapes as code blocks, and neighbouring brackets as text."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Adapt the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = TABLE.sub(fenced, obj.docstring.value.replace("][", r"]\["))


def fenced(match: re.Match[str]) -> str:
    """A table of shapes as a title and a code block."""
    lines = "\n".join(line[4:] for line in match[2].splitlines()).replace(r"]\[", "][")
    return f"**{match[1]}**\n\n```text\n{lines}\n```\n"
