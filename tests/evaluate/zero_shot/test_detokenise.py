"""WikiText's artefacts: each rule, and all of them together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm.evaluate.zero_shot.wikitext103 import detokenise


@pytest.mark.parametrize(
    ("apart", "together"),
    [
        ("dogs ' tails", "dogs' tails"),
        ("well @-@ known", "well-known"),
        ("1 @,@ 500", "1,500"),
        ("3 @.@ 3", "3.3"),
        ("so : this ; that . here ! there ? or , now", "so: this; that. here! there? or, now"),
        ("a : ; b", "a:; b"),  # each mark finds the spaces that the one before left
        ("( 24 in )", "(24 in)"),
        ("[ sic ] { x }", "[sic] {x}"),
        ('a " quoted " word', 'a "quoted" word'),
        ("a ' quoted ' word", "a 'quoted' word"),
        ("( over \n two lines )", "(over\ntwo lines)"),
        ("= = = = Four = = = =", "==== Four ===="),
        ("= = = Three = = =", "=== Three ==="),
        ("= = Two = =", "== Two =="),
        ("= One =", "= One ="),
        ("5 ° C", "5°C"),
        ("end . \n Next", "end.\nNext"),
        ("about N of them", "about 1 of them"),
        ("the sea 's floor", "the sea's floor"),
    ],
)
def test_an_artefact_is_undone(apart: str, together: str) -> None:
    assert detokenise(apart) == together


@given(st.lists(st.sampled_from([*" '\"()[]{}=:;.!?,@-\n°Ns1a", " 's", " @-@ ", "= = "]), max_size=40))
def test_it_is_what_lm_eval_makes_of_any_text(parts: list[str]) -> None:
    theirs = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext").wikitext_detokenizer
    text = "".join(parts)
    assert detokenise(text) == theirs({"page": text})
