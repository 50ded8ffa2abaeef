"""A document is fixed, its language identified, and the rules applied, in that order."""

import sys
from types import SimpleNamespace

import pytest

from mlm.corpus.config import FilterConfig, NormaliseConfig
from mlm.corpus.filter import SAMPLE, Cleaner, LanguageFilter
from mlm.util.errors import UserError

ENGLISH = (
    "The council voted last night to spend more on schools, although many had asked for new roads instead."
)
GERMAN = (
    "Der Rat beschloss gestern, mehr Geld für Schulen auszugeben, obwohl viele neue Straßen verlangt hatten."
)
OFF = NormaliseConfig(ftfy=False)
NO_RULE = FilterConfig(min_tokens=None)


def test_text_is_fixed_before_the_rules_are_applied() -> None:
    assert Cleaner(NormaliseConfig(), FilterConfig(min_words=2))("“one”\u2028two") == ('"one"\ntwo', None)


def test_language_is_identified_before_the_rules() -> None:
    cleaner = Cleaner(NormaliseConfig(languages=("en",)), FilterConfig(min_stop_words=2))
    assert [cleaner(text)[1] for text in (ENGLISH, GERMAN)] == [None, "language"]


def test_language_of_a_long_text_is_identified_at_three_positions() -> None:
    text, seen = "".join(chr(i % 1000 + 32) for i in range(100_000)), list[str]()
    is_english = LanguageFilter(["en"], 0.65)
    is_english.detector = SimpleNamespace(classify=lambda sample: seen.append(sample) or ("en", 1.0))
    assert is_english(text)
    assert seen == [text[:SAMPLE] + "\n" + text[50_000 - SAMPLE // 2 :][:SAMPLE] + "\n" + text[-SAMPLE:]]


@pytest.mark.parametrize(
    ("code", "meant"), [("eng", "en"), ("DE", "de"), ("french", "fr"), ("qqq", "name some of ace, af")]
)
def test_unknown_language_names_the_nearest(code: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"normalise\.languages=\[{code}\].*{meant}"):
        Cleaner(NormaliseConfig(languages=(code,)), NO_RULE)


def test_detector_is_not_loaded_unless_languages_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    assert Cleaner(OFF, NO_RULE)(GERMAN) == (GERMAN, None)
