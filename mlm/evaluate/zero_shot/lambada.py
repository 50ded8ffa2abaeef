"""LAMBADA by two protocols: Megatron-LM's strict cloze accuracy, and lm-eval's accuracy and perplexity.

In both, a passage is answered correctly when every token of its last word is the most probable one, given
the passage's own tokens before it. They differ in what a word is and in how it is tokenised.
"""

from collections.abc import Sequence
from functools import partial
from statistics import fmean

from mlm.data.tokenizer import Tokenizer
from mlm.evaluate.zero_shot import sources
from mlm.evaluate.zero_shot.protocol import LM_EVAL, V1, Metric, Protocol, exp, exp_stderr
from mlm.evaluate.zero_shot.sources import EvalTexts
from mlm.inference.scoring import Request, Score, mean_stderr, request_after
from mlm.util.errors import UserError

MAX_LOCATIONS = 20
"""Most locations of truncated and omitted passages in a receipt; their numbers count all."""
Cloze = tuple[list[int], list[int]]
"""Tokens of the context and of the word to predict; empty for a passage that lacks one."""


def protocols(
    path: str | None, standard_path: str | None, tokenizer: Tokenizer, length: int, limit: int | None
) -> list[Protocol]:
    """Return both protocols on the original form, and lm-eval's on the lower-case form.

    A form without a file is left out; without either file both come from the Hub. Raises UserError,
    CorruptFileError.
    """
    from_hub = path is None and standard_path is None
    result = list[Protocol]()
    if path is not None or from_hub:
        passages = sources.lambada(path, standard=False)
        for build_protocol in (strict_cloze, cloze):
            result.append(build_protocol(passages, tokenizer, seq_length=length, limit=limit))
    if standard_path is not None or from_hub:
        passages = sources.lambada(standard_path, standard=True)
        result.append(cloze(passages, tokenizer, seq_length=length, limit=limit))
    return result


def strict_cloze(source: EvalTexts, tokenizer: Tokenizer, *, seq_length: int, limit: int | None) -> Protocol:
    """Return Megatron-LM's strict cloze accuracy (arXiv:1909.08053, appendix E.2).

    The word is the text after the last white space; context and word are tokenised separately. Raises
    UserError if no passage can be scored.
    """
    contexts, words = list[str](), list[str]()
    for text in source.texts[:limit]:
        word = (text.split() or [""])[-1]
        contexts.append(text[: text.rfind(word)].strip())
        words.append(f" {word}" if contexts[-1] else "")
    pairs = zip(tokenizer.encode_batch(contexts), tokenizer.encode_batch(words), strict=True)
    splits = [(context.tolist(), word.tolist()) for context, word in pairs]
    return build("lambada", V1, source, splits, seq_length)


def cloze(source: EvalTexts, tokenizer: Tokenizer, *, seq_length: int, limit: int | None) -> Protocol:
    """Return lm-eval's lambada_openai or lambada_standard (lm_eval/tasks/lambada), by the form of the data.

    The word is the text after the last space; its tokens are the passage's after the number of tokens that
    the context alone has. Raises UserError if no passage can be scored.
    """
    contexts, passages, splits = list[str](), list[str](), list[Cloze]()
    for text in source.texts[:limit]:
        context, _, word = text.rpartition(" ")
        passages.append(f"{context} {word}" if len(text.split()) > 1 else "")
        contexts.append(context.rstrip() if passages[-1] else "")
    pairs = zip(tokenizer.encode_batch(contexts), tokenizer.encode_batch(passages), strict=True)
    for begin, tokens in pairs:
        # without a space, as in "one\ntwo", the word of lm-eval is the full passage
        context_ids = begin.tolist() or [tokenizer.prefix_id]
        splits.append((context_ids, tokens.tolist()[len(begin) :]))
    task = "lambada_standard" if source.form.startswith("lower") else "lambada_openai"
    return build(task, LM_EVAL, source, splits, seq_length)


def build(task: str, name: str, source: EvalTexts, splits: Sequence[Cloze], seq_length: int) -> Protocol:
    """Build a protocol's requests from contexts and words. Raises UserError if no passage can be scored.

    A passage of more than seq_length tokens loses its beginning. One without context or word, or with too
    long a word, is omitted. Both are counted.
    """
    locations, truncated, skipped, requests = source.locations, list[str](), list[str](), list[Request]()
    for location, (context, word) in zip(locations, splits, strict=False):
        if not context or not word or len(word) > seq_length:
            skipped.append(location)
            continue
        room = seq_length + 1 - len(word)
        if len(context) > room:
            truncated.append(location)
        requests.append(request_after(context[-room:], word))
    if not requests:
        raise UserError(
            f"{source.name}: no passage has a context and a word of up to {seq_length} tokens "
            f"(the first is {locations[0]}); give passages of two words or more"
        )
    warnings = []
    for listed, problem in (
        (skipped, "left out, as they have less than two words or too long a last word"),
        (truncated, f"truncated on the left to {seq_length} tokens"),
    ):
        if listed:
            more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
            warnings.append(f"{len(listed)} passages {problem}: {', '.join(listed[:3])}{more}")
    return Protocol(
        task=task,
        name=name,
        source=source,
        requests=tuple(requests),
        finish=partial(accuracy, perplexity=name != V1),
        facts={
            "seq_length": seq_length,
            "N": len(requests),
            "skipped": len(skipped),
            "skipped_places": skipped[:MAX_LOCATIONS],
            "cut": len(truncated),
            "cut_places": truncated[:MAX_LOCATIONS],
            "T": sum(len(r.tokens) - r.first for r in requests),
            "standard_errors": (
                "acc: sqrt(p (1 - p) / (n - 1)), as lm-eval; perplexity: to first order, which lm-eval's "
                "100,000 random resamplings approach"
            ),
        },
        warnings=tuple(warnings),
    )


def accuracy(scores: Sequence[Score], *, perplexity: bool) -> dict[str, Metric]:
    """Return the share of passages answered correctly, and for lm-eval exp of the mean loss per passage."""
    correct, losses = [float(s.is_greedy) for s in scores], [s.loss for s in scores]
    metrics = {"acc" if perplexity else "accuracy": Metric(fmean(correct), mean_stderr(correct))}
    if perplexity:
        loss = fmean(losses)
        metrics["perplexity"] = Metric(exp(loss), exp_stderr(loss, mean_stderr(losses)))
    return metrics
