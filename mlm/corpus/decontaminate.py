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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlm.corpus.benchmarks import EvaluationText, load_benchmarks, read_benchmarks
from mlm.corpus.ngrams import Hits, NGrams, spans, words
from mlm.corpus.read.long_text import PIECE, Letters, StoredText, at_breaks
from mlm.corpus.sections import DecontaminateConfig
from mlm.util.atomic import digest_bytes

RULE = 3  # number of what counts as a match and what is cut; part of the digest
TOP = 20  # evaluation texts named in a report
PREVIEW = 60  # letters of each
WINDOW = 1 << 12  # letters of a long text searched for the end of a word


@dataclass(frozen=True, slots=True)
class Match:
    """A run of words of a document that occurs in one evaluation text."""

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
    """The rest of a document."""

    pieces: list[str] | list[StoredText]
    """[the text] itself without a match; no piece if the document is dropped."""
    matches: list[Match]
    letters_removed: int = 0

    @property
    def fate(self) -> Literal["kept", "cut", "dropped"]:
        """Outcome for the document."""
        if not self.matches:
            return "kept"
        return "cut" if self.pieces else "dropped"


@dataclass(slots=True)
class Run:
    """Consecutive words that occur in an evaluation text."""

    text: int
    first: int
    """Number of the first word, then of the one after the last."""
    after: int
    begin: int
    """First letter, then the one after the last."""
    end: int

    @property
    def words(self) -> int:
        """Number of words."""
        return self.after - self.first


def merged(runs: Iterable[Run]) -> list[Run]:
    """Merge overlapping and touching runs of the same evaluation text."""
    found, reach = list[Run](), 0
    for run in runs:
        if found and found[-1].text == run.text and run.first <= reach:
            found[-1].after, found[-1].end = max(found[-1].after, run.after), max(found[-1].end, run.end)
        else:
            found.append(run)
        reach = max(reach, run.after)
    return found


def last_words(text: str, count: int) -> str:
    """Return the end of a text, from a word's start, with `count` words or more; "" for one long word."""
    size = 16 * (count + 1)
    while size < len(text):
        begin = next((at for at in range(len(text) - size, len(text)) if text[at].isspace()), len(text))
        if len(words(tail := text[begin:])) >= count:
            return tail
        size *= 2
    return text if len(text) < 4 * PIECE else ""


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

    def clean_long(self, text: StoredText) -> Cleaned:
        """Do the same for a long text, window by window."""
        found = merged(self._long_runs(text)) if self._texts else []
        if not found:
            return Cleaned([text], [])
        matches = [Match(*self._numbers[run.text], run.words, run.begin, run.end) for run in found]
        letters, pieces = Letters(text), list[tuple[int, int]]()
        if self.config.action == "cut":
            pieces = cut_long(letters, matches, self.config)
        kept = sum(end - begin for begin, end in pieces)
        return Cleaned([letters.part(*piece) for piece in pieces], matches, len(letters) - kept)

    def _long_runs(self, text: StoredText) -> Iterator[Run]:
        """Yield the runs of words of a long text that occur in evaluation texts, in order.

        Each window begins with the last words of the one before, so none is missed at its edge.
        """
        before, letter, word = "", 0, 0  # letter and word at which the window begins
        for piece in at_breaks(text.pieces()):
            window = before + piece
            known = len(words(before))
            if (hits := self._ngrams.find(window)) is not None and (fresh := hits.end > known).any():
                begin, end = spans(window)
                for b, e, number in zip(hits.begin[fresh], hits.end[fresh], hits.text[fresh], strict=True):
                    yield Run(
                        int(number),
                        word + int(b),
                        word + int(e),
                        letter + int(begin[b]),
                        letter + int(end[e - 1]),
                    )
            before = last_words(window, self.config.ngram - 1)
            word += len(words(window)) - len(words(before))
            letter += len(window) - len(before)

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

    def report(self, tally: "Tally") -> dict[str, Any]:
        """Summarise a corpus as plain JSON: counts per set, and the texts matched most often."""
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
            out.append(Match(name, in_set, count, begin, end))
        return out


@dataclass(slots=True)
class Tally:
    """Counts of what was removed. Every task has its own; `merge` adds them up."""

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
        """Add up what `to_json` returned."""
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
    """Return the pieces that are long enough; none if the document is cut at too many places."""
    widened = (
        (
            left_of_word(text, max(0, match.begin - config.margin)),
            right_of_word(text, min(len(text), match.end + config.margin)),
        )
        for match in sorted(matches, key=lambda match: match.begin)
    )
    pieces = [text[a:b] for a, b in between(widened, len(text), config.max_matches)]
    # White space is stripped at cuts, not at the ends of the document.
    pieces = [piece.lstrip() if i else piece for i, piece in enumerate(pieces)]
    pieces = [piece.rstrip() if i < len(pieces) - 1 else piece for i, piece in enumerate(pieces)]
    return [piece for piece in pieces if len(piece) >= max(1, config.min_piece)]


def between(cuts: Iterable[tuple[int, int]], letters: int, most: int) -> list[tuple[int, int]]:
    """Return the pieces before, between and after cuts; none if there are more than `most` cuts."""
    apart = list[list[int]]()
    for begin, end in cuts:
        if apart and begin <= apart[-1][1]:
            apart[-1][1] = max(apart[-1][1], end)
        else:
            apart.append([begin, end])
    if len(apart) > most:
        return []
    edges = [0, *(edge for pair in apart for edge in pair), letters]
    return list(zip(edges[::2], edges[1::2], strict=True))


def cut_long(
    letters: Letters, matches: Sequence[Match], config: DecontaminateConfig
) -> list[tuple[int, int]]:
    """Do as `cut`; return first letter and end of each piece."""
    total = len(letters)
    widened = (
        (
            left_end(letters, max(0, match.begin - config.margin)),
            right_end(letters, min(total, match.end + config.margin)),
        )
        for match in sorted(matches, key=lambda match: match.begin)
    )
    found, pieces = between(widened, total, config.max_matches), list[tuple[int, int]]()
    for i, (begin, end) in enumerate(found):
        while i and begin < end and letters.between(begin, begin + 1).isspace():
            begin += 1
        while i < len(found) - 1 and begin < end and letters.between(end - 1, end).isspace():
            end -= 1
        if end - begin >= max(1, config.min_piece):
            pieces.append((begin, end))
    return pieces


def left_end(letters: Letters, at: int) -> int:
    """Do as `left_of_word`, window by window."""
    while 0 < at < len(letters):
        low = max(0, at - WINDOW)
        found = left_of_word(letters.between(low, at + 1), at - low)
        at = low + found
        if found or not low:
            break
    return at


def right_end(letters: Letters, at: int) -> int:
    """Do as `right_of_word`, window by window."""
    while 0 < at < len(letters):
        high = min(len(letters), at + WINDOW)
        found = right_of_word(letters.between(at - 1, high), 1)
        at += found - 1
        if at < high:
            break
    return at


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
