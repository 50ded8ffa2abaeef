"""The run spec of `mlm data build`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mlm.config.fields import (
    FRACTION,
    MANY,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SEED,
    SHARE,
    InputPath,
    OnlyIf,
    OutFolder,
)
from mlm.data.config import SPLITS, StoredPath

Paths = str | tuple[str, ...]
"""Value of `input=`."""
MAX_DOCUMENT_BYTES = 1 << 26
ENABLED, AGAINST, CUT = OnlyIf("enabled"), OnlyIf("against"), OnlyIf("action", "cut")
HUB = OnlyIf("input", "hub:*")


def as_paths(paths: Paths) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else paths


@dataclass(frozen=True, kw_only=True, slots=True)
class NormaliseConfig:
    """Normalisation of a document, before every other step."""

    ftfy: bool = True
    """Fix mojibake, curly quotes, ligatures, control characters and Unicode forms (library ftfy)."""
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes to keep, such as [en]; empty keeps all. Needs mlm[data]."""
    min_language_score: Annotated[float, PROBABILITY, OnlyIf("languages")] = 0.65
    """Least probability of a document's language for it to count as one of `languages`."""


MIN_TOKENS = 128
"""filter.min_tokens=auto of documents (arXiv:1909.08053, section 4.1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """Rules a document must pass; null turns a rule off. Words are separated by white space."""

    min_tokens: Annotated[int | Literal["auto"] | None, POSITIVE] = "auto"
    """Fewest tokens, the end-of-document token not counted; auto is 128 (arXiv:1909.08053, section 4.1), and
    off for the passages that few documents are split into."""
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

    enabled: bool = True
    """Remove near-duplicates. The first in corpus order stays."""
    threshold: Annotated[float, FRACTION, ENABLED] = 0.7
    """Largest Jaccard similarity with an earlier kept document; above it, removed (arXiv:1909.08053)."""
    ngram: Annotated[int, POSITIVE, ENABLED] = 5
    """Length of a shingle, in units."""
    unit: Annotated[Literal["word", "character"], ENABLED] = "word"
    """Unit of a shingle."""
    bands: Annotated[int, POSITIVE, ENABLED] = 42
    """Bands of the signature: a pair that agrees on one whole band is compared."""
    rows: Annotated[int, POSITIVE, ENABLED] = 6
    """Hashes in a band. A pair of similarity J is missed with probability (1 - J**rows)**bands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecontaminateConfig:
    """Keeping the text of evaluation sets out (arXiv:2005.14165, appendix C)."""

    against: tuple[InputPath, ...] = ()
    """Evaluation texts: wikitext103, lambada (from the Hub; needs mlm[data]), or files .jsonl, .txt, …"""
    ngram: Annotated[int, POSITIVE, AGAINST] = 13
    """Words that must agree in a row."""
    min_ngram: Annotated[int, POSITIVE, AGAINST] = 8
    """An evaluation text shorter than `ngram` words is matched whole if it has this many."""
    action: Annotated[Literal["cut", "drop"], AGAINST] = "cut"
    """cut removes the match and `margin` letters on each side, drop the document."""
    margin: Annotated[int, NOT_NEGATIVE, CUT] = 200
    """Letters removed on each side of a match."""
    min_piece: Annotated[int, NOT_NEGATIVE, CUT] = 200
    """Pieces with fewer letters are dropped."""
    max_matches: Annotated[int, NOT_NEGATIVE, CUT] = 10
    """A document with more matches is dropped as a whole."""
    parts: Annotated[tuple[str, ...], AGAINST] = SPLITS
    """Parts of the corpus that are searched. [train], where `against` names the input's own validation and
    test files: their text is removed from train, and they stay whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig:
    """Processes that run the tasks of a build. Never changes the output."""

    kind: Literal["local", "ray"] = "local"
    """local: processes of this machine; ray: all nodes of a Ray cluster, which share the folders of input
    and out. Needs mlm[ray]."""
    address: Annotated[str | None, OnlyIf("kind", "ray")] = None
    """HOST:PORT of the cluster's head; null takes RAY_ADDRESS, else the cluster that this machine is in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataBuildConfig:
    """The run spec of `mlm data build`: text to a clean corpus in Megatron's .bin/.idx."""

    input: StoredPath | tuple[StoredPath, ...]
    """File, folder or glob of .jsonl, .ndjson, .json of lines, .txt, .md, .html (also .gz, .zst, .bz2, .xz)
    or .parquet; or hub:OWNER/NAME, a Hub dataset. s3://BUCKET/NAME is a file or folder in an S3-compatible
    store. Or a list of them: [a.txt,b]. HTML needs mlm[data].

    A folder with train.* may hold validation.* and test.*: each becomes that part."""
    tokenizer: InputPath
    """tokenizer.json, a folder that holds one or GPT-2's vocab.json and merges.txt, or BERT's vocab.txt."""
    out: OutFolder
    """Folder to write: {train,validation,test}.bin/.idx, tokenizer.json and the receipt corpus.json."""
    split: str = "0.98,0.01,0.01"
    """Shares of documents in train, validation and test when input has no parts; 0 leaves a part out.

    On a command line write slashes (0.9/0.05/0.05): Hydra takes commas for a sweep."""
    text_key: str = "text"
    """Key (or column) that holds a document's text."""
    encoding: str = "utf-8"
    """Encoding of .jsonl, .txt, .md and .html: a name such as latin-1 or cp1251, or auto, which detects that
    of each file that is not UTF-8 and needs mlm[data]."""
    hub_config: Annotated[str | None, HUB] = None
    """Configuration (subset) of a Hub dataset."""
    hub_split: Annotated[str, HUB] = "train"
    """Split of a Hub dataset."""
    hub_revision: Annotated[str | None, HUB] = None
    """Commit, tag or branch of a Hub dataset; null means its main branch now."""
    bad_input: Literal["refuse", "skip"] = "refuse"
    """A document that cannot be read stops the build (refuse), or is counted and listed in
    rejected.jsonl (skip)."""
    max_document_bytes: Annotated[int, MANY] = MAX_DOCUMENT_BYTES
    """Longest line or document, in bytes; a longer one is bad input."""
    seed: Annotated[int, SEED] = 1234
    """Seed of the split: a document's part is a function of it and of the text."""
    append_eod: bool = True
    """End every document with the end-of-document token."""
    eod: str | None = None
    """The end-of-document token, as the tokenizer spells it; null takes the first it has of <|endoftext|>,
    <|end_of_text|>, </s>, [EOS] and [SEP]."""
    prepend_bos: bool = False
    """Begin every document with the tokenizer's beginning-of-sequence token."""
    sentences: bool = False
    """One sequence per sentence, as BERT samples need. Needs mlm[data]."""
    workers: Annotated[int | None, POSITIVE] = None
    """Tasks at a time; null means one for each core, with executor=ray of all nodes. Never changes the
    output."""
    memory_gb: Annotated[float, POSITIVE] = 1.0
    """10^9 bytes of memory that a worker takes to compare documents with one another; with less, files are
    read more often. Never changes the output."""
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    normalise: NormaliseConfig = field(default_factory=NormaliseConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    dedup: DedupConfig = field(default_factory=DedupConfig)
    decontaminate: DecontaminateConfig = field(default_factory=DecontaminateConfig)
