"""WikiText as it reads, from WikiText as it is distributed.

WikiText is distributed with words, numbers and punctuation set apart by spaces. The rules that put them
together again are those that Megatron-LM (tasks/zeroshot_gpt/detokenizer.py, until 2025) and lm-eval
(lm_eval/tasks/wikitext/preprocess_wikitext.py) have in common; scores are comparable with theirs only when
the same letters are scored. The rules are greedy and imperfect (every "s '" loses its space), and are applied
in this order, over the whole text at once: a pair of marks may span lines.

One more rule of both has no effect and is left out: meant for years as in "' 90s", it asks for a slash before
and behind them.
"""

import re

NUMBER_MARKS = "-,."
"""Set apart as " @-@ "."""
ENDING_MARKS = ":;.!?,"
"""Set apart on both sides; in a text they have a space behind them only."""
PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
HEADINGS = ("====", "===", "==")
"""Set apart as "= = = =". The longest first: the others are part of it."""


def detokenise(text: str) -> str:
    """The text with the artefacts of WikiText's tokenisation undone. README.md lists the rules."""
    text = text.replace("s '", "s'")
    for mark in NUMBER_MARKS:
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ENDING_MARKS:  # one after the other: each finds the spaces that the one before left
        text = text.replace(f" {mark} ", f"{mark} ")
    for opening, closing in PAIRS:
        text = hug(text, opening, closing)
    for heading in HEADINGS:
        text = text.replace(" ".join(heading), heading)
    for apart, together in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(apart, together)
    return text


def hug(text: str, opening: str, closing: str) -> str:
    """Take the white space off inside each pair of marks, which are not nested: "( 24 in )" to "(24 in)"."""
    inside = rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}"
    return re.sub(inside, lambda found: f"{opening}{found[1]}{closing}", text)
