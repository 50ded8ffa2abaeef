"""Keeping evaluation texts out of a corpus: what is cut from a document, and the account of it.

The protocol is GPT-3's (arXiv:2005.14165, appendix C), which Megatron-LM's tools/openwebtext followed: 13
words that agree, 200 letters removed on each side, pieces under 200 letters thrown away, documents that would
be cut at more than 10 places removed. Two things are otherwise here:

- GPT-3 and Megatron-LM let n-grams pass that occur in more than 10 documents, as boilerplate. Here they are
  cut too: a passage that is quoted so often is one a model will know by heart. The report names the texts
  that were hit most often, so boilerplate in an evaluation set shows, and can be taken out of it.
- Megatron-LM widens a cut to the end of a sentence; here to the end of a word.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlm.config.corpus_schema import DecontaminateConfig
from mlm.data.corpus.benchmarks import EvaluationText, load_benchmarks, read_benchmarks
from mlm.data.corpus.contaminants import Hits, NGrams, spans
from mlm.files import digest_bytes

RULE = 1  # number of what counts as a match and what is cut; part of the digest
TOP = 20  # evaluation texts named in a report
PREVIEW = 60  # letters of each


@dataclass(frozen=True, slots=True)
class Match:
    """A stretch of a document whose words stand in one evaluation text."""

    set: str
    """Name of the evaluation set."""
    text: int
    """Number of the evaluation text in its set, from 0."""
    num_words: int
    begin: int
    """First letter in the document."""
    end: int
    """One past its last letter."""


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What is left of a document."""

    pieces: list[str]
    """[the text] itself without a match; no piece when the document goes."""
    matches: list[Match]
    letters_removed: int = 0

    @property
    def fate(self) -> Literal["kept", "cut", "dropped"]:
        """What became of the document."""
        if not self.matches:
            return "kept"
        return "cut" if self.pieces else "dropped"


class Contaminants:
    """The evaluation texts to keep out, ready to be looked for."""

    def __init__(self, config: DecontaminateConfig, texts: Sequence[EvaluationText]) -> None:
        assert 1 <= config.min_ngram <= config.ngram
        self.config, self._texts = config, texts
        self.digest = digest_of(config, texts)
        """Digest of the rules and the evaluation texts, not of where they came from."""
        seen = Counter[str]()
        self._numbers = list[tuple[str, int]]()  # set and number in it of each text
        for text in texts:
            self._numbers.append((text.set, seen[text.set]))
            seen[text.set] += 1
        self._ngrams = NGrams([text.text for text in texts], ngram=config.ngram, min_ngram=config.min_ngram)

    @classmethod
    def load(cls, config: DecontaminateConfig, saved: Path | None = None) -> "Contaminants":
        """Read the sets that `config` names, or the file that `save_benchmarks` wrote of them.

        Raises UserError, see benchmarks.py.
        """
        return cls(config, load_benchmarks(saved) if saved is not None else read_benchmarks(config.against))

    def clean(self, text: str) -> Cleaned:
        """The document without what stands in evaluation texts."""
        hits = self._ngrams.find(text) if self._texts else None
        if hits is None:
            return Cleaned([text], [])
        matches = self._matches(text, hits)
        pieces = list[str]()
        if self.config.action == "cut":
            pieces = cut(text, matches, self.config)
        return Cleaned(pieces, matches, len(text) - sum(map(len, pieces)))

    def describe(self) -> dict[str, dict[str, int]]:
        """Of each set: its texts, those too short to be looked for, its different n-grams. Plain JSON."""
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

    def report(self, tally: "Tally") -> dict[str, Any]:
        """The account of a corpus, plain JSON: per set, and the evaluation texts hit most often."""
        where = dict(zip(self._numbers, self._texts, strict=True))
        hit = [
            (-count, name, int(number))
            for name, texts in tally.texts.items()
            for number, count in texts.items()
        ]
        return {
            "digest": self.digest,
            "documents_cut": tally.cut,
            "documents_dropped": tally.dropped,
            "letters_removed": tally.letters_removed,
            "sets": {
                name: facts
                | {"texts_hit": len(tally.texts.get(name, {})), "documents": tally.documents.get(name, 0)}
                for name, facts in self.describe().items()
            },
            "most_hit": [
                {
                    "set": name,
                    "text": number,
                    "place": where[name, number].place,
                    "begins": where[name, number].text[:PREVIEW],
                    "documents": -count,
                }
                for count, name, number in sorted(hit)[:TOP]
            ],
        }

    def _matches(self, text: str, hits: Hits) -> list[Match]:
        """Overlapping and touching n-grams of the same evaluation text as one match."""
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
        for number, words, begin, end in rows:
            name, in_set = self._numbers[number]
            out.append(Match(name, in_set, words, begin, end))
        return out


@dataclass(slots=True)
class Tally:
    """Counts of what was removed. Every task has its own; `merge` adds them up. Plain JSON: to_json."""

    cut: int = 0
    """Documents of which a part is left."""
    dropped: int = 0
    letters_removed: int = 0
    documents: dict[str, int] = field(default_factory=dict)
    """Documents with a match, by set."""
    texts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Documents with a match, by set and number of the evaluation text."""

    def add(self, cleaned: Cleaned) -> None:
        """Count one document."""
        if not cleaned.matches:
            return
        self.cut += cleaned.fate == "cut"
        self.dropped += cleaned.fate == "dropped"
        self.letters_removed += cleaned.letters_removed
        for name in {match.set for match in cleaned.matches}:
            add_up(self.documents, {name: 1})
        for name, number in {(match.set, match.text) for match in cleaned.matches}:
            add_up(self.texts.setdefault(name, {}), {str(number): 1})

    def to_json(self) -> dict[str, Any]:
        """The counts as dictionaries, strings and numbers."""
        return asdict(self)

    @classmethod
    def merge(cls, tallies: Iterable[Mapping[str, Any]]) -> "Tally":
        """The sum of what `to_json` gave."""
        out = cls()
        for tally in tallies:
            out.cut += tally["cut"]
            out.dropped += tally["dropped"]
            out.letters_removed += tally["letters_removed"]
            add_up(out.documents, tally["documents"])
            for name, counts in tally["texts"].items():
                add_up(out.texts.setdefault(name, {}), counts)
        return out


def add_up(into: dict[str, int], counts: Mapping[str, int]) -> None:
    """Add counts to counts."""
    for key, count in counts.items():
        into[key] = into.get(key, 0) + count


def cut(text: str, matches: Sequence[Match], config: DecontaminateConfig) -> list[str]:
    """The pieces that are long enough; none when there are more cuts than a document may have."""
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
    pieces = [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    # White space goes where a cut was made, not at the ends that are the document's own.
    pieces = [piece.lstrip() if i else piece for i, piece in enumerate(pieces)]
    pieces = [piece.rstrip() if i < len(cuts) else piece for i, piece in enumerate(pieces)]
    return [piece for piece in pieces if len(piece) >= max(1, config.min_piece)]


def left_of_word(text: str, at: int) -> int:
    """The nearest place at or before `at` that is inside no word."""
    while 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum():
        at -= 1
    return at


def right_of_word(text: str, at: int) -> int:
    """The nearest place at or after `at` that is inside no word."""
    while 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum():
        at += 1
    return at


def digest_of(config: DecontaminateConfig, texts: Iterable[EvaluationText]) -> str:
    """Digest of everything the result of `clean` hangs on."""
    rules = {key: value for key, value in asdict(config).items() if key != "against"}
    content = [RULE, rules, [[text.set, text.place, text.text] for text in texts]]
    return digest_bytes(json.dumps(content, sort_keys=True).encode())
