"""Rules a document must pass: Rae et al. 2021 (arXiv:2112.11446), table A1 and appendix A.1.1.

Words are what white space separates; a line is one that holds more than white space, stripped of it at both
ends. A document counts under the first rule it breaks, in the order of RULES; one without words breaks
`min_words` if that is set, and no rule about shares.

datatrove's GopherQualityFilter splits words with a tokenizer of the language. Beside it we count a word of
punctuation alone as a word, take stop words whatever their case, leave empty lines out of shares of lines,
and take `*`, `‣`, `◦` and `▪` for bullets too. `max_duplicate_lines` is in its GopherRepetitionFilter.
"""

import re
from collections.abc import Callable, Sized
from functools import cached_property
from typing import Protocol

from mlm.corpus.sections import FilterConfig

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
BULLETS = ("•", "‣", "◦", "▪", "-", "*")
ELLIPSES = ("…", "...")
LETTER = re.compile(r"[^\W\d_]")


class Measures:
    """What the rules ask about a text, found out once."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        """What white space separates."""
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """Lines with something on them, stripped."""
        return [line for line in map(str.strip, self.text.splitlines()) if line]

    @property
    def mean_word_length(self) -> float:
        """In letters, punctuation included."""
        return len("".join(self.words)) / len(self.words)

    @property
    def symbol_ratio(self) -> float:
        """`#`, or ellipses, per word: the greater of the two."""
        count = self.text.count
        return max(count("#"), sum(map(count, ELLIPSES))) / len(self.words)

    @property
    def alphabetic_words(self) -> float:
        """Share of words with a letter."""
        return sum(word.isalpha() or LETTER.search(word) is not None for word in self.words) / len(self.words)

    @property
    def stop_words(self) -> int:
        """How many of STOP_WORDS occur."""
        return len(STOP_WORDS.intersection(map(str.lower, self.words)))

    @property
    def bullet_lines(self) -> float:
        """Share of lines that begin with a bullet."""
        return sum(line.startswith(BULLETS) for line in self.lines) / len(self.lines)

    @property
    def ellipsis_lines(self) -> float:
        """Share of lines that end with an ellipsis."""
        return sum(line.endswith(ELLIPSES) for line in self.lines) / len(self.lines)

    @property
    def duplicate_lines(self) -> float:
        """Share of lines that repeat an earlier one."""
        return 1 - len(set(self.lines)) / len(self.lines)


class AnyMeasures(Protocol):
    """Measures of a text, however it is held."""

    @property
    def words(self) -> Sized: ...

    @property
    def mean_word_length(self) -> float: ...

    @property
    def symbol_ratio(self) -> float: ...

    @property
    def alphabetic_words(self) -> float: ...

    @property
    def stop_words(self) -> int: ...

    @property
    def bullet_lines(self) -> float: ...

    @property
    def ellipsis_lines(self) -> float: ...

    @property
    def duplicate_lines(self) -> float: ...


RULES: dict[str, Callable[[AnyMeasures, float], bool]] = {
    "min_words": lambda text, limit: len(text.words) < limit,
    "max_words": lambda text, limit: len(text.words) > limit,
    "min_mean_word_length": lambda text, limit: text.mean_word_length < limit,
    "max_mean_word_length": lambda text, limit: text.mean_word_length > limit,
    "max_symbol_ratio": lambda text, limit: text.symbol_ratio > limit,
    "max_bullet_lines": lambda text, limit: text.bullet_lines > limit,
    "max_ellipsis_lines": lambda text, limit: text.ellipsis_lines > limit,
    "min_alphabetic_words": lambda text, limit: text.alphabetic_words < limit,
    "min_stop_words": lambda text, limit: text.stop_words < limit,
    "max_duplicate_lines": lambda text, limit: text.duplicate_lines > limit,
}
"""Whether a text breaks a rule, by the key of FilterConfig that holds its limit."""
NEED_NO_WORDS = frozenset(("min_words", "max_words"))


def active_rules(config: FilterConfig) -> dict[str, float]:
    """The rules that are on, with their limits, in the order of RULES."""
    limits = {rule: getattr(config, rule) for rule in RULES}
    return {rule: limit for rule, limit in limits.items() if limit is not None}


def broken_rule(text: str, rules: dict[str, float]) -> str | None:
    """The first rule that a text breaks, None when it passes all of them."""
    return broken_by(Measures(text), rules)


def broken_by(measures: AnyMeasures, rules: dict[str, float]) -> str | None:
    """The first rule that a text of these measures breaks, None when it passes all of them."""
    for rule, limit in rules.items():
        if (rule in NEED_NO_WORDS or measures.words) and RULES[rule](measures, limit):
            return rule
    return None
