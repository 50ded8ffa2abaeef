"""Text is fixed as ftfy does, its language identified, and rules applied, as datatrove applies them."""

import random
from dataclasses import replace

import ftfy
import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import gopher_quality_filter
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlm.cli.compose.composition import load_config
from mlm.corpus.config import DataBuildConfig, FilterConfig, NormaliseConfig
from mlm.corpus.filter import (
    CONFIG,
    PART,
    Cleaner,
    fix_text,
)
from mlm.util.errors import UserError

OURS = {
    "gopher_short_doc": "min_words",
    "gopher_long_doc": "max_words",
    "gopher_below_avg_threshold": "min_mean_word_length",
    "gopher_above_avg_threshold": "max_mean_word_length",
    "gopher_too_many_hashes": "max_symbol_ratio",
    "gopher_too_many_ellipsis": "max_symbol_ratio",
    "gopher_too_many_bullets": "max_bullet_lines",
    "gopher_too_many_end_ellipsis": "max_ellipsis_lines",
    "gopher_below_alpha_threshold": "min_alphabetic_words",
    "gopher_enough_stop_words": "min_stop_words",
}


OFF = NormaliseConfig(ftfy=False)


def verdict(text: str, **limits: float) -> str | None:
    return Cleaner(OFF, FilterConfig(**limits))(text)[1]


@pytest.mark.parametrize(
    ("rule", "limit", "good", "bad"),
    [
        ("min_words", 3, "one two three", "one two"),
        ("max_words", 3, "one two three", "one two three four"),
        ("min_mean_word_length", 3, "ab abcd", "ab abc"),
        ("max_mean_word_length", 3, "ab abcd", "ab abcde"),
        ("max_symbol_ratio", 0.5, "... two", "a... b… three"),
        ("max_bullet_lines", 0.5, "- one\n\n two", "- one\n * two\n• three\nfour"),
        ("max_ellipsis_lines", 0.5, "one... \n\ntwo", "one… \n two...\nthree"),
        ("min_alphabetic_words", 0.5, "(é1) 12", "a1 2 _"),
        ("min_stop_words", 2, "The OF", "the the of,"),
        ("max_duplicate_lines", 0.5, "one\n\n\n one \n two \n two", "a\na\na"),
    ],
)
def test_rule_drops_what_is_beyond_its_limit(rule: str, limit: float, good: str, bad: str) -> None:
    assert verdict(good, **{rule: limit}) is None
    assert verdict(bad, **{rule: limit}) == rule


def test_verdicts_are_those_of_datatrove_where_the_rules_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both split at white space; no word is punctuation alone, no line empty, no stop word in capitals."""
    monkeypatch.setattr(gopher_quality_filter, "split_into_words", lambda text, language: text.split())
    config: DataBuildConfig = load_config("data_build", ["input=i", "out=o", "tokenizer=t", "recipe=gopher"])
    # duplicate lines are another filter of datatrove's
    cleaner = Cleaner(OFF, replace(config.filter, max_duplicate_lines=None))
    theirs, seen = gopher_quality_filter.GopherQualityFilter(), set[str | None]()
    rng = random.Random(0)
    for _ in range(3000):
        text = page(rng)
        result = theirs.filter(Document(text=text, id=""))
        expected = None if result is True else OURS[result[1]]
        assert cleaner(text) == (text, expected)
        seen.add(expected)
    assert seen == {None, *OURS.values()} - {"max_words"}


def page(rng: random.Random) -> str:
    """A page near the limits of some rule."""
    stop_words = rng.choice([["the", "of", "and"], ["the"], ["with", "that"]])
    words = [*stop_words, "word", "longer", "12", "a#", "b..."]
    words += ["x" * rng.choice([1, 5, 40])]
    weights = [rng.choice([1, 5, 20]) for _ in words]
    lines = list[str]()
    for _ in range(rng.randint(1, 12)):
        line = " ".join(rng.choices(words, weights, k=rng.randint(1, 20)))
        bullet = rng.choice(["-", "•", ""]) if rng.random() < 0.9 else ""
        lines.append(bullet + line + rng.choice(["", "", "", "…"]))
    return "\n".join(lines)


ENGLISH = (
    "The council voted last night to spend more on schools, although many had asked for new roads instead."
)
GERMAN = (
    "Der Rat beschloss gestern, mehr Geld für Schulen auszugeben, obwohl viele neue Straßen verlangt hatten."
)
NO_RULE = FilterConfig(min_tokens=None)


def test_text_is_fixed_before_the_rules_are_applied() -> None:
    assert Cleaner(NormaliseConfig(), FilterConfig(min_words=2))("“one”\u2028two") == ('"one"\ntwo', None)


def test_language_is_identified_before_the_rules() -> None:
    cleaner = Cleaner(NormaliseConfig(languages=("en",)), FilterConfig(min_stop_words=2))
    assert [cleaner(text)[1] for text in (ENGLISH, GERMAN)] == [None, "language"]


@pytest.mark.parametrize(("code", "meant"), [("eng", "en"), ("DE", "de"), ("french", "fr")])
def test_unknown_language_names_the_nearest(code: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"normalise\.languages=\[{code}\].*{meant}"):
        Cleaner(NormaliseConfig(languages=(code,)), NO_RULE)


# letters that ftfy looks at, beside any others
TRICKY = "“”‘’–—…\n\r\t\x0c\x00\x85\u2028\u2029 &<;#'\"!~%aeÃ¢â‚¬œ™éﬁＡ，\u0301\xa0\xad\ufeff\x1b[0m"


@settings(deadline=None)  # the first call loads ftfy's tables
@given(st.text(st.sampled_from(TRICKY) | st.characters(codec="utf-8"), max_size=40))
@example("â€œone\n“two” – three…\nfour’s")
@example("&lt;\n<\n&lt;")
@example("“" * 5 + "Ã©\n" + "é\r\n")
def test_fixed_text_equals_that_of_ftfy(text: str) -> None:
    assert fix_text(text) == ftfy.fix_text(text, CONFIG)


def test_markup_far_on_in_a_line_keeps_its_entities() -> None:
    line = "a &amp; b " + "word " * PART + "<p>"
    assert fix_text(line) == line


@pytest.mark.parametrize("unit", ["a" * PART, "ab cd", "\u0301", "word " * 999])
def test_long_line_is_fixed_in_pieces_that_make_it_up(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line, pieces = "é" + unit * (3 * PART // len(unit) + 1), list[str]()
    monkeypatch.setattr(ftfy, "fix_text", lambda piece, config: pieces.append(piece) or piece)
    assert fix_text(line) == "".join(pieces) == line
    assert max(map(len, pieces)) <= PART
