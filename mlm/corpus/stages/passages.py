"""Passages of documents as parts of a corpus with too few documents.

If a part would be empty, each document is split into consecutive passages, one for each part, train first, at
the ends of paragraphs, else of lines, else of words, so that no text is in two parts.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from mlm.corpus.stages.plan import BuildPlan
from mlm.data.config import SPLITS
from mlm.data.corpus_files import parse_split

FEW = 1000
"""Most documents that are split: with more, a share of one percent is not empty by chance."""
HELD_OUT = 4096
"""Minimum bytes of validation and of test, about a thousand tokens; a tenth of a short corpus."""
SEARCHED = 1 << 16
"""Bytes before a split that are searched for an end."""


def plan_passages(plan: BuildPlan, splits: dict[str, dict[str, int]]) -> BuildPlan | None:
    """Return the plan that splits documents, for a build with an empty part in `splits` (counts by part).

    None if no part is empty, all are, the input is divided into parts, or there are many documents.
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
    """Yield (part, passage in UTF-8) of a document, without empty passages."""
    assert plan.held_out is not None
    bounds = [0]
    for held_out_share in list(accumulate(reversed(plan.held_out)))[::-1]:
        # Split at the last end of a paragraph, else of a line, else of a word.
        target = round(len(content) * (1 - held_out_share))
        begin = max(bounds[-1], target - SEARCHED)
        window = content[begin:target]
        for end_pattern in (rb"\n[ \t\r]*\n", rb"\n", rb"\s"):
            if ends := list(re.finditer(end_pattern, window)):
                bounds.append(begin + ends[-1].end())
                break
        else:
            cut = len(window)
            while cut and window[cut - 1] & 0xC0 == 0x80:  # not inside a letter
                cut -= 1
            bounds.append(begin + max(0, cut - 1) if cut else target)
    bounds.append(len(content))
    for part, (begin, end) in zip(plan.parts, pairwise(bounds), strict=True):
        if begin < end:
            yield part, content[begin:end]
