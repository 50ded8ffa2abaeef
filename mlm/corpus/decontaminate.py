"""Decontamination: the cutting of evaluation text out of documents, and a report of it.

The protocol is GPT-3's (arXiv:2005.14165, appendix C), which Megatron-LM's tools/openwebtext followed: 13
words that agree, 200 letters removed on each side, pieces under 200 letters dropped, documents that would be
cut at more than 10 places removed. It differs in two points:

- GPT-3 and Megatron-LM keep n-grams that occur in more than 10 documents, as boilerplate. Here they are cut
  too: a model will memorise a passage that is quoted so often. The report names the texts that were matched
  most often, so boilerplate in an evaluation set shows, and can be taken out of it.
- Megatron-LM widens a cut to the end of a sentence; here to the end of a word.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlm.corpus.benchmarks import EvaluationText, load_benchmarks, read_benchmarks
from mlm.corpus.config import DecontaminateConfig
from mlm.corpus.ngrams import Hits, NGrams, spans
from mlm.util.atomic import digest_bytes

RULE = 3  # number of what counts as a match and what is cut; part of the digest
TOP = 20  # evaluation texts named in a report
PREVIEW = 60  # letters of each


@dataclass(frozen=True, slots=True)
class Match:
    """A run of words of a document that occurs in one evaluation text."""

    set: str
    """Name of the evaluation set."""
    text: int
    """Number of the evaluation text in its set, from 0."""
    number: int
    """Number of the evaluation text among those of all sets."""
    num_words: int
    begin: int
    """First letter in the document."""
    end: int
    """One past its last letter."""


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The rest of a document."""

    pieces: list[str]
    """[the text] itself without a match; no piece if the document is dropped."""
    matches: list[Match]
    letters_removed: int = 0

    @property
    def fate(self) -> Literal["kept", "cut", "dropped"]:
        """Outcome for the document."""
        if not self.matches:
            return "kept"
        return "cut" if self.pieces else "dropped"


