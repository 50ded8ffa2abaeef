"""Both of Megatron-LM's protocols, word for word and token for token, in float64 over `transformers`."""

import math
from typing import Any

import torch

from mlm.data.tokenizer import Tokenizer


def log_probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    """[S, V] of the token after each token."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)


def wikitext103(
    model: Any, tokenizer: Tokenizer, text: str, readable: str, *, length: int, stride: int
) -> tuple[float, float]:
    """(adjusted, unadjusted) perplexity.

    Windows of length + 1 tokens begin every `stride` tokens and are padded at the end; all targets of the
    first count, and of each later one those in its last `stride` places.
    """
    words = len(text.strip().split(" "))
    tokens = tokenizer.encode(readable)
    total, counted = 0.0, 0
    for begin in range(0, len(tokens) - 1, stride):
        window = tokens[begin : begin + length + 1]
        real = len(window) - 1
        logs = log_probabilities(model, window[:-1]) if real else None
        for place in range(length):
            if place < real and (begin == 0 or place >= length - stride):
                total -= float(logs[place, window[place + 1]])
                counted += 1
    assert counted == len(tokens) - 1
    return math.exp(total / (words - 1)), math.exp(total / (len(tokens) - 1))


def strict_cloze(model: Any, tokenizer: Tokenizer, texts: list[str], *, length: int) -> list[bool]:
    """For each passage, True if its last word is the model's argmax, token by token."""
    correct = []
    for text in texts:
        word = text.split()[-1]
        context = tokenizer.encode(text[: text.rindex(word)].strip())
        target = tokenizer.encode(" " + word)
        found = []
        for done in range(len(target)):
            read = [*context, *target[:done]]
            # a passage that is too long loses its beginning, as much for each token of the word
            read = read[max(0, len(context) + len(target) - 1 - length) :]
            found.append(int(log_probabilities(model, read)[-1].argmax()))
        correct.append(found == target)
    return correct
