"""What `mlm data tokenizer` and `mlm data build` are told: frozen dataclasses, one docstring per field."""

from dataclasses import dataclass
from typing import ClassVar

from mlm.config.schema import Forbid


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTokenizerConfig:
    """The run spec of `mlm data tokenizer`: train a byte-level BPE on text."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    input: str
    """A .jsonl or .txt file, or a folder that holds train.jsonl or train.txt (held-out text is not read)."""
    out: str
    """tokenizer.json to write, or the folder to write it in."""
    vocab_size: int = 8192
    """Tokens to learn, the 256 bytes and <|endoftext|> among them: at least 257."""
    text_key: str = "text"
    """JSON key that holds a document's text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataBuildConfig:
    """The run spec of `mlm data build`: text to Megatron's .bin/.idx."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    input: str
    """A folder with train.jsonl and optionally validation.jsonl, test.jsonl (or .txt), or one such file."""
    tokenizer: str
    """tokenizer.json, a folder that holds one, or a folder with GPT-2's vocab.json and merges.txt."""
    out: str
    """Folder to write: {train,validation,test}.bin/.idx, tokenizer.json and the receipt corpus.json."""
    split: str = "0.98,0.01,0.01"
    """Shares of documents in train, validation and test when input is one file; 0 leaves a part out.

    On a command line write slashes (0.9/0.05/0.05): Hydra takes commas for a sweep."""
    text_key: str = "text"
    """JSON key that holds a document's text."""
    seed: int = 1234
    """Which document falls in which part of the split is a function of it."""
