"""Code blocks of Markdown pages, each with the reason, if any, why no test runs it.

A comment directly above a block, invisible on the site and on a code host, exempts it:

    <!-- not run: needs a cluster -->
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
MARKER = re.compile(r"<!--\s*not run:(.*?)-->", re.DOTALL)
SHELL = ("sh", "bash")
PROMPT = "$ "


@dataclass(frozen=True)
class Block:
    """A code block: its page (a path below the repository), line, language, code and marking."""

    page: str
    line: int
    language: str
    code: str
    reason: str | None = None
    """Why it is not run; None if it is not marked."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_transcript(self) -> bool:
        """True if the block shows commands after a prompt, and their output."""
        return self.language == "" and self.code.startswith(PROMPT)

    @property
    def commands(self) -> list[str]:
        """The command lines of a shell block or transcript, without comments and continuations."""
        lines = self.code.replace("\\\n", "").splitlines()
        if self.is_transcript:
            lines = [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]
        elif self.language not in SHELL:
            return []
        return [line for line in lines if shlex.split(line, comments=True)]


def blocks(text: str, page: str) -> Iterator[Block]:
    """Every code block of a page, also those in lists and those that are only indented."""
    reason = None
    for token in MarkdownIt("commonmark").parse(text):
        if token.type in ("fence", "code_block"):
            line = (token.map or [0])[0] + 1
            yield Block(page, line, token.info.strip(), token.content, reason)
        marker = MARKER.fullmatch(token.content.strip()) if token.type == "html_block" else None
        reason = marker[1].strip() if marker else None


def pages() -> dict[str, str]:
    """Text of every page that is a file, by its path in the repository."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("mlm/**/*.md"), *ROOT.glob("scripts/**/*.md")]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(paths)}
