"""Sections of the run spec of `mlm data build`: cleaning of text, and the executor."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mlm.config.fields import FRACTION, NOT_NEGATIVE, POSITIVE, PROBABILITY, SHARE, Forbid, InputPath
from mlm.data.corpus_files import SPLITS


@dataclass(frozen=True, kw_only=True, slots=True)
class NormaliseConfig:
    """Normalisation of a document, before every other step."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    ftfy: bool = True
    """Fix mojibake, curly quotes, ligatures, control characters and Unicode forms (library ftfy)."""
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes to keep, such as [en]; empty keeps all. Needs mlm[data]."""
    min_language_score: Annotated[float, PROBABILITY] = 0.65
    """Least probability of a document's language for it to count as one of `languages`."""


MIN_TOKENS = 128
"""filter.min_tokens=auto of documents (arXiv:1909.08053, section 4.1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """Rules a document must pass; null turns a rule off. Words are separated by white space."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    min_tokens: Annotated[int | Literal["auto"] | None, POSITIVE] = "auto"
    """Fewest tokens, the end-of-document token not counted; auto is 128 (arXiv:1909.08053, section 4.1), and
    off for a single text, which is divided into parts rather than documents."""
    min_words: Annotated[int | None, NOT_NEGATIVE] = None
    """Fewest words; 50 in arXiv:2112.11446, table A1."""
    max_words: Annotated[int | None, NOT_NEGATIVE] = None
    """Most words; 100,000 there."""
    min_mean_word_length: Annotated[float | None, NOT_NEGATIVE] = None
    """Least mean length of a word, in letters; 3 there."""
    max_mean_word_length: Annotated[float | None, NOT_NEGATIVE] = None
    """Greatest mean length of a word; 10 there."""
    max_symbol_ratio: Annotated[float | None, NOT_NEGATIVE] = None
    """Most `#` and `…` per word; 0.1 there."""
    max_bullet_lines: Annotated[float | None, SHARE] = None
    """Largest share of lines that begin with a bullet; 0.9 there."""
    max_ellipsis_lines: Annotated[float | None, SHARE] = None
    """Largest share of lines that end with an ellipsis; 0.3 there."""
    min_alphabetic_words: Annotated[float | None, SHARE] = None
    """Least share of words with a letter; 0.8 there."""
    min_stop_words: Annotated[int | None, NOT_NEGATIVE] = None
    """Fewest different words among the, be, to, of, and, that, have, with; 2 there."""
    max_duplicate_lines: Annotated[float | None, SHARE] = None
    """Largest share of lines that repeat an earlier one; 0.3 there."""

    @property
    def least_tokens(self) -> int:
        """min_tokens of documents as a number; 0 where the rule is off."""
        return MIN_TOKENS if self.min_tokens == "auto" else self.min_tokens or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupConfig:
    """Removal of near-duplicates: MinHash LSH proposes pairs, their exact Jaccard similarity decides."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    enabled: bool = True
    """Remove near-duplicates. The first in corpus order stays."""
    threshold: Annotated[float, FRACTION] = 0.7
    """Largest Jaccard similarity with an earlier kept document; above it, removed (arXiv:1909.08053)."""
    ngram: Annotated[int, POSITIVE] = 5
    """Length of a shingle, in units."""
    unit: Literal["word", "character"] = "word"
    """Unit of a shingle."""
    bands: Annotated[int, POSITIVE] = 42
    """Bands of the signature: a pair that agrees on one whole band is compared."""
    rows: Annotated[int, POSITIVE] = 6
    """Hashes in a band. A pair of similarity J is missed with probability (1 - J**rows)**bands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecontaminateConfig:
    """Keeping the text of evaluation sets out (arXiv:2005.14165, appendix C)."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    against: tuple[InputPath, ...] = ()
    """Evaluation texts: wikitext103, lambada (from the Hub; needs mlm[data]) or files .jsonl, .txt."""
    ngram: Annotated[int, POSITIVE] = 13
    """Words that must agree in a row."""
    min_ngram: Annotated[int, POSITIVE] = 8
    """An evaluation text shorter than `ngram` words is matched whole if it has this many."""
    action: Literal["cut", "drop"] = "cut"
    """cut removes the match and `margin` letters on each side, drop the document."""
    margin: Annotated[int, NOT_NEGATIVE] = 200
    """Letters removed on each side of a match."""
    min_piece: Annotated[int, NOT_NEGATIVE] = 200
    """Pieces with fewer letters are dropped."""
    max_matches: Annotated[int, NOT_NEGATIVE] = 10
    """A document with more matches is dropped as a whole."""
    parts: tuple[str, ...] = SPLITS
    """Parts of the corpus that are searched. [train], where `against` names the input's own validation and
    test files: their text is removed from train, and they stay whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig:
    """Executor of the tasks: one of datatrove's."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    kind: Literal["local", "slurm", "ray"] = "local"
    """local: processes of this machine; slurm: submitted jobs; ray: a Ray cluster (needs the package ray)."""
    workers: Annotated[int | None, POSITIVE] = None
    """Tasks at a time; null means this machine's cores, on a cluster no limit. Never changes the output."""
    partition: str | None = None
    """SLURM partition; required by slurm."""
    time: str = "24:00:00"
    """SLURM time limit of one task."""
    memory_gb: Annotated[int, POSITIVE] = 4
    """Memory per task on slurm and ray, GiB."""
    environment: str = ""
    """Shell command that a SLURM task starts with, such as `source .venv/bin/activate`."""
