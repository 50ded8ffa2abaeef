"""WikiText's two protocols: windows, words, and the numbers of a reference made from the protocol's text."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.evaluate.zero_shot import sources, wikitext103
from mlm.evaluate.zero_shot.protocol import Protocol, ratio_stderr
from mlm.evaluate.zero_shot.wikitext103 import detokenise
from mlm.inference.scoring import Score, mean_stderr, rolling_windows, score
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from tests.evaluate.zero_shot import reference
from tests.evaluate.zero_shot.texts import SEQ_LENGTH, WIKITEXT, load, tokenizer, write_model, write_wikitext


def whole(folder: Path, stride: int, text: str = WIKITEXT, limit: int | None = None) -> Protocol:
    source = sources.wikitext(str(write_wikitext(folder, text)), raw=False)
    return wikitext103.whole_text(source, tokenizer(), seq_length=SEQ_LENGTH, stride=stride, limit=limit)


def articles(folder: Path, length: int = SEQ_LENGTH, limit: int | None = None) -> Protocol:
    source = sources.wikitext(str(write_wikitext(folder)), raw=True)
    return wikitext103.per_article(source, tokenizer(), seq_length=length, limit=limit)


@pytest.mark.parametrize("stride", [1, 5, 7, SEQ_LENGTH])
@pytest.mark.parametrize("num_tokens", [2, SEQ_LENGTH + 1, SEQ_LENGTH + 2, 60])
def test_every_token_but_the_first_is_scored_once(num_tokens: int, stride: int) -> None:
    windows = list(wikitext103.overlapping_windows(num_tokens, SEQ_LENGTH, stride))
    assert [t for _, first, end in windows for t in range(first, end)] == list(range(1, num_tokens))


@pytest.mark.parametrize("stride", [1, 7])
def test_perplexities_are_those_of_the_protocols_text(tmp_path: Path, stride: int) -> None:
    model = write_model(tmp_path / "model")
    protocol = whole(tmp_path, stride)
    ctx = ParallelContext()
    metrics = protocol.finish(score(load(tmp_path / "model", ctx), protocol.requests, batch_size=2, ctx=ctx))
    adjusted, unadjusted = reference.wikitext103(
        model, tokenizer(), WIKITEXT, detokenise(WIKITEXT), length=SEQ_LENGTH, stride=stride
    )
    assert metrics["adjusted perplexity"].value == pytest.approx(adjusted, rel=1e-9)
    assert metrics["perplexity per token"].value == pytest.approx(unadjusted, rel=1e-9)


def test_words_are_counted_as_distributed_before_detokenising(tmp_path: Path) -> None:
    text = " \n = A = \n \n well @-@ known , 's \n"
    facts = whole(tmp_path, 1, text).facts
    assert facts["T_o"] == len(["=", "A", "=", "\n", "\n", "well", "@-@", "known", ",", "'s"])
    assert facts["T"] == len(tokenizer().encode("\n= A =\n\nwell-known,'s\n"))
    facts = articles(tmp_path).facts
    found = sources.articles(WIKITEXT)
    assert (facts["N"], len(found)) == (3, 3)
    assert facts["T_o"] == sum(len(re.split(r"\s+", article)) for article in found)
    assert facts["bytes"] == sum(len(article.encode()) for article in found)


def test_errors_come_from_stretches_of_seq_length_tokens(tmp_path: Path) -> None:
    protocol = whole(tmp_path, 5)
    scores = [Score(float(n), False, len(r.tokens) - r.first) for n, r in enumerate(protocol.requests)]
    stretches = wikitext103.sum_stretches(scores, SEQ_LENGTH)
    assert math.fsum(loss for loss, _ in stretches) == math.fsum(s.loss for s in scores)
    assert all(tokens >= SEQ_LENGTH for _, tokens in stretches[:-1])
    assert max(tokens for _, tokens in stretches) < SEQ_LENGTH + 5


def test_a_limit_takes_the_first_articles(tmp_path: Path) -> None:
    assert articles(tmp_path, limit=2).facts["N"] == 2
    first_two = whole(tmp_path, 5, limit=2)
    assert first_two.facts["T"] < whole(tmp_path, 5).facts["T"]
    kept = WIKITEXT[: WIKITEXT.index(" = Third")]
    assert first_two.facts["T_o"] == len(kept.strip().split(" "))


@pytest.mark.parametrize("text", ["word \n", " \n \n", "", "a"])
def test_a_text_too_short_for_a_window_is_rejected(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"wiki\.test\.tokens"):
        whole(tmp_path, 5, text)


@pytest.mark.parametrize("length", [1, 2, SEQ_LENGTH, 48])
def test_rolling_windows_are_those_of_lm_eval(length: int) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    for count in range(0, 60):
        tokens = list(range(100, 100 + count))
        theirs = [
            utils.make_disjoint_window(pair)
            for pair in utils.get_rolling_token_windows(
                token_list=tokens, prefix_token=7, max_seq_len=length, context_len=1
            )
        ]
        ours = [
            (r.tokens[: r.first].tolist(), r.tokens[r.first :].tolist())
            for r in rolling_windows(tokens, 7, length)
        ]
        assert ours == theirs


def test_the_form_that_published_numbers_are_on_is_named(tmp_path: Path) -> None:
    assert whole(tmp_path, 5).warnings == ()
    assert "wikitext-103-raw-v1" in articles(tmp_path).warnings[0]


@given(st.lists(st.sampled_from([*" '\"()[]{}=:;.!?,@-\n°Ns1a", " 's", " @-@ ", "= = "]), max_size=40))
@settings(deadline=None)  # the first call imports lm-eval
def test_it_is_what_lm_eval_makes_of_any_text(parts: list[str]) -> None:
    theirs = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext").wikitext_detokenizer
    text = "".join(parts)
    assert detokenise(text) == theirs({"page": text})


def test_the_error_of_a_share_is_that_of_lm_eval() -> None:
    """sqrt(p (1 - p) / (n - 1)) = sqrt(0.3 * 0.7 / 9)."""
    assert mean_stderr([1.0] * 3 + [0.0] * 7) == pytest.approx(math.sqrt(0.3 * 0.7 / 9), rel=1e-12)
    theirs = pytest.importorskip("lm_eval.api.metrics").mean_stderr
    losses = np.random.default_rng(7).uniform(0, 9, 400).tolist()
    assert mean_stderr(losses) == pytest.approx(theirs(losses), rel=1e-12)


def test_the_error_of_a_ratio_is_what_resampling_gives() -> None:
    draw = np.random.default_rng(1)
    weights = draw.integers(1, 9, 300).astype(float)
    sums = weights * draw.uniform(2, 4, 300)
    chosen = draw.integers(0, 300, (3000, 300))
    resampled = (sums[chosen].sum(1) / weights[chosen].sum(1)).std(ddof=1)
    assert ratio_stderr(sums.tolist(), weights.tolist()) == pytest.approx(resampled, rel=0.06)
