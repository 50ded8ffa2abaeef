"""Passages: the parts of a corpus where documents are too few to be divided between them.

Where no document falls to some part, each document is split into consecutive passages, one for each part,
train first, at the ends of paragraphs, else of lines, else of words. Text of one part is then in no other.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from mlm.corpus.stages.plan import BuildPlan
from mlm.data.config import SPLITS
from mlm.data.corpus_files import parse_split

FEW = 1000
"""Most documents that are split: of more, a share of one percent is not empty by chance."""
HELD_OUT = 4096
"""Minimum bytes of validation and of test, some thousand tokens; of a short corpus a tenth."""
SEARCHED = 1 << 16
"""Bytes searched for an end before a split."""


def plan_passages(plan: BuildPlan, splits: dict[str, dict[str, int]]) -> BuildPlan | None:
    """Return the plan that splits documents, for a build whose `splits` (counts of each part) lack some part.

    None if no part is empty, all are, the input has parts of its own, or documents are many.
    """
    documents = [counts["documents"] for counts in splits.values()]
    if not plan.is_divided or all(documents) or not 0 < sum(documents) <= FEW:
        return None
    total = plan.stages["clean"].total()["kept/bytes"]
    shares = dict(zip(SPLITS, parse_split(plan.config.split), strict=True))
    held_out = [max(shares[part], min(HELD_OUT / total, 0.1)) for part in plan.parts[1:]]
    stages = {
        name: replace(stage, folder=stage.folder.with_name(f"{stage.folder.name}-passages"))
        if name in ("tokenise", "merge")
        else stage
        for name, stage in plan.stages.items()
    }
    return replace(plan, stages=stages, held_out=tuple(held_out))


def passages_of(plan: BuildPlan, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the passages of a document in UTF-8 with their parts, none of them empty."""
    assert plan.held_out is not None
    bounds = [0]
    for rest in list(accumulate(reversed(plan.held_out)))[::-1]:
        # split at the last end of a paragraph, else of a line, else of a word
        target = round(len(content) * (1 - rest))
        begin = max(bounds[-1], target - SEARCHED)
        window = content[begin:target]
        for end_pattern in (rb"\n[ \t\r]*\n", rb"\n", rb"\s"):
            if ends := list(re.finditer(end_pattern, window)):
                bounds.append(begin + ends[-1].end())
                break
        else:
            at = len(window)
            while at and window[at - 1] & 0xC0 == 0x80:  # not inside a letter
                at -= 1
            bounds.append(begin + max(0, at - 1) if at else target)
    bounds.append(len(content))
    for part, (begin, end) in zip(plan.parts, pairwise(bounds), strict=True):
        if begin < end:
            yield part, content[begin:end]
