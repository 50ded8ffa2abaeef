"""Run specs of the commands of `mlm data`: frozen dataclasses, one docstring per field."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from mlm.config.fields import MANY, NOT_NEGATIVE, SEED, Forbid, InputPath, OutFolder, OutPlace, ResultFile
from mlm.corpus.sections import (
    DecontaminateConfig,
    DedupConfig,
    ExecutorConfig,
    FilterConfig,
    NormaliseConfig,
)
from mlm.data.config import DataPath


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTokenizerConfig:
    """The run spec of `mlm data tokenizer`: train a tokenizer on text, or convert a foreign one."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    input: DataPath
    """Text as `mlm data build` takes it (held-out parts of a folder are not read), or a tokenizer to take
    over: a folder with vocab.json and merges.txt, a vocab.txt, or a tokenizer.json."""
    out: OutPlace
    """tokenizer.json to write, or the folder to write it in."""
    kind: Literal["bpe", "wordpiece"] = "bpe"
    """bpe: byte-level BPE as GPT-2's; wordpiece: as BERT's."""
    vocab_size: int = 8192
    """Tokens to learn, special tokens and bytes or letters among them: at least 257 for bpe."""
    lowercase: bool = True
    """Lowercase text and strip accents in training of kind=wordpiece (bert-*-uncased does). For an imported
    vocab.txt the tokenizer_config.json beside it decides, else the absence of capitals in its tokens."""
    text_key: str = "text"
    """Key (or column) that holds a document's text."""
    unreadable: Literal["error", "skip"] = "error"
    """As in `mlm data build`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataBuildConfig:
    """The run spec of `mlm data build`: text to a clean corpus in Megatron's .bin/.idx."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    input: DataPath
    """File, folder or glob of .jsonl, .ndjson, .txt (also .gz, .zst, .bz2, .xz), .json.gz or .parquet; or
    hub:OWNER/NAME, a Hub dataset.

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
    id_key: str | None = None
    """Key (or column) of a document's id: a second document of the same id is removed."""
    keep_ids: bool = False
    """Keep where every document came from: its source, line and id (id_key, else the key id) lie in
    {part}.origins.bin/.idx, for `mlm data inspect … document=N`."""
    hub_config: str | None = None
    """Configuration (subset) of a Hub dataset."""
    hub_split: str = "train"
    """Split of a Hub dataset."""
    hub_revision: str | None = None
    """Commit, tag or branch of a Hub dataset; null means its main branch now."""
    bad_input: Literal["refuse", "skip"] = "refuse"
    """A document that cannot be read stops the build (refuse), or is counted and listed in
    rejected.jsonl (skip)."""
    unreadable: Literal["error", "skip"] = "error"
    """A folder or file of the input that cannot be opened, a link that leads nowhere, a FIFO, socket or
    device stops the build (error), or is listed in the receipt (skip)."""
    max_document_bytes: Annotated[int, MANY] = 1 << 26
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
    work: OutFolder | None = None
    """Folder of the files between stages; null means {out}/work. On a cluster all nodes must see it. Only
    what the build wrote there is deleted at the end."""
    keep_work: bool = False
    """Keep that folder, so that a build with another tokenizer reuses what does not change."""
    normalise: NormaliseConfig = field(default_factory=NormaliseConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    dedup: DedupConfig = field(default_factory=DedupConfig)
    decontaminate: DecontaminateConfig = field(default_factory=DecontaminateConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataInspectConfig:
    """The run spec of `mlm data inspect`: what a corpus holds."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    path: DataPath
    """Corpus folder, or prefix of a .bin/.idx pair."""
    tokenizer: InputPath | None = None
    """Tokenizer to decode samples with; null takes tokenizer.json beside the corpus, if there is one."""
    samples: Annotated[int, NOT_NEGATIVE] = 3
    """Documents to decode, spread over the corpus; 0 decodes none."""
    document: int | None = None
    """Number of a document to show whole, with where it came from if the corpus was built with keep_ids=true;
    path is then a prefix, or a folder's train part is taken."""
    token: int | None = None
    """As `document`, by the number of one of its tokens."""
    out: ResultFile | None = None
    """JSON file for the same facts; null writes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataVerifyConfig:
    """The run spec of `mlm data verify`: is a corpus whole?"""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    path: DataPath
    """Corpus folder, or prefix of a .bin/.idx pair."""
    vocab_size: int | None = None
    """Token ids must be below it; null takes the receipt's or the tokenizer's beside the corpus."""
    out: ResultFile | None = None
    """JSON file for the verdict; null writes none."""
