"""Griffe extension: tables of shapes in docstrings are shown as they are typed.

Griffe's Google style would fold the lines under `Shapes:` into a paragraph.
"""

import re
from typing import Any

from griffe import Extension, Object
from links import TABLE


class Shapes(Extension):
    """Tables of shapes as code blocks."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = TABLE.sub(fenced, obj.docstring.value)


def fenced(match: re.Match[str]) -> str:
    lines = "\n".join(line[4:] for line in match[2].splitlines())
    return f"**{match[1]}**\n\n```text\n{lines}\n```\n"
