"""Texts of RACE against a reference written from the protocol alone.

The protocol is that of Megatron-LM's tasks/race, which arXiv:1909.08053, section 5.3 was measured with: each
of four options is a text [CLS] question option [SEP] article [SEP] of at most `max_length` tokens, of which
question and option have at most `question_length`; an option takes the place of a blank ("_"). One number per
text; the options of a question are compared by softmax.
"""

import random
from pathlib import Path
from typing import Any

from mlm.finetune.splits import tokenize
from tests.finetune.material import WORDS, bert, shipped, split_of, their_bert
from tests.finetune.runs import record

LENGTH, QUESTION = 40, 12


def items(seed: str, count: int) -> list[dict[str, Any]]:
    """Items in the schema of ehovy/race: random ones, and those that the protocol speaks of."""
    draw = random.Random(seed)
    made = [record("choice", draw, n) for n in range(count)]
    made[0] |= {"article": "cat  sat . the\n\tsea . was new . dog ran .", "question": "the _ was _ ?"}
    made[1]["article"] = " ".join(draw.choices(WORDS, k=10_000))
    made[2] |= {"question": " ".join(draw.choices(WORDS[:20], k=30)), "options": WORDS[:4]}
    made[3]["question"] = " ".join(draw.choices(WORDS[:20], k=20)) + " _"
    return made


def reference_text(item: dict[str, Any], option: str) -> tuple[list[int], list[int]]:
    """(tokens, token types) of an option."""
    tokenizer = their_bert()

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    question = item["question"]
    asked = tokens(question.replace("_", option) if "_" in question else question + " " + option)[:QUESTION]
    article = tokens(item["article"])[: LENGTH - 3 - len(asked)]
    first = [tokenizer.cls_token_id, *asked, tokenizer.sep_token_id]
    return [*first, *article, tokenizer.sep_token_id], [0] * len(first) + [1] * (len(article) + 1)


def test_options_are_the_texts_of_the_protocol(tmp_path: Path) -> None:
    """Their scores are compared with those of transformers in test_objective.py."""
    task, made = shipped("race", question_length=QUESTION), items("train", 16)
    split = split_of(tmp_path, task, made)
    examples = tokenize(task, split, bert(), causal=False, max_length=LENGTH).examples
    for item, example in zip(made, examples, strict=True):
        assert example.label == "ABCD".index(item["answer"])
        for option, text in zip(item["options"], example.texts, strict=True):
            tokens, types = reference_text(item, option)
            assert text.tokens.tolist() == tokens
            assert [int(n >= text.second) for n in range(len(text))] == types
