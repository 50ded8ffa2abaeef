"""LAMBADA's two protocols: words, tokens, what is left out and cut, and the numbers of a reference."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlm.evaluate.zero_shot import lambada, sources
from mlm.evaluate.zero_shot.protocol import Protocol
from mlm.inference.scoring import Score, score
from mlm.parallel.mesh import ParallelContext
from tests.evaluate.zero_shot import reference
from tests.evaluate.zero_shot.texts import PASSAGES, load, tokenizer, write_lambada, write_trained_model

LENGTH = 24


def built(folder: Path, texts: tuple[str, ...] = PASSAGES, *, strict: bool, length: int = LENGTH) -> Protocol:
    source = sources.lambada(str(write_lambada(folder, texts)), standard=False)
    build = lambada.strict_cloze if strict else lambada.cloze
    return build(source, tokenizer(), seq_length=length, limit=None)


def word(protocol: Protocol, number: int = 0) -> str:
    request = protocol.requests[number]
    return tokenizer().decode(request.tokens[request.first :].tolist())


def test_strict_accuracy_is_that_of_the_protocols_text(tmp_path: Path) -> None:
    model = write_trained_model(tmp_path / "model", PASSAGES[::2])
    protocol, ctx = built(tmp_path, strict=True), ParallelContext()
    scores = score(load(tmp_path / "model", ctx), protocol.requests, batch_size=1, ctx=ctx)
    expected = reference.strict_cloze(model, tokenizer(), list(PASSAGES), length=LENGTH)
    assert [s.is_greedy for s in scores] == expected
    assert 0 < sum(expected) < len(expected)
    assert protocol.finish(scores)["accuracy"].value == sum(expected) / len(expected)


def test_the_word_is_what_follows_white_space_or_a_space(tmp_path: Path) -> None:
    """lm-eval divides at spaces alone."""
    text = ('It was late.\n\n"Go home.\n\nNow"',)
    assert word(built(tmp_path, text, strict=True)) == ' Now"'
    assert word(built(tmp_path, text, strict=False)) == ' home.\n\nNow"'


def test_context_and_word_are_tokenised_apart_or_together() -> None:
    """A tokenizer that merges over the end of the context shows which."""

    class Merging:
        """Letters are tokens, but `x y` is one."""

        bos_id, eod_id = 0, 0

        def encode_batch(self, texts: Sequence[str]) -> "list[array[int]]":
            return [array("I", [ord(c) for c in text.replace("x y", "\u0100")]) for text in texts]

    source = sources.EvalTexts(name="x", form="", texts=("wx yz",), locations=("x:1",), digest="")
    for build, word in ((lambada.strict_cloze, " yz"), (lambada.cloze, "z")):
        (request,) = build(source, Merging(), seq_length=9, limit=None).requests  # type: ignore[arg-type]
        assert (request.tokens.tolist(), request.first) == ([ord(letter) for letter in f"wx{word}"], 2)


@pytest.mark.parametrize("strict", [True, False])
def test_a_long_passage_is_cut_at_its_beginning_and_counted(tmp_path: Path, strict: bool) -> None:
    protocol = built(tmp_path, strict=strict)
    assert max(len(request.tokens) for request in protocol.requests) == LENGTH + 1
    whole = built(tmp_path, strict=strict, length=48 * 9)
    cut = [len(r.tokens) > LENGTH + 1 for r in whole.requests]
    assert protocol.facts["cut"] == sum(cut) > 0
    for short, long in zip(protocol.requests, whole.requests, strict=True):
        assert short.tokens.tolist() == long.tokens.tolist()[-LENGTH - 1 :]
        assert len(short.tokens) - short.first == len(long.tokens) - long.first


@pytest.mark.parametrize("strict", [True, False])
def test_passages_without_context_or_word_are_left_out_counted_and_named(
    tmp_path: Path, strict: bool
) -> None:
    texts = ("two words", "", "one", "  \n ", "two more", "long " + "x" * 99)
    protocol = built(tmp_path, texts, strict=strict)
    assert (protocol.facts["N"], protocol.facts["skipped"]) == (2, 4)
    assert f"{tmp_path}/lambada.jsonl:2" in protocol.warnings[0]
    assert len(protocol.requests) == 2


def test_accuracy_and_perplexity_have_errors(tmp_path: Path) -> None:
    """acc 1/4: sqrt(1/4 * 3/4 / 3) = 0.25; perplexity e^2 times sqrt(5/3 / 4)."""
    protocol = built(tmp_path, PASSAGES[:4], strict=False)
    scores = [Score(loss, loss == 1, 1) for loss in (1.0, 2.0, 3.0, 4.0)]
    metrics = protocol.finish(scores)
    assert (metrics["acc"].value, metrics["acc"].stderr) == (0.25, pytest.approx(0.25))
    assert metrics["perplexity"].value == pytest.approx(2.718281828**2.5)
    assert metrics["perplexity"].stderr == pytest.approx(2.718281828**2.5 * (5 / 3 / 4) ** 0.5)


@pytest.mark.parametrize(
    ("texts", "task"), [(PASSAGES, "lambada_openai"), (("a b", "c d"), "lambada_standard")]
)
def test_the_form_of_the_data_names_the_task(tmp_path: Path, texts: tuple[str, ...], task: str) -> None:
    assert built(tmp_path, texts, strict=False).task == task
