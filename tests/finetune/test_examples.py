"""Tokenised examples equal those of transformers' tokenizers; RACE's those of a reference written here."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm.data.tokenizer import Tokenizer
from mlm.finetune import splits
from mlm.finetune.classification import Classification
from mlm.finetune.rows import ExampleError
from mlm.finetune.splits import tokenize
from mlm.finetune.task_type import RowExamples
from mlm.util.errors import UserError
from tests.finetune.material import (
    WORDS,
    bert,
    gpt2,
    pairs,
    roberta,
    sentence,
    shipped,
    split_of,
    their_bert,
    their_roberta,
)
from tests.finetune.runs import record


def rows_of_pairs(count: int, longest: int) -> list[dict[str, Any]]:
    draw = random.Random(7)
    lengths = [(draw.randint(1, longest), draw.randint(1, longest)) for _ in range(count)]
    return [
        {"first": sentence(draw, a), "second": sentence(draw, b), "label": n % 2}
        for n, (a, b) in enumerate(lengths)
    ]


@pytest.mark.parametrize("columns", [["first", "second"], ["first"]])
@pytest.mark.parametrize("max_length", [9, 24, 512])
@pytest.mark.parametrize("model", ["bert", "roberta"])
def test_texts_are_those_of_transformers(
    tmp_path: Path, model: str, columns: list[str], max_length: int
) -> None:
    """A RoBERTa reads <s> A </s></s> B </s>, without token types."""
    ours, theirs = (bert(), their_bert()) if model == "bert" else (roberta(), their_roberta())
    task, rows = pairs(columns=columns), rows_of_pairs(60, 20)
    examples = tokenize(task, split_of(tmp_path, task, rows), ours, causal=False, max_length=max_length)
    for row, example in zip(rows, examples.examples, strict=True):
        wanted = theirs(*(row[name] for name in columns), truncation=True, max_length=max_length)
        text = example.texts[0]
        assert text.tokens.dtype == np.int32
        assert text.tokens.tolist() == wanted["input_ids"]
        assert example.label == row["label"]
        if model == "bert":
            assert [int(n >= text.second) for n in range(len(text))] == wanted["token_type_ids"]


@pytest.mark.parametrize("is_alone", [False, True])
def test_special_tokens_of_a_roberta_come_from_its_model_type_or_names(is_alone: bool) -> None:
    """A corpus has its tokenizer.json alone."""
    theirs = their_roberta()
    ours = Tokenizer(roberta().content.decode()) if is_alone else roberta()
    assert ours.pair_separators == 2
    assert ours.bos_id == theirs.bos_token_id
    assert (ours.cls_id, ours.sep_id, ours.mask_id, ours.pad_id, ours.eod_id) == (
        *(theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id, theirs.pad_token_id),
        theirs.eos_token_id,
    )


def test_every_row_has_its_example_and_cut_rows_are_counted(tmp_path: Path) -> None:
    rows = rows_of_pairs(50, 20)
    split = split_of(tmp_path, pairs(), rows)
    examples = tokenize(pairs(), split, bert(), causal=False, max_length=24)
    assert [example.row for example in examples.examples] == list(range(50))
    long = [r for r in rows if len(their_bert()(r["first"], r["second"])["input_ids"]) > 24]
    assert 0 < examples.truncated == len(long) < 50
    assert f"{len(long)} of 50 rows of train were truncated to 24 tokens" in examples.notes()[0]


def test_a_row_of_a_users_type_without_an_example_is_an_error_even_where_rows_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has a prediction, which is compared with its label."""

    class Picky(Classification):
        def make_examples(self, *arguments: Any) -> Iterator[RowExamples]:
            for number, result in enumerate(super().make_examples(*arguments)):
                yield ExampleError(1, "no word in it") if number == 1 else result

    monkeypatch.setattr(splits, "task_type", lambda kind: Picky())
    split = split_of(tmp_path, pairs(), rows_of_pairs(3, 4))
    with pytest.raises(UserError, match=r":2: no word in it"):
        tokenize(pairs(), split, bert(), causal=False, max_length=24, skips=True)


