"""Quality rules: each at its limit, their order, and datatrove's verdict where the rules are the same."""

import random
from dataclasses import fields

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import gopher_quality_filter

from mlm.cli.compose.composition import load_config
from mlm.corpus.config import DataBuildConfig, FilterConfig
from mlm.corpus.filter import MEASURES, active_rules, broken_rule

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


def verdict(text: str, **limits: float) -> str | None:
    return broken_rule(text, active_rules(FilterConfig(**limits)))


@pytest.mark.parametrize(
    ("rule", "limit", "good", "bad"),
    [
        ("min_words", 3, "one two three", "one two"),
        ("max_words", 3, "one two three", "one two three four"),
        ("min_mean_word_length", 3, "ab abcd", "ab abc"),
        ("max_mean_word_length", 3, "ab abcd", "ab abcde"),
        ("max_symbol_ratio", 0.5, "# two", "# # three"),
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


def test_there_is_a_measure_for_every_key() -> None:
    keys = {field.name for field in fields(FilterConfig)} - {"min_tokens"}
    assert {key.partition("_")[2] for key in keys} == MEASURES.keys()


def test_text_counts_under_the_first_rule_it_breaks() -> None:
    limits = {"min_stop_words": 1, "min_alphabetic_words": 0.5, "min_words": 5}
    assert verdict("1 2 3", **limits) == "min_words"
    assert verdict("1 2 3 4 5", **limits) == "min_alphabetic_words"


def test_verdicts_are_those_of_datatrove_where_the_rules_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both split at white space; no word is punctuation alone, no line empty, no stop word in capitals."""
    monkeypatch.setattr(gopher_quality_filter, "split_into_words", lambda text, language: text.split())
    config: DataBuildConfig = load_config("data_build", ["input=i", "out=o", "tokenizer=t", "recipe=gopher"])
    rules = active_rules(config.filter)
    del rules["max_duplicate_lines"]  # of another filter of datatrove's
    theirs, seen = gopher_quality_filter.GopherQualityFilter(), set[str | None]()
    rng = random.Random(0)
    for _ in range(3000):
        text = page(rng)
        result = theirs.filter(Document(text=text, id=""))
        expected = None if result is True else OURS[result[1]]
        assert broken_rule(text, rules) == expected, text
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
