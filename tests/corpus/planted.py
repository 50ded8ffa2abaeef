"""A corpus with near-duplicates planted in it, and which pairs of texts are similar."""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

LEAST, MOST = 100, 1000  # words of a document
SIMILARITIES = (0.5, 0.95)  # what variants aim at; what they reach is measured
NGRAM = 5
COPIES = 50  # one document in so many is followed by an exact copy

Pairs = dict[tuple[int, int], float]


@dataclass(frozen=True)
class Corpus:
    """Documents in a shuffled order, and which of them were made from the same one."""

    texts: list[str]
    planted: list[tuple[int, int]]
    """Pairs (earlier, later) of one family."""


def plant(paragraphs: Iterable[str], seed: int, limit: int | None = None) -> Corpus:
    """Cut text into documents, `limit` at the most, and give each variants: one, or three to every tenth."""
    rng = random.Random(seed)
    bases = cut(paragraphs, rng)[:limit]
    vocabulary = [word for base in bases for paragraph in base for word in paragraph]
    families = []
    for number, base in enumerate(bases):
        variants = [vary(base, vocabulary, rng) for _ in range(1 if number % 10 else 3)]
        copies = [base] if number % COPIES == 0 else []
        families.append(
            ["\n\n".join(" ".join(words) for words in document) for document in (base, *variants, *copies)]
        )
    order = [(family, text) for family, texts in enumerate(families) for text in texts]
    rng.shuffle(order)
    places: dict[int, list[int]] = {}
    for place, (family, _) in enumerate(order):
        places.setdefault(family, []).append(place)
    planted = [pair for family in places.values() for pair in combinations(family, 2)]
    return Corpus([text for _, text in order], sorted(planted))


def cut(paragraphs: Iterable[str], rng: random.Random) -> list[list[list[str]]]:
    """Documents as lists of paragraphs of words, LEAST to MOST words each, none of them overlapping."""
    documents, current, size, aim = list[list[list[str]]](), list[list[str]](), 0, rng.randint(LEAST, MOST)
    for paragraph in paragraphs:
        words = paragraph.split()
        while words:
            part, words = words[: aim - size], words[aim - size :]
            current.append(part)
            size += len(part)
            if size == aim:
                documents.append(current)
                current, size, aim = [], 0, rng.randint(LEAST, MOST)
    return documents


def vary(base: list[list[str]], vocabulary: Sequence[str], rng: random.Random) -> list[list[str]]:
    """A variant: scattered words edited, a passage replaced, or paragraphs rearranged and words edited."""
    similarity = rng.uniform(*SIMILARITIES)
    differing = (1 - similarity) / (1 + similarity)  # share of the shingles of either that the other lacks
    document = [list(paragraph) for paragraph in base]
    kind = rng.choice(("words", "passage", "paragraphs"))
    if kind == "passage":  # other text, in its own order, in place of a share of the words in a row
        words = [word for paragraph in document for word in paragraph]
        length = max(1, round(len(words) * differing))
        begin, other = rng.randint(0, len(words) - length), rng.randint(0, max(0, len(vocabulary) - length))
        return [words[:begin], list(vocabulary[other : other + length]), words[begin + length :]]
    if kind == "paragraphs":
        for _ in range(2):
            document.insert(rng.randrange(len(document)), document.pop(rng.randrange(len(document))))
    size = sum(map(len, base))
    for _ in range(round(size * differing / NGRAM)):
        paragraph = rng.choices(document, weights=[len(paragraph) + 1 for paragraph in document])[0]
        place, word = rng.randint(0, len(paragraph)), rng.choice(vocabulary)
        edit = rng.choice(("replace", "insert", "delete"))
        paragraph[place : place + (edit != "insert")] = [] if edit == "delete" else [word]
    return document


def grams(text: str, unit: str) -> set[str]:
    """The n-grams of a text, spelled out: what similarity is measured on."""
    words = re.findall(r"\w+", text.casefold())
    if unit == "word":
        return {" ".join(words[i : i + NGRAM]) for i in range(max(1, len(words) - NGRAM + 1))}
    letters = " ".join(words)
    return {letters[i : i + NGRAM] for i in range(max(1, len(letters) - NGRAM + 1))}


def similar_pairs(texts: Sequence[str], unit: str, least: float) -> Pairs:
    """Exact Jaccard similarities above `least`, by (earlier, later): all pairs of texts are looked at."""
    ids: dict[str, int] = {}
    rows = []
    for text in texts:
        rows.append(np.array([ids.setdefault(gram, len(ids)) for gram in grams(text, unit)], np.int64))
    sizes = np.array([len(row) for row in rows])
    holders = np.repeat(np.arange(len(rows)), sizes)[np.argsort(np.concatenate(rows), kind="stable")]
    bounds = np.concatenate(([0], np.cumsum(np.bincount(np.concatenate(rows)))))
    pairs: Pairs = {}
    for i, row in enumerate(rows):
        holding = np.concatenate([holders[bounds[gram] : bounds[gram + 1]] for gram in row])
        common = np.bincount(holding, minlength=i)[:i]
        similarity = common / (sizes[:i] + sizes[i] - common)
        pairs |= {(int(j), i): float(similarity[j]) for j in np.flatnonzero(similarity > least)}
    return pairs
