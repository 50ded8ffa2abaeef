"""Settings of the commands `mlm data …` but `mlm data build`, whose are in mlm/corpus/config.py."""

from dataclasses import dataclass
from typing import Annotated, Literal

from mlm.config.fields import NOT_NEGATIVE, InputPath, OnlyIf, OutFolder, OutPlace, ResultFile
from mlm.data.config import DataPath, StoredPath


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTokenizerConfig:
    """The run spec of `mlm data tokenizer`: train a tokenizer on text, or convert a foreign one."""

    input: StoredPath | tuple[StoredPath, ...]
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
    vocab.txt the tokenizer_config.json next to it decides, else the absence of capitals in its tokens."""
    text_key: str = "text"
    """Key (or column) that holds a document's text."""
    encoding: str = "utf-8"
    """Encoding of the text, as in `mlm data build`."""
    eod: str | None = None
    """End-of-document token of a tokenizer to take over; null finds it by its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataMergeConfig:
    """The run spec of `mlm data merge`: corpora of one tokenizer, joined."""

    paths: tuple[InputPath, ...] = ()
    """Corpus folders, or prefixes of .bin/.idx pairs, in the order of their documents. Of a folder with
    train.bin each part is joined with its like; other pairs go into train."""
    out: OutFolder
    """Corpus folder to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSplitConfig:
    """The run spec of `mlm data split`: a corpus, divided into parts by documents."""

    path: DataPath
    """Prefix of a .bin/.idx pair, or a folder with one."""
    out: OutFolder
    """Corpus folder to write."""
    split: str = "969/30/1"
    """Weights of train, validation and test, of which 0 leaves one out: consecutive documents, as
    Megatron-LM's --split takes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataInspectConfig:
    """The run spec of `mlm data inspect`: what a corpus holds."""

    path: DataPath
    """Corpus folder, or prefix of a .bin/.idx pair."""
    tokenizer: InputPath | None = None
    """Tokenizer to decode samples with; null takes the corpus's tokenizer.json, if there is one."""
    samples: Annotated[int, NOT_NEGATIVE] = 3
    """Documents to decode, spread over the corpus; 0 decodes none."""
    out: ResultFile | None = None
    """JSON file for the same facts; null writes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataVerifyConfig:
    """The run spec of `mlm data verify`: is a corpus whole?"""

    path: DataPath
    """Corpus folder, or prefix of a .bin/.idx pair."""
    vocab_size: int | None = None
    """Token ids must be below it; null takes the corpus's receipt's or tokenizer's."""
    out: ResultFile | None = None
    """JSON file for the verdict; null writes none."""
