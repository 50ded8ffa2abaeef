"""Cleaning of a document: ftfy, language identification and quality rules.

ftfy runs with its default settings, as in Megatron-LM's cleaning of web text, with two differences:
`fix_character_width` is off, as full-width forms are correct in Chinese and Japanese, and lines are fixed in
pieces of at most 4,096 letters, split after a space, as its time can be quadratic in a line (long runs of
combining marks, `&amp;amp;amp;…`). ftfy takes 2 to 20 MB/s, so lines that it cannot change skip it: ASCII
without `&` and control characters, with quotes, dashes and dots, whose curly forms are replaced here.

The rules are from Rae et al. 2021 (arXiv:2112.11446), table A1 and appendix A.1.1. Lines are stripped, and
blank ones do not count. A document counts under the first rule that it breaks, in the order of FilterConfig;
one without words breaks `min_words` if that is set, and no rule about shares.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any

import ftfy

from mlm.config.suggest import nearest
from mlm.corpus.config import FilterConfig, NormaliseConfig
from mlm.corpus.pieces import pieces_of
from mlm.util.errors import UserError
from mlm.util.extras import load_extra

PART = 4096
CONFIG = ftfy.TextFixerConfig(fix_character_width=False, explain=False)
VERBATIM = CONFIG._replace(unescape_html=False)

# Every byte of “”‘’–—… in a Windows code page continues a UTF-8 sequence and none begins one (in Mac Roman
# it is the other way round), so such a line cannot be UTF-8 that was taken for something else.
UNUSUAL = re.compile("[^\t\n\x0c -%'-~“”‘’–—…]")
"""A letter that ftfy may change or treat as mojibake, such as `&`."""
SAMPLE = 500  # letters whose language is identified, in each of three parts of a text
STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
LETTER = re.compile(r"[^\W\d_]")


class Cleaner:
    """Fixes texts and applies the rules.

    Raises UserError for unknown languages, or if the detector is not installed.
    """

    def __init__(self, normalise: NormaliseConfig, filter: FilterConfig) -> None:
        limits = {rule.name: getattr(filter, rule.name) for rule in fields(FilterConfig)}
        del limits["min_tokens"]  # tested with the tokenizer
        self.fixes = normalise.ftfy
        self.rules: dict[str, float] = {name: limit for name, limit in limits.items() if limit is not None}
        languages, least = normalise.languages, normalise.min_language_score
        self.is_wanted = LanguageFilter(languages, least) if languages else None

    def __call__(self, text: str) -> tuple[str, str | None]:
        """Return the fixed text, and `language` or the key of FilterConfig that drops it; None to keep it.

        A blank text passes (`min_words` aside); `min_tokens` is tested with the tokenizer.
        """
        if self.fixes:
            text = fix_text(text)
        is_blank = not text or text.isspace()
        if not is_blank and self.is_wanted is not None and not self.is_wanted(text):
            return text, "language"
        measures = Measures(text)
        for rule, limit in self.rules.items():
            side, _, name = rule.partition("_")
            if name == "words" or measures.counts["words"]:
                value = MEASURES[name](measures)
                if value < limit if side == "min" else value > limit:
                    return text, rule
        return text, None


def fix_text(text: str) -> str:
    if (markup := text.find("<")) < 0:
        return fix_lines(text, CONFIG)
    begin = text.rfind("\n", 0, markup) + 1
    return fix_lines(text[:begin], CONFIG) + fix_lines(text[begin:], VERBATIM)


def fix_lines(text: str, config: ftfy.TextFixerConfig) -> str:
    parts, begin_of_rest = list[str](), 0
    while (letter := UNUSUAL.search(text, begin_of_rest)) is not None:
        begin = text.rfind("\n", begin_of_rest, letter.start()) + 1 or begin_of_rest
        end = text.find("\n", letter.start()) + 1 or len(text)
        parts.append(straight(text[begin_of_rest:begin]))
        while end - begin > PART:  # after a space if there is one
            split = text.rfind(" ", begin, begin + PART) + 1 or begin + PART
            parts.append(ftfy.fix_text(text[begin:split], config))
            begin = split
        parts.append(ftfy.fix_text(text[begin:end], config))
        begin_of_rest = end
    parts.append(straight(text[begin_of_rest:]))
    return "".join(parts)


def straight(text: str) -> str:
    if text.isascii():
        return text
    return text.replace("“", '"').replace("”", '"').replace("‘", "'").replace("’", "'")


class LanguageFilter:
    """Filter that accepts text in some languages.

    Raises UserError for a code that the detector does not know, or if it is not installed.
    """

    def __init__(self, languages: Collection[str], least_score: float) -> None:
        setting = f"normalise.languages=[{','.join(languages)}]"
        self.detector = load_detector(load_extra("py3langid.langid", setting))
        self.languages, self.least_score = frozenset(languages), least_score
        labels = self.detector.labels
        for code in (code for code in languages if code not in labels):
            suggestion = code[:2].lower() if code[:2].lower() in labels else nearest(code, labels)
            hint = (
                f"did you mean {suggestion}?" if suggestion else f"name some of {', '.join(sorted(labels))}"
            )
            raise UserError(f"{setting}: {code} is not the code of a known language: {hint}")

    def __call__(self, text: str) -> bool:
        if len(text) > 3 * SAMPLE:
            middle = (len(text) - SAMPLE) // 2
            text = "\n".join((text[:SAMPLE], text[middle : middle + SAMPLE], text[-SAMPLE:]))
        language, score = self.detector.classify(text)
        return language in self.languages and score >= self.least_score


@lru_cache(maxsize=1)
def load_detector(langid: ModuleType) -> Any:
    """Load the detector and its model, once, as it takes a second. Scores are probabilities."""
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


class Measures:
    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def counts(self) -> Counter[str]:
        """Words (separated by white space), their letters, words with a letter, different stop words."""
        counts, stop_words = Counter[str](), set[str]()
        for piece in pieces_of(self.text):
            words = piece.split()
            counts["words"] += len(words)
            counts["letters"] += len("".join(words))
            counts["alphabetic"] += sum(word.isalpha() or LETTER.search(word) is not None for word in words)
            stop_words |= STOP_WORDS.intersection(map(str.lower, words))
        counts["stop words"] = len(stop_words)
        return counts

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in map(str.strip, self.text.splitlines()) if line]

    def of_words(self, count: int) -> float:
        return count / self.counts["words"]

    def of_lines(self, is_counted: Callable[[str], bool]) -> float:
        return sum(map(is_counted, self.lines)) / len(self.lines)


MEASURES: dict[str, Callable[[Measures], float]] = {
    "words": lambda text: text.counts["words"],
    "mean_word_length": lambda text: text.of_words(text.counts["letters"]),
    # `#`, or ellipses: the greater of the two
    "symbol_ratio": lambda text: text.of_words(
        max(text.text.count("#"), text.text.count("…") + text.text.count("..."))
    ),
    "bullet_lines": lambda text: text.of_lines(lambda line: line.startswith(("•", "‣", "◦", "▪", "-", "*"))),
    "ellipsis_lines": lambda text: text.of_lines(lambda line: line.endswith(("…", "..."))),
    "alphabetic_words": lambda text: text.of_words(text.counts["alphabetic"]),
    "stop_words": lambda text: text.counts["stop words"],
    "duplicate_lines": lambda text: 1 - len(set(text.lines)) / len(text.lines),
}
"""Measures by their names in FilterConfig, without min_ or max_."""
