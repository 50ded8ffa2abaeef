"""Run specs of the commands of `mlm data`: frozen dataclasses, one docstring per field; their checks."""

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
    OutPlace,
    ResultFile,
)
from mlm.data.config import SPLITS, DataPath, StoredPath
from mlm.util.errors import Problem

MAX_DOCUMENT_BYTES = 1 << 26
ENABLED, AGAINST, CUT = OnlyIf("enabled"), OnlyIf("against"), OnlyIf("action", "cut")
HUB = OnlyIf("input", "hub:*")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTokenizerConfig:
    """The run spec of `mlm data tokenizer`: train a tokenizer on text, or convert a foreign one."""

    input: StoredPath
    """Text as `mlm data build` takes it (held-out parts of a folder are not read), or a tokenizer to take
    over: a folder with vocab.json and merges.txt, a vocab.txt, or a tokenizer.json."""
    out: OutPlace
    """tokenizer.json to write, or the folder to write it in."""
    kind: Literal["bpe", "wordpiece"] = "bpe"
    """bpe: byte-level BPE as GPT-2's; wordpiece: as BERT's."""
    vocab_size: int = 8192
    """Tokens to learn, special tokens and bytes or letters among them: at least 257 for bpe."""
    lowercase: Annotated[bool, OnlyIf("kind", "wordpiece")] = True
    """Lowercase text and strip accents in training of kind=wordpiece (bert-*-uncased does). For an imported
    vocab.txt the tokenizer_config.json beside it decides, else the absence of capitals in its tokens."""
    text_key: str = "text"
    """Key (or column) that holds a document's text."""
    eod: str | None = None
    """End-of-document token of a tokenizer to take over; null finds it by its name."""


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
class DataBuildConfig:
    """The run spec of `mlm data build`: text to a clean corpus in Megatron's .bin/.idx."""

    input: StoredPath
    """File, folder or glob of .jsonl, .ndjson, .json of lines, .txt (also .gz, .zst, .bz2, .xz) or .parquet;
    or hub:OWNER/NAME, a Hub dataset. s3://BUCKET/NAME is a file or folder in an S3-compatible store.

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
    """Processes; null means one for each core. Never changes the output."""
    normalise: NormaliseConfig = field(default_factory=NormaliseConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    dedup: DedupConfig = field(default_factory=DedupConfig)
    decontaminate: DecontaminateConfig = field(default_factory=DecontaminateConfig)


MAX_BANDS = 1024  # a task and a column of keys each


def check_build(config: DataBuildConfig) -> list[Problem]:
    """Problems of `mlm data build` between its settings."""
    problems = []
    decontaminate, rules = config.decontaminate, config.filter
    if (bands := config.dedup.bands) > MAX_BANDS:
        problem = f"dedup.bands={bands} is above {MAX_BANDS}"
        problems.append(Problem(("dedup.bands",), problem, "lower it, and dedup.rows with it"))
    if decontaminate.min_ngram > decontaminate.ngram:
        problems.append(
            Problem(
                ("decontaminate.min_ngram", "decontaminate.ngram"),
                f"decontaminate.min_ngram={decontaminate.min_ngram} is above "
                f"decontaminate.ngram={decontaminate.ngram}",
                "lower it",
            )
        )
    if not decontaminate.parts or not set(decontaminate.parts) <= set(SPLITS):
        parts, fix = f"[{','.join(decontaminate.parts)}]", f"name some of {', '.join(SPLITS)}"
        problems.append(Problem.at("decontaminate.parts", parts, "must be parts of a corpus", fix))
    for low, high in (("min_words", "max_words"), ("min_mean_word_length", "max_mean_word_length")):
        least, most = getattr(rules, low), getattr(rules, high)
        if least is not None and most is not None and least > most:
            problem = f"filter.{low}={least} is above filter.{high}={most}: no document could pass"
            problems.append(Problem((f"filter.{low}", f"filter.{high}"), problem))
    return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class DataInspectConfig:
    """The run spec of `mlm data inspect`: what a corpus holds."""

    path: DataPath
    """Corpus folder, or prefix of a .bin/.idx pair."""
    tokenizer: InputPath | None = None
    """Tokenizer to decode samples with; null takes tokenizer.json beside the corpus, if there is one."""
    samples: Annotated[int, NOT_NEGATIVE, OnlyIf("token", None)] = 3
    """Documents to decode, spread over the corpus; 0 decodes none."""
    document: int | None = None
    """Number of a document to show whole; path is then a prefix, or a folder's train part is taken."""
    token: Annotated[int | None, OnlyIf("document", None)] = None
    """As `document`, by the number of one of its tokens."""
    out: ResultFile | None = None
    """JSON file for the same facts; null writes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataVerifyConfig:
    """The run spec of `mlm data verify`: is a corpus whole?"""

    path: DataPath
    """Corpus folder, or prefix of a .bin/.idx pair."""
    vocab_size: int | None = None
    """Token ids must be below it; null takes the receipt's or the tokenizer's beside the corpus."""
    out: ResultFile | None = None
    """JSON file for the verdict; null writes none."""
