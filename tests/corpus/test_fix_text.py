"""Mending: equal to ftfy's own result, in less time and in bounded pieces."""

from itertools import product

import ftfy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlm.corpus.filter import CONFIG, PART, fix_text, parts_of_line

# letters that ftfy looks at, beside any others
TRICKY = "“”‘’–—…\n\r\t\x0c\x00\x85\u2028\u2029 &<;#'\"!~%aeÃ¢â‚¬œ™éﬁＡ，\u0301\xa0\xad\ufeff\x1b[0m"


@settings(deadline=None)  # the first call loads ftfy's tables
@given(st.text(st.sampled_from(TRICKY) | st.characters(codec="utf-8"), max_size=40))
@example("â€œone\n“two” – three…\nfour’s")
@example("&lt;\n<\n&lt;")
@example("“" * 5 + "Ã©\n" + "é\r\n")
def test_fixed_text_equals_that_of_ftfy(text: str) -> None:
    assert fix_text(text) == ftfy.fix_text(text, CONFIG)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_short_run_of_letters_of_mojibake_is_what_ftfy_makes_of_it(length: int) -> None:
    for letters in product("“”‘’–—…Ãâ€Ðé\xa0 a", repeat=length):
        text = "".join(letters)
        assert fix_text(text) == ftfy.fix_text(text, CONFIG)


def test_markup_far_on_in_a_line_keeps_its_entities() -> None:
    line = "a &amp; b " + "word " * PART + "<p>"
    assert fix_text(line) == line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("“quotes” and ‘quotes’ – not dashes…", "\"quotes\" and 'quotes' – not dashes…"),
        ("schÃ¶n", "schön"),
        ("one\r\ntwo\rthree\u2028four", "one\ntwo\nthree\nfour"),
        ("ﬁnal\x00", "final"),
        ("e\u0301", "é"),
        ("a &amp; b", "a & b"),
        ("<p>a &amp; b", "<p>a &amp; b"),
        ("\tif x:\n\t\treturn  1\n", "\tif x:\n\t\treturn  1\n"),
        ("这是，测试！", "这是，测试！"),
    ],
)
def test_text_is_fixed_and_code_is_unchanged(text: str, expected: str) -> None:
    assert fix_text(text) == expected


@pytest.mark.parametrize("unit", ["a" * PART, "ab cd", "\u0301", "word " * 999])
def test_long_line_is_split_into_pieces_that_make_it_up(unit: str) -> None:
    line = unit * (3 * PART // len(unit) + 1)
    found = list(parts_of_line(line))
    assert "".join(found) == line
    assert max(map(len, found)) <= PART