class Contaminants:
    """The evaluation texts to keep out, indexed for search."""

    def __init__(self, config: DecontaminateConfig, texts: Sequence[EvaluationText]) -> None:
        assert 1 <= config.min_ngram <= config.ngram
        self.config, self._texts = config, texts
        self.digest = digest_of(config, texts)
        """Digest of the rules and the evaluation texts, not of their source."""
        seen = Counter[str]()
        self._numbers = list[tuple[str, int]]()  # set and number in it of each text
        for text in texts:
            self._numbers.append((text.set, seen[text.set]))
            seen[text.set] += 1
        self._ngrams = NGrams([text.text for text in texts], ngram=config.ngram, min_ngram=config.min_ngram)

    @classmethod
    def load(cls, config: DecontaminateConfig, saved: Path | None = None) -> "Contaminants":
        """Read the sets that `config` names, or the file that `save_benchmarks` wrote for them.

        Raises UserError, see benchmarks.py.
        """
        return cls(config, load_benchmarks(saved) if saved is not None else read_benchmarks(config.against))

    def clean(self, text: str) -> Cleaned:
        """Remove from a document what occurs in evaluation texts."""
        hits = self._ngrams.find(text) if self._texts else None
        if hits is None:
            return Cleaned([text], [])
        matches = self._matches(text, hits)
        pieces = list[str]()
        if self.config.action == "cut":
            pieces = cut(text, matches, self.config)
        return Cleaned(pieces, matches, len(text) - sum(map(len, pieces)))

    def describe(self) -> dict[str, dict[str, int]]:
        """Count, for each set, its texts, those too short to search for, and distinct n-grams. Plain JSON."""
        out = {
            name: {"texts": 0, "too_short": 0, "ngrams": 0}
            for name in dict.fromkeys(t.set for t in self._texts)
        }
        counts = zip(
            self._texts, self._ngrams.covered.tolist(), self._ngrams.num_ngrams.tolist(), strict=True
        )
        for text, covered, ngrams in counts:
            entry = out[text.set]
            entry["texts"] += 1
            entry["too_short"] += not covered
            entry["ngrams"] += ngrams
        return out

    def report(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Summarise a corpus as plain JSON: counts per set, and the texts matched most often.

        `counts` are those of `count_matches`, of all documents.
        """
        documents = [counts.get(f"text {number}", 0) for number in range(len(self._texts))]
        hit = sorted(
            (-count, *self._numbers[number], number) for number, count in enumerate(documents) if count
        )
        texts_hit = Counter(name for _, name, *_ in hit)
        return {
            "digest": self.digest,
            "documents_cut": counts.get("cut", 0),
            "documents_dropped": counts.get("dropped", 0),
            "letters_removed": counts.get("letters", 0),
            "sets": {
                name: facts | {"texts_hit": texts_hit[name], "documents": counts.get(f"set {name}", 0)}
                for name, facts in self.describe().items()
            },
            "most_hit": [
                {
                    "set": name,
                    "text": in_set,
                    "place": self._texts[number].place,
                    "begins": self._texts[number].text[:PREVIEW],
                    "documents": -count,
                }
                for count, name, in_set, number in hit[:TOP]
            ],
        }

    def _matches(self, text: str, hits: Hits) -> list[Match]:
        """Join overlapping and touching n-grams of the same evaluation text to matches."""
        fresh = np.ones(len(hits.begin), dtype=bool)
        reach = np.maximum.accumulate(hits.end)
        fresh[1:] = (hits.text[1:] != hits.text[:-1]) | (hits.begin[1:] > reach[:-1])
        first = np.flatnonzero(fresh)
        begin_word, end_word = hits.begin[first], np.maximum.reduceat(hits.end, first)
        word_begin, word_end = spans(text)
        rows = zip(
            hits.text[first].tolist(),
            (end_word - begin_word).tolist(),
            word_begin[begin_word].tolist(),
            word_end[end_word - 1].tolist(),
            strict=True,
        )
        out = list[Match]()
        for number, count, begin, end in rows:
            name, in_set = self._numbers[number]
            out.append(Match(name, in_set, number, count, begin, end))
        return out


def count_matches(counts: Counter[str], cleaned: Cleaned) -> None:
    """Count a document with a match: its fate, letters removed, the sets and evaluation texts it matches."""
    if cleaned.matches:
        counts[cleaned.fate] += 1
        counts["letters"] += cleaned.letters_removed
        counts.update({f"set {match.set}" for match in cleaned.matches})
        counts.update({f"text {match.number}" for match in cleaned.matches})


def cut(text: str, matches: Sequence[Match], config: DecontaminateConfig) -> list[str]:
    """Return the pieces that are long enough; none if the document is cut at too many places."""
    cuts = list[list[int]]()
    for match in sorted(matches, key=lambda match: match.begin):
        begin = left_of_word(text, max(0, match.begin - config.margin))
        end = right_of_word(text, min(len(text), match.end + config.margin))
        if cuts and begin <= cuts[-1][1]:
            cuts[-1][1] = max(cuts[-1][1], end)
        else:
            cuts.append([begin, end])
    if len(cuts) > config.max_matches:
        return []
    edges = [0, *(edge for pair in cuts for edge in pair), len(text)]
    pieces = [text[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    # White space is stripped at cuts, not at the ends of the document.
    pieces = [piece.lstrip() if i else piece for i, piece in enumerate(pieces)]
    pieces = [piece.rstrip() if i < len(pieces) - 1 else piece for i, piece in enumerate(pieces)]
    return [piece for piece in pieces if len(piece) >= max(1, config.min_piece)]


def is_of_word(letter: str) -> bool:
    """True for what words are made of, marks that combine and letters that matching ignores included."""
    return letter.isalnum() or unicodedata.category(letter) in ("Mn", "Mc", "Me", "Cf")


def left_of_word(text: str, at: int) -> int:
    """Return the nearest position at or before `at` that is not inside a word."""
    while 0 < at < len(text) and is_of_word(text[at - 1]) and is_of_word(text[at]):
        at -= 1
    return at


def right_of_word(text: str, at: int) -> int:
    """Return the nearest position at or after `at` that is not inside a word."""
    while 0 < at < len(text) and is_of_word(text[at - 1]) and is_of_word(text[at]):
        at += 1
    return at


def digest_of(config: DecontaminateConfig, texts: Iterable[EvaluationText]) -> str:
    """Digest of everything that the result of `clean` depends on."""
    rules = {key: value for key, value in asdict(config).items() if key != "against"}
    content = [RULE, rules, [[text.set, text.place, text.text] for text in texts]]
    return digest_bytes(json.dumps(content, sort_keys=True).encode())