def test_gpt2_reads_pairs_with_an_end_behind_each_and_no_types(tmp_path: Path) -> None:
    rows = rows_of_pairs(5, 4)
    tokenizer = gpt2()
    examples = tokenize(pairs(), split_of(tmp_path, pairs(), rows), tokenizer, causal=True, max_length=512)
    for row, example in zip(rows, examples.examples, strict=True):
        a, b = tokenizer.encode(row["first"]), tokenizer.encode(row["second"])
        assert example.texts[0].tokens.tolist() == [*a, tokenizer.eod_id, *b, tokenizer.eod_id]
        assert example.texts[0].second == len(example.texts[0])


def test_gpt2_reads_the_question_and_its_option_last(tmp_path: Path) -> None:
    task, options = shipped("race"), ["a cat", "the old dog .", "nobody", "it was not said"]
    row = {"example_id": "high1.txt", "article": "The cat sat near the river . " * 700, "answer": "C"}
    split = split_of(tmp_path, task, [row | {"question": "Who saw it ?", "options": options}])
    (example,) = tokenize(task, split, gpt2(), causal=True, max_length=64).examples
    eod = gpt2().eod_id
    for text, option in zip(example.texts, options, strict=True):
        asked = gpt2().encode(f"Who saw it ? {option}".replace(" . ", ". "))
        assert len(text) == 64
        assert text.tokens.tolist()[-len(asked) - 2 :] == [eod, *asked, eod]


@pytest.mark.parametrize("name, least", [("rte", 5), ("squad", 133)])
def test_length_without_room_is_rejected_with_one_that_has(tmp_path: Path, name: str, least: int) -> None:
    task = shipped(name)
    row = {"sentence1": "a", "sentence2": "a", "label": 0, "context": "the cat sat", "question": "who ?"}
    split = split_of(tmp_path, task, [row | {"answers": {"text": ["cat"], "answer_start": [4]}}])
    with pytest.raises(UserError, match=f"set {least} or more"):
        tokenize(task, split, bert(), causal=False, max_length=least - 1)
    assert len(tokenize(task, split, bert(), causal=False, max_length=least).examples) == 1


LENGTH, QUESTION = 40, 12


def race_items(seed: str, count: int) -> list[dict[str, Any]]:
    """Items in the schema of ehovy/race: random ones, and those that the protocol speaks of."""
    draw = random.Random(seed)
    made = [record("choice", draw, n) for n in range(count)]
    made[0] |= {"article": "cat  sat . the\n\tsea . was new . dog ran .", "question": "the _ was _ ?"}
    made[1]["article"] = " ".join(draw.choices(WORDS, k=10_000))
    made[2] |= {"question": " ".join(draw.choices(WORDS[:20], k=30)), "options": WORDS[:4]}
    made[3]["question"] = " ".join(draw.choices(WORDS[:20], k=20)) + " _"
    return made


def reference_text(item: dict[str, Any], option: str) -> tuple[list[int], list[int]]:
    tokenizer = their_bert()

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    question = item["question"]
    asked = tokens(question.replace("_", option) if "_" in question else question + " " + option)[:QUESTION]
    article = tokens(item["article"])[: LENGTH - 3 - len(asked)]
    first = [tokenizer.cls_token_id, *asked, tokenizer.sep_token_id]
    return [*first, *article, tokenizer.sep_token_id], [0] * len(first) + [1] * (len(article) + 1)


def test_options_of_race_are_the_texts_of_its_protocol(tmp_path: Path) -> None:
    """Against a reference written from the protocol of Megatron-LM's tasks/race, as in arXiv:1909.08053, 5.3.

    Each of four options is a text [CLS] question option [SEP] article [SEP] of at most LENGTH tokens, of
    which question and option have at most QUESTION; an option takes the place of a blank ("_").
    """
    task, made = shipped("race", question_length=QUESTION), race_items("train", 16)
    split = split_of(tmp_path, task, made)
    examples = tokenize(task, split, bert(), causal=False, max_length=LENGTH).examples
    for item, example in zip(made, examples, strict=True):
        assert example.label == "ABCD".index(item["answer"])
        for option, text in zip(item["options"], example.texts, strict=True):
            tokens, types = reference_text(item, option)
            assert text.tokens.tolist() == tokens
            assert [int(n >= text.second) for n in range(len(text))] == types
