"""WikiText-103 by two protocols: Megatron-LM's over the whole file, and lm-eval's article by article.

T is the number of tokens after detokenising, T_o the number of words of the file as it is distributed.
"""

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from mlm.data.tokenizer import Tokenizer
from mlm.evaluate.zero_shot import sources
from mlm.evaluate.zero_shot.protocol import LM_EVAL, V1, Metric, Protocol, exp, exp_stderr, ratio_stderr
from mlm.evaluate.zero_shot.sources import EvalTexts, articles
from mlm.inference.scoring import Request, Score, rolling_windows
from mlm.util.errors import UserError


def protocols(
    path: str | None, raw_path: str | None, tokenizer: Tokenizer, length: int, stride: int, limit: int | None
) -> list[Protocol]:
    """Return both protocols; a single file serves both. Raises UserError, CorruptFileError."""
    words = sources.wikitext(path, raw=False)
    raw = words if path is not None and raw_path is None else sources.wikitext(raw_path, raw=True)
    return [
        whole_text(words, tokenizer, seq_length=length, stride=stride, limit=limit),
        per_article(raw, tokenizer, seq_length=length, limit=limit),
    ]


# ----- Megatron-LM, arXiv:1909.08053, appendix E.1


def whole_text(
    source: EvalTexts, tokenizer: Tokenizer, *, seq_length: int, stride: int, limit: int | None
) -> Protocol:
    """Return perplexity over one file, adjusted to its words. Raises UserError for too short a text."""
    text = source.texts[0] if limit is None else "\n".join(articles(source.texts[0])[:limit])
    words = len(text.strip().split(" "))
    tokens = np.asarray(tokenizer.encode(detokenise(text)), dtype=np.int64)
    if len(tokens) < 2 or words < 2:
        raise UserError(
            f"{source.name}: {len(tokens)} tokens and {words} words are too few to score; use more"
        )
    if stride > seq_length:
        raise UserError(
            f"overlapping_eval={stride} is more than the {seq_length} tokens read at a time, so some would "
            f"not be scored; use overlapping_eval={seq_length} or less"
        )
    windows = list(overlapping_windows(len(tokens), seq_length, stride))
    return Protocol(
        task="wikitext103",
        name=V1,
        source=source,
        requests=tuple(Request(tokens[begin:end], first - begin) for begin, first, end in windows),
        finish=partial(adjusted_perplexity, num_tokens=len(tokens), num_words=words, seq_length=seq_length),
        facts={
            "seq_length": seq_length,
            "stride": stride,
            "T": len(tokens),
            "T_o": words,
            "N": len(windows),
            "scored_tokens": len(tokens) - 1,
            "standard_errors": "to first order, over stretches of seq_length scored tokens or more",
        },
        warnings=form_warning(source, wants_unk=True),
    )


