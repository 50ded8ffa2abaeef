"""History of the corpora that a run has read, across changes of its blend."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.data.blend import block
from mlm.data.blend_checks import normalize_weights
from mlm.data.blend_history import (
    BlendSegments,
    BlendSource,
    changed_corpus_problem,
    continue_history,
    decode,
    describe_change,
    encode,
    samples_needed,
    samples_read,
    seed_of,
)


def digest(name: str) -> str:
    return f"xxh3:{name.encode().hex():0>32}"


def blend(**weights: float) -> tuple[BlendSource, ...]:
    return tuple(
        BlendSource(name=name, path=f"corpora/{name}/train", digest=digest(name), weight=share)
        for name, share in zip(weights, normalize_weights(list(weights.values())), strict=True)
    )


def samples_of(history: BlendSegments, end: int) -> list[tuple[str, int]]:
    """Every sample of a run, in order: (corpus, number in it)."""
    ends = [segment.from_sample for segment in history[1:]] + [end]
    found = []
    for segment, until in zip(history, ends, strict=True):
        source, number = block([s.weight for s in segment.sources], 0, until - segment.from_sample)
        for i, j in zip(source.tolist(), number.tolist(), strict=True):
            found.append((segment.sources[i].name, segment.sources[i].first + j))
    return found


changes = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 1.0), min_size=1),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(changes)
def test_no_sample_is_repeated_or_skipped_however_the_blend_changes(
    legs: list[tuple[int, dict[str, float]]],
) -> None:
    """Of each corpus the run reads 0, 1, 2, …, whichever corpora come, go and return."""
    history, consumed = BlendSegments(), 0
    for length, weights in legs:
        history = continue_history(
            decode(json.loads(json.dumps(encode(history))), consumed), blend(**weights), consumed
        )
        consumed += length
    read = samples_of(history, consumed)
    assert len(read) == consumed
    for name in "abcde":
        numbers = [number for corpus, number in read if corpus == name]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("resumes", [[30], [1, 2, 3], [99]])
def test_the_same_blend_continues_in_its_segment_and_one_of_which_nothing_was_read_has_none(
    resumes: list[int],
) -> None:
    history = begun = continue_history((), blend(a=0.3, b=0.7), 0)
    for consumed in resumes:
        history = continue_history(history, blend(a=0.3, b=0.7), consumed)
    assert history == begun
    other = continue_history(begun, blend(c=1), 40)
    assert continue_history(other, blend(a=0.3, b=0.7), 40) == begun
    turned = continue_history(begun, blend(b=0.7, a=0.3), 40)  # another order is another blend
    assert [s.first for s in turned[-1].sources] == [28, 12]


def test_a_corpus_that_has_moved_is_the_same_and_one_of_other_tokens_another() -> None:
    begun = continue_history((), blend(a=1, b=1), 0)
    moved = tuple(replace(s, path=f"elsewhere/{s.name}", name=f"my-{s.name}") for s in blend(a=1, b=1))
    (segment,) = continue_history(begun, moved, 40)
    assert [s.path for s in segment.sources] == ["elsewhere/a", "elsewhere/b"]
    one, other = (replace(blend(a=1)[0], path=name, tokens=digest(name)) for name in ("x", "y"))
    assert samples_read(continue_history((), (one,), 0), other, 40) == 0
    assert samples_read(continue_history((), (one,), 0), replace(other, tokens=""), 40) == 40


def test_samples_needed_are_those_read_in_the_end() -> None:
    history = continue_history(continue_history((), blend(a=1, b=3), 0), blend(a=1, c=1), 40)
    read = samples_of(history, 77)
    counts = [max(n for corpus, n in read if corpus == name) + 1 for name in "ac"]
    assert samples_needed(history[-1], 77) == counts


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"digest": digest("z")}, "corpora/a/train.idx is not what this run was trained on: .*rename"),
        ({"tokens": digest("z")}, "corpora/a/train.bin is not what this run was trained on: .*rename"),
        ({"digest": digest("z"), "path": "corpora/z/train"}, None),
        ({"digest": digest("z"), "path": "./corpora/a/train"}, "./corpora/a/train.idx is not what this run"),
        ({"tokens": ""}, None),  # a receipt that went
    ],
)
def test_another_corpus_at_the_path_of_one_that_was_read_is_named(
    changes: dict[str, str], problem: str | None
) -> None:
    (source,) = blend(a=1)
    source = replace(source, tokens=digest("t"))
    found = changed_corpus_problem(continue_history((), (source,), 0), (replace(source, **changes),))
    assert (found is None) == (problem is None)
    assert problem is None or re.match(problem, str(found))


def test_corpora_that_were_swapped_are_known_by_their_digests() -> None:
    a, b = blend(a=1, b=1)
    swapped = (replace(a, path=b.path), replace(b, path=a.path))
    assert changed_corpus_problem(continue_history((), (a, b), 0), swapped) is None


def test_line_on_a_change_names_weights_new_and_missing_corpora() -> None:
    begun = continue_history((), blend(a=1, b=3), 0)
    assert describe_change(begun, 0) is None
    assert describe_change(continue_history(begun, blend(a=1, b=3), 40), 40) is None
    assert describe_change(continue_history(begun, blend(a=1, c=1), 40), 40) == (
        "data changed at sample 40: a 50.00% (was 25.00%), c 50.00% (new); without b"
    )
    history = continue_history(begun, blend(a=1), 40)
    assert describe_change(continue_history(history, blend(a=1, b=1), 60), 60) == (
        "data changed at sample 60: a 50.00% (was 100.00%), b 50.00% (back, after 30)"
    )


def test_a_corpus_keeps_the_sample_order_that_it_was_read_by() -> None:
    """That of a run on one corpus; new ones come in an order of their own."""
    alone = continue_history((), blend(a=1), 0)
    history = continue_history(alone, [replace(s, order=1) for s in blend(b=1, a=1)], 40)
    assert [s.order for s in history[-1].sources] == [1, 0]
    history = continue_history(history, blend(b=1), 60)
    assert [s.order for s in history[-1].sources] == [1]
    resumed = continue_history(history, [replace(s, order=1) for s in blend(a=1, c=1)], 80)
    assert [s.order for s in resumed[-1].sources] == [0, 1]
    assert [s.order for s in decode(encode(resumed), 90)[-1].sources] == [0, 1]


def test_sources_of_their_own_order_have_different_seeds() -> None:
    a, b = (replace(s, order=1) for s in blend(a=1, b=1))
    assert len({5, seed_of(a, 5), seed_of(b, 5), seed_of(a, 6)}) == 4
    assert seed_of(replace(a, order=0), 5) == 5
    assert seed_of(replace(a, name="moved", path="elsewhere", weight=0.1), 5) == seed_of(a, 5)


def said() -> list[dict[str, Any]]:
    return json.loads(
        json.dumps(encode(continue_history(continue_history((), blend(a=1, b=3), 0), blend(a=1, c=1), 40)))
    )  # type: ignore[no-any-return]


HOSTILE: dict[str, Any] = {
    "texts": lambda s: ["ab"],
    "too many segments": lambda s: [{**s[0], "from_sample": n} for n in range(1 << 11)],
    "too many sources": lambda s: [
        {**s[0], "sources": [{**s[0]["sources"][0], "weight": 2**-11}] * (1 << 11)}
    ],
    "not from sample 0": lambda s: s[1:],
    "turned round": lambda s: s[::-1],
    "from the future": lambda s: [s[0], {**s[1], "from_sample": 42}],
    "from true": lambda s: [s[0], {**s[1], "from_sample": True}],
}
SOURCES: dict[str, Any] = {
    "a control character in a name": {"name": "a\x1b[2J"},
    "a name of a megabyte": {"name": "a" * (1 << 20)},
    "a digest of another kind": {"digest": "md5:0"},
    "a receipt that is none": {"receipt": None},
    "an enormous count": {"first": 1 << 60},
    "a weight of 0": {"weight": 0.0},
    "a weight that is too large": {"weight": 0.9},
    "no weight": {"weight": ...},
    "an unknown order": {"order": 2},
}


@pytest.mark.parametrize("case", [*HOSTILE, *SOURCES])
def test_damaged_history_is_rejected(case: str) -> None:
    if case in HOSTILE:
        value = HOSTILE[case](said())
    else:
        value = said()
        value[0]["sources"][0] |= SOURCES[case]
        value[0]["sources"][0] = {k: v for k, v in value[0]["sources"][0].items() if v is not ...}
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode(value, 1 << 12 if case == "too many segments" else 41)
