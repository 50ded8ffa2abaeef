"""RACE from its files to its accuracy, against a reference written from the protocol alone, in float64.

The protocol is that of Megatron-LM's tasks/race, which arXiv:1909.08053, section 5.3 was measured with: each
of four options is a text [CLS] question option [SEP] article [SEP] of at most `max_length` tokens, of which
question and option have at most `question_length`; an option takes the place of a blank ("_"). One number per
text; the options of a question are compared by softmax.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.optim.config import OptimizerConfig
from tests.finetune.material import WORDS, their_bert, write_rows
from tests.finetune.runs import (
    BERT,
    evaluation,
    finetune,
    finetuning,
    losses,
    read,
    record,
    score,
    weights,
    write_model,
)

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


def reference_score(w: dict[str, Tensor], tokens: list[int], types: list[int]) -> Tensor:
    """The number of a text: a BERT with norm=pre (arXiv:1909.08053, figure 7b), its pooler and classifier."""
    heads, n = BERT.num_heads, len(tokens)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"model.{name}.weight"].T + w[f"model.{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, correction=0, keepdim=True) + BERT.layer_norm_eps
        ).sqrt()
        return x * w[f"model.{name}.weight"] + w[f"model.{name}.bias"]

    x = w["model.token.weight"][tokens] + w["model.position.weight"][:n] + w["model.token_type.weight"][types]
    for layer in (f"layers.{i}" for i in range(BERT.num_layers)):
        qkv = linear(norm(x, f"{layer}.attention_norm"), f"{layer}.attention.qkv").view(n, heads, 3, -1)
        q, k, v = qkv.permute(2, 1, 0, 3)  # [heads, n, head_dim] each
        mixed = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        x = x + linear(mixed.permute(1, 0, 2).flatten(1), f"{layer}.attention.out")
        up = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp.up")
        x = x + linear(up * (1 + torch.erf(up / math.sqrt(2))) / 2, f"{layer}.mlp.down")
    return linear(torch.tanh(linear(norm(x, "final_norm")[0], "pooler")), "classifier")


def reference(w: dict[str, Tensor], path: Path) -> tuple[float, float, dict[str, str]]:
    """(mean loss, accuracy, predicted letter by question) of the items in a file."""
    loss, right, letters = 0.0, [], {}
    for number, line in enumerate(path.read_text().splitlines()):
        item = json.loads(line)
        scores = torch.cat([reference_score(w, *reference_text(item, o)) for o in item["options"]])
        answer = "ABCD".index(item["answer"])
        loss += float(torch.logsumexp(scores, 0) - scores[answer])
        right.append(int(scores.argmax()) == answer)
        letters[f"{item['example_id']}-0"] = "ABCD"[int(scores.argmax())]
        assert number < 99
    return loss / len(right), sum(right) / len(right), letters


@pytest.mark.slow
def test_race_is_scored_and_trained_as_the_protocol_says(tmp_path: Path) -> None:
    """The steps are too small to change a weight: their losses are those of the weights that are saved."""
    write_model(tmp_path / "bert")
    for name, count in {"train": 16, "validation": 21}.items():
        write_rows(tmp_path / "choice" / f"{name}.jsonl", items(name, count))
    config = finetuning(tmp_path, "choice", train={"epochs": 1}, optimizer=OptimizerConfig(lr=1e-30))
    accuracy = finetune(config)["scores"]["validation"]["accuracy"]
    steps = losses(tmp_path / "out")
    result = score(evaluation(tmp_path, "choice", predictions=str(tmp_path / "predictions")))

    saved = weights(tmp_path / "out/best/checkpoints")
    loss, _, _ = reference(saved, tmp_path / "choice/train.jsonl")
    _, wanted, letters = reference(saved, tmp_path / "choice/validation.jsonl")
    assert sum(steps) / len(steps) == pytest.approx(loss, abs=1e-12)
    assert accuracy == wanted == result["results"][0]["metrics"]["accuracy"]
    assert read(tmp_path / "predictions/validation.json") == letters