def overlapping_windows(num_tokens: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first, end) of each window: tokens[begin:end], of which tokens[first:end] are scored.

    The model reads `length` tokens of a window, all but its last. Each token but the text's first is scored
    once: all in the first window, the last `stride` in each later one. The last window may be shorter, with
    less context.
    """
    yield 0, 1, min(length + 1, num_tokens)
    for first in range(length + 1, num_tokens, stride):
        yield first - 1 - length + stride, first, min(first + stride, num_tokens)


def adjusted_perplexity(
    scores: Sequence[Score], *, num_tokens: int, num_words: int, seq_length: int
) -> dict[str, Metric]:
    """Return exp(summed loss / (T_o - 1)), and the unadjusted exp(summed loss / (T - 1))."""
    total = math.fsum(s.loss for s in scores)
    assert sum(s.tokens for s in scores) == num_tokens - 1
    loss, per_word = total / (num_tokens - 1), total / (num_words - 1)
    stretches = sum_stretches(scores, seq_length)
    error = ratio_stderr([loss for loss, _ in stretches], [tokens for _, tokens in stretches])
    error_per_word = None if error is None else error * (num_tokens - 1) / (num_words - 1)
    return {
        "adjusted perplexity": Metric(exp(per_word), exp_stderr(per_word, error_per_word)),
        "perplexity per token": Metric(exp(loss), exp_stderr(loss, error)),
        "loss per token": Metric(loss, error),
    }


def sum_stretches(scores: Sequence[Score], length: int) -> list[tuple[float, int]]:
    """Return (summed loss, tokens) of runs of neighbouring windows, each of at least `length` scored tokens.

    Neighbouring windows share a passage, so their losses are correlated; those of longer runs hardly are.
    """
    stretches, loss, tokens = list[tuple[float, int]](), 0.0, 0
    for s in scores:
        loss, tokens = loss + s.loss, tokens + s.tokens
        if tokens >= length:
            stretches.append((loss, tokens))
            loss, tokens = 0.0, 0
    return [*stretches, (loss, tokens)] if tokens else stretches


# ----- lm-eval, lm_eval/tasks/wikitext and lm_eval/utils.py


def per_article(source: EvalTexts, tokenizer: Tokenizer, *, seq_length: int, limit: int | None) -> Protocol:
    """Return perplexities per word and byte of the articles as distributed. Raises UserError."""
    texts = articles(source.texts[0])[:limit]
    windows = [
        list(rolling_windows(tokenizer.encode(detokenise(article)), tokenizer.prefix_id, seq_length))
        for article in texts
    ]
    requests = tuple(request for article in windows for request in article)
    if not requests:
        raise UserError(f"{source.name}: holds no article with a token in it; use more text")
    words = [len(re.split(r"\s+", article)) for article in texts]
    sizes = [len(article.encode()) for article in texts]
    scored = sum(len(request.tokens) - request.first for request in requests)
    return Protocol(
        task="wikitext",
        name=LM_EVAL,
        source=source,
        requests=requests,
        finish=partial(per_word_and_byte, counts=list(map(len, windows)), words=words, sizes=sizes),
        facts={
            "seq_length": seq_length,
            "stride": seq_length,
            "T": scored,
            "T_o": sum(words),
            "bytes": sum(sizes),
            "N": len(texts),
            "windows": len(requests),
            "standard_errors": "to first order, over articles (lm-eval gives none)",
        },
        warnings=form_warning(source, wants_unk=False),
    )


def per_word_and_byte(
    scores: Sequence[Score], *, counts: list[int], words: list[int], sizes: list[int]
) -> dict[str, Metric]:
    """Return perplexities by the words and bytes of the articles before detokenising."""
    remaining = iter(scores)
    losses = [math.fsum(next(remaining).loss for _ in range(count)) for count in counts]
    per_word, per_byte = (math.fsum(losses) / sum(units) for units in (words, sizes))
    error_word, error_byte = ratio_stderr(losses, words), ratio_stderr(losses, sizes)
    bit = math.log(2)
    return {
        "word_perplexity": Metric(exp(per_word), exp_stderr(per_word, error_word)),
        "byte_perplexity": Metric(exp(per_byte), exp_stderr(per_byte, error_byte)),
        "bits_per_byte": Metric(per_byte / bit, None if error_byte is None else error_byte / bit),
    }


def form_warning(source: EvalTexts, *, wants_unk: bool) -> tuple[str, ...]:
    """Warn if a text does not have the form of the protocol's published numbers."""
    if ("<unk>" in source.texts[0]) == wants_unk:
        return ()
    form = "wiki.test.tokens (wikitext-103-v1)" if wants_unk else "the raw form (wikitext-103-raw-v1)"
    name = V1 if wants_unk else LM_EVAL
    return (f"published numbers by {name}'s protocol are on {form}; {source.name} is not: {source.form}",)


# ----- detokenisation: WikiText is distributed with spaces around words and punctuation
#
# Megatron-LM (tasks/zeroshot_gpt/detokenizer.py, until 2025) and lm-eval
# (lm_eval/tasks/wikitext/preprocess_wikitext.py) share these rules; scores are comparable only if the same
# characters are scored. The rules are greedy and imperfect (every "s '" loses its space), and run in this
# order over the full text: a pair of marks may span lines. One more rule of both has no effect and is left
# out: meant for years as in "' 90s", it requires a slash before and after them.


def detokenise(text: str) -> str:
    """Remove the spaces that WikiText's tokenisation inserted, by the rules of the guide."""
    text = text.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":  # in this order: each mark matches the spaces that the previous one left
        text = text.replace(f" {mark} ", f"{mark} ")
    for opening, closing in ("()", "[]", "{}", '""', "''"):  # not nested: "( 24 in )" to "(24 in)"
        inside = rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}"
        text = re.sub(inside, rf"{opening}\1{closing}", text)
    for heading in ("====", "===", "=="):  # the longest first: the others are part of it
        text = text.replace(" ".join(heading), heading)
    for apart, together in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(apart, together)
    return text
