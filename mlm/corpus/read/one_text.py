"""An input of one text: the only document of a .txt, which no rule could divide by documents.

It is cut into consecutive parts, train first, at the ends of paragraphs, else of lines, else of words. Text
of one part then stands in no other, and nothing ends within a part that does not end in the text.
"""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from mlm.corpus.read.formats import kind_of
from mlm.corpus.read.openers import DamagedError, blocks, lines
from mlm.corpus.read.records import Input, Shard
from mlm.data.parts import SPLITS

TEXT_END = b"<|endoftext|>"
"""A line of a .txt file that holds just this ends a document."""
HELD_OUT = 4096
"""Least bytes of validation and of test, some thousand tokens; of a short text a tenth."""
SEARCHED = 1 << 16
"""Bytes before a cut in which an end is looked for."""
ENDS = tuple(map(re.compile, (rb"\n[ \t\r]*\n", rb"\n", rb"\s")))


def parts_of_text(inputs: Sequence[Input], shares: Sequence[float]) -> list[Shard] | None:
    """The parts of the input where it is one text and more than one part is wanted, else None.

    Raises UserError for a file that cannot be read.
    """
    wanted = [(part, share) for part, share in zip(SPLITS, shares, strict=True) if share > 0]
    kind = kind_of(Path(inputs[0].path)) or ""
    if len(inputs) != 1 or inputs[0].split or len(wanted) < 2 or not kind.startswith("txt"):
        return None
    path = inputs[0].path
    try:
        if (total := size_of_one(path)) is None:
            return None
        held_out = [max(share * total, min(HELD_OUT, total / 10)) for _, share in wanted[1:]]
        targets = [round(total - rest) for rest in accumulate(reversed(held_out))][::-1]
        bounds = [0]
        for target in targets:
            bounds.append(cut_before(path, target, bounds[-1]))
    except DamagedError:
        return None  # who reads it will say so
    bounds.append(total)
    packing = kind.removeprefix("txt")
    return [
        Shard(path, f"slice{packing}", begin, end, part)
        for (part, _), (begin, end) in zip(wanted, pairwise(bounds), strict=True)
    ]


def size_of_one(path: str) -> int | None:
    """Bytes of the content of a .txt that is one document, None if it is several or none."""
    total = 0
    for line, length in lines(blocks(path, moved=unheard), SEARCHED):
        if line is not None and line.strip() == TEXT_END:
            return None
        total += length
    # `lines` counts a line end after the last line only where it stands
    return total or None


def cut_before(path: str, target: int, least: int) -> int:
    """The last place in (least, target] where a paragraph, a line or a word ends."""
    begin = max(least, target - SEARCHED)
    window = between(path, begin, target)
    for end in ENDS:
        if found := list(end.finditer(window)):
            return begin + found[-1].end()
    at = len(window)
    while at and window[at - 1] & 0xC0 == 0x80:  # not inside a letter
        at -= 1
    return begin + max(0, at - 1) if at else target


def between(path: str, begin: int, end: int) -> bytes:
    """Bytes begin … end - 1 of the content of a file."""
    found, position = bytearray(), 0
    for block in blocks(path, moved=unheard):
        found += block[max(0, begin - position) : max(0, end - position)]
        position += len(block)
        if position >= end:
            break
    return bytes(found)


def unheard(_: int) -> None:
    """No progress is shown."""
