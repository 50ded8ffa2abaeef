"""Decontamination: the text of evaluation sets removed from documents, and a report of it.

The protocol is GPT-3's (arXiv:2005.14165, appendix C), which Megatron-LM's tools/openwebtext followed, with
two differences: n-grams in more than 10 documents are cut too, as models memorise frequent quotations, and
cuts are widened to the end of a word, not of a sentence. The report names the texts with most matches, which
reveals boilerplate in an evaluation set.

A word is a run of letters and digits, casefolded, in Unicode form NFKC and without invisible code points
(soft hyphens, zero-width spaces and joiners, variation selectors). So punctuation, case, line breaks,
full-width letters and the marks of WikiText's tokenisation (` @-@ `, `@,@`, spaces before commas) make no
difference. Documents themselves are not normalised.

N-grams are compared by a hash of 64 bits (minhash.py): two different ones collide in 1 of 10^19 cases.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlm.corpus.benchmarks import EvaluationText
from mlm.corpus.config import DecontaminateConfig
from mlm.corpus.minhash import Hashes, hash_texts, hash_words, ngram_hashes
from mlm.corpus.pieces import pieces_of

Ints = NDArray[np.int64]

BLOCK = 1 << 15  # words processed at a time: their hashes stay in a core's cache
SPARSE, MOST_BITS = 16, 27  # of a table of first bits: entries per n-gram, and 128 MiB at the most
WORD = re.compile(r"[^\W_]+")
SEPARATORS = re.compile(r"[^\w\x00-\x7f]+")  # non-ASCII, and neither letter nor digit
GAP = 64  # bytes: shorter runs of ASCII between other letters are folded with these
FOLDED = bytes(c if c >= 128 else ord(chr(c).lower()) if chr(c).isalnum() else 32 for c in range(256))
SPACES = re.compile(r"\s+|\S+")
IGNORABLE = re.compile(  # Default_Ignorable_Code_Point of Unicode 16
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]+"
)
UNKNOWN = re.compile(r"<unk>|@@UNKNOWN@@", re.IGNORECASE)  # a removed word: no match extends over it
SPLIT_NEGATION = re.compile(r"(?<=\w)\s+(?=n['’]t\b)", re.IGNORECASE)  # "did n't" of the Penn Treebank


@dataclass(frozen=True, slots=True)
class NGramMatch:
    """A run of words of a document that occurs in one evaluation text."""

    set: str
    """Name of the evaluation set."""
    number: int
    """Index of the evaluation text over all sets."""
    begin: int
    """First letter in the document."""
    end: int
    """One past its last letter."""


@dataclass(frozen=True, slots=True)
class CleanedText:
    pieces: list[str]
    """[text] without a match; [] if the document is dropped."""
    matches: list[NGramMatch]
    letters_removed: int = 0

    @property
    def outcome(self) -> Literal["kept", "cut", "dropped"]:
        if not self.matches:
            return "kept"
        return "cut" if self.pieces else "dropped"


class NGramTable:
    """Hashes of n-grams of one length, each with the first evaluation text that contains it.

    The first bits of a hash rule out almost all n-grams of a corpus: one access to a table with SPARSE
    entries for each known n-gram, in place of a binary search.
    """

    def __init__(self, hashes: Hashes, owners: Ints) -> None:
        self._known, first = np.unique(hashes, return_index=True)
        self._owners = owners[first]
        bits = min(MOST_BITS, (SPARSE * len(self._known)).bit_length())
        self._shift = np.uint64(64 - bits)
        self._may_hold = np.zeros(1 << bits, dtype=bool)
        self._may_hold[self._known >> self._shift] = True

    def find(self, hashes: Hashes) -> tuple[Ints, Ints]:
        """Return positions of known n-grams among `hashes`, and their texts: int64 [hits] each."""
        candidates = np.flatnonzero(self._may_hold[hashes >> self._shift])
        nearest = np.minimum(np.searchsorted(self._known, hashes[candidates]), len(self._known) - 1)
        is_match = self._known[nearest] == hashes[candidates]
        return candidates[is_match], self._owners[nearest[is_match]]


class NGramIndex:
    """N-grams of the evaluation texts to keep out.

    A text without a run of `config.ngram` words is matched by its longest run of at least `config.min_ngram`.

    Attributes:
        covered  bool [texts]  True if a run of the text is long enough
    """

    def __init__(self, config: DecontaminateConfig, texts: Sequence[EvaluationText]) -> None:
        self.config, self._texts = config, texts
        self.covered = np.zeros(len(texts), dtype=bool)
        by_length: dict[int, list[tuple[Hashes, Ints]]] = {}  # n -> hashes, and the number of their text
        for number, text in enumerate(texts):
            all_runs = [hash_words(run)[1] for run in runs(text.text)]
            long_runs = [run for run in all_runs if len(run) >= config.ngram]
            if not long_runs and len(longest := max(all_runs, key=len)) >= config.min_ngram:
                long_runs = [longest]
            self.covered[number] = bool(long_runs)
            for run in long_runs:
                hashes = ngram_hashes(run, n := min(len(run), config.ngram))
                by_length.setdefault(n, []).append((hashes, np.full(len(hashes), number)))
        self._tables = dict[int, NGramTable]()
        for n, parts in sorted(by_length.items()):
            hashes, owners = (np.concatenate(column) for column in zip(*parts, strict=True))
            self._tables[n] = NGramTable(hashes, owners)

    def clean(self, text: str) -> CleanedText:
        begin, end, owner = self.find(text)
        if not len(begin):
            return CleanedText([text], [])
        # overlapping and touching n-grams of the same evaluation text are one match
        fresh = np.ones(len(begin), dtype=bool)
        reach = np.maximum.accumulate(end)
        fresh[1:] = (owner[1:] != owner[:-1]) | (begin[1:] > reach[:-1])
        first = np.flatnonzero(fresh)
        last_word = np.maximum.reduceat(end, first) - 1
        word_begin, word_end = spans(text)
        columns = (owner[first], word_begin[begin[first]], word_end[last_word])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        matches = [NGramMatch(self._texts[number].set, number, begin, end) for number, begin, end in rows]
        pieces = cut(text, matches, self.config) if self.config.action == "cut" else []
        return CleanedText(pieces, matches, len(text) - sum(map(len, pieces)))

    def find(self, text: str) -> tuple[Ints, Ints, Ints]:
        """Find the known n-grams of a text, ordered by first word and length.

        Returns first word, one past the last, and number of the first evaluation text with the n-gram: int64
        [hits] each.
        """
        empty = np.empty(0, np.int64)
        hits = self._search(hash_texts([plain_words(piece) for piece in pieces_of(text)])[0])
        columns = zip((empty, empty, empty), *hits, strict=True)
        begin, end, owner = (np.concatenate(column) for column in columns)
        order = np.lexsort((end, begin))
        return begin[order], end[order], owner[order]

    def suspects(self, texts: Sequence[str]) -> NDArray[np.bool_]:
        """Return a mask of texts [n] that may contain a known n-gram, with few false positives.

        The texts are searched as one, which is faster than `find` for each of many short ones.
        """
        mask = np.zeros(len(texts), dtype=bool)
        if not self._tables:
            return mask
        pieces = [[plain_words(piece) for piece in pieces_of(text)] for text in texts]
        words, counts = hash_texts([piece for text_pieces in pieces for piece in text_pieces])
        last_pieces = np.cumsum([len(text_pieces) for text_pieces in pieces], dtype=np.int64)
        ends = np.append(0, np.cumsum(counts))[last_pieces]  # one past each text's last word
        for begin, _, _ in self._search(words):
            mask[np.searchsorted(ends, begin, side="right")] = True
        return mask

    def _search(self, words: Hashes) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield the known n-grams of words [w] in blocks: first word, end and evaluation text."""
        for n, table in self._tables.items():
            for start in range(0, len(words) - n + 1, BLOCK):
                hit, owners = table.find(ngram_hashes(words[start : start + BLOCK + n - 1], n))
                if len(hit):
                    yield start + hit, start + hit + n, owners

    def report(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Summarise a corpus as plain JSON: counts per set, and the 20 texts matched most often.

        `counts` cover all documents with a match: each outcome, `letters` removed, and documents that match
        `set NAME` and `text NUMBER`.
        """
        documents = [counts.get(f"text {number}", 0) for number in range(len(self._texts))]
        zeros = {"texts": 0, "too_short": 0, "texts_hit": 0}
        sets = {text.set: zeros | {"documents": counts.get(f"set {text.set}", 0)} for text in self._texts}
        for text, covered, hits in zip(self._texts, self.covered.tolist(), documents, strict=True):
            sets[text.set]["texts"] += 1
            sets[text.set]["too_short"] += not covered
            sets[text.set]["texts_hit"] += hits > 0
        most_hit = sorted(range(len(documents)), key=lambda number: (-documents[number], number))[:20]
        return {
            "documents_cut": counts.get("cut", 0),
            "documents_dropped": counts.get("dropped", 0),
            "letters_removed": counts.get("letters", 0),
            "sets": sets,
            "most_hit": [
                {
                    "set": self._texts[number].set,
                    "place": self._texts[number].location,
                    "begins": self._texts[number].text[:60],
                    "documents": documents[number],
                }
                for number in most_hit
                if documents[number]
            ],
        }


def cut(text: str, matches: Sequence[NGramMatch], config: DecontaminateConfig) -> list[str]:
    """Return the pieces that are long enough; none if there are more than `config.max_matches` cuts."""
    cuts = list[list[int]]()
    for match in sorted(matches, key=lambda match: match.begin):
        begin = word_edge(text, max(0, match.begin - config.margin), -1)
        end = word_edge(text, min(len(text), match.end + config.margin), 1)
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


def word_edge(text: str, position: int, step: int) -> int:
    """Return the nearest position that is not inside a word, from `at` on, by steps of 1 or -1."""
    while 0 < position < len(text):
        for letter in text[position - 1 : position + 1]:
            # Combining marks, and letters that matching ignores, are parts of a word too.
            if not (letter.isalnum() or unicodedata.category(letter) in ("Mn", "Mc", "Me", "Cf")):
                return position
        position += step
    return position


def plain_words(text: str) -> bytes:
    """Return the normalised words of a text: UTF-8, separated by spaces."""
    content = text.encode()
    if text.isascii():
        return content.translate(FOLDED)
    non_ascii = np.flatnonzero(np.frombuffer(content, np.uint8) >= 128)
    firsts = np.flatnonzero(np.diff(non_ascii, prepend=-GAP - 1) > GAP)
    begins = np.maximum(non_ascii[firsts] - 1, 0).tolist()  # with the letter that a mark may combine with
    ends = (np.append(non_ascii[firsts[1:] - 1], non_ascii[-1]) + 1).tolist()
    parts, end_of_last = list[bytes](), 0
    for begin, end in zip(begins, ends, strict=True):
        folded = plain_form(content[begin:end].decode()).casefold()
        parts += content[end_of_last:begin], SEPARATORS.sub(" ", folded).encode()
        end_of_last = end
    return b"".join([*parts, content[end_of_last:]]).translate(FOLDED)


def plain_form(text: str) -> str:
    if text.isascii():
        return text
    return unicodedata.normalize("NFKC", IGNORABLE.sub("", text))


def spans(text: str) -> tuple[Ints, Ints]:
    """Return begin and end of each word in the text, in letters: int64 [words] each.

    A word with composed letters extends to the white space on both sides.
    """
    begins, ends, offset = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for piece in pieces_of(text):
        units: list[str] | str = piece
        folded = piece.casefold()
        if not piece.isascii() and (IGNORABLE.search(piece) or not unicodedata.is_normalized("NFKC", piece)):
            units = list[str]()
            for word in SPACES.findall(piece):
                # Letters that normalise independently are units of their own.
                is_separable = word.isascii() or "".join(map(plain_form, word)) == plain_form(word)
                units += list(word) if is_separable else [word]
            folded = "".join(plain_form(unit).casefold() for unit in units)
        words_at = np.array([match.span() for match in WORD.finditer(folded)], dtype=np.int64).reshape(-1, 2)
        begin, end = words_at[:, 0], words_at[:, 1]
        # Map positions back to letters of the text if folding changed its length.
        if len(folded) != len(piece) or units is not piece:
            unit_ends = np.cumsum([len(unit) for unit in units])
            grown = [len(plain_form(unit).casefold()) for unit in units]
            unit_of = np.repeat(np.arange(len(units)), grown)
            begin, end = np.append(0, unit_ends)[unit_of[begin]], unit_ends[unit_of[end - 1]]
        begins.append(begin + offset)
        ends.append(end + offset)
        offset += len(piece)
    return np.concatenate(begins), np.concatenate(ends)


def runs(text: str) -> Iterator[bytes]:
    """Yield the words of an evaluation text, in runs between words that were replaced by `<unk>`."""
    return map(plain_words, UNKNOWN.split(SPLIT_NEGATION.sub("", text)))
