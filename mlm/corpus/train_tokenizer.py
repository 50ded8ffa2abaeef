"""`mlm data tokenizer`: train a tokenizer on text, or convert one."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.console import Console
from tokenizers import models, pre_tokenizers, trainers

from mlm.corpus.config import MAX_DOCUMENT_BYTES, DataTokenizerConfig
from mlm.corpus.read.finding import kind_of, search
from mlm.corpus.read.read import read_shard
from mlm.corpus.read.records import BadRecordError
from mlm.corpus.read.shards import split_inputs
from mlm.data.tokenizer import FILES, Tokenizer
from mlm.data.tokenizer_settings import EOD
from mlm.data.vocabulary_files import BERT_SPECIAL, CONTINUES, UNK, byte_level, word_piece
from mlm.util.errors import Problem, UserError
from mlm.util.results import is_stream, result_problems, write_result
from mlm.util.terminal import Screen, progress_bar

BYTES = 256
LETTERS = 1000
"""Size limit of a WordPiece alphabet; words with other letters become [UNK]."""
SHARD_BYTES = 1 << 26
Texts = Callable[[], Iterable[str]]


def run_tokenizer(config: DataTokenizerConfig, console: Console | None = None) -> Path:
    """Write tokenizer.json; return its path.

    Raises UserError: no text, bad input, or another tokenizer at `out`.
    """
    console = console or Screen()
    path = tokenizer_path(config.out)
    if problems := preflight(config):
        raise UserError(problems[0])
    taken = is_tokenizer(config.input)
    tokenizer = Tokenizer.load(config.input, eod=config.eod) if taken else learn(config)
    if path.is_file() and digest_at(path, config.eod) != tokenizer.digest:
        raise UserError(
            f"out={path} is another tokenizer: corpora may depend on it; set another out=, or delete it"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"out={config.out}: {error.filename or path}: {error.strerror}: set another out="
        ) from error
    if not path.is_file():  # else it is there already: the digests are equal
        write_result(path, tokenizer.content)
    console.print(
        f"{path}: {tokenizer.vocab_size} tokens, {tokenizer.digest}", soft_wrap=True, highlight=False
    )
    return path


def tokenizer_path(out: str) -> Path:
    """Return the file that `out` means: itself, or tokenizer.json in it."""
    return Path(out) if out.endswith(".json") or is_stream(out) else Path(out) / "tokenizer.json"


def preflight(config: DataTokenizerConfig) -> list[str]:
    """Return the problem of a file at `out` that is not a tokenizer; called before the input is read."""
    path = tokenizer_path(config.out)
    if Path(config.out).suffix in (".txt", ".model") and not Path(config.out).is_dir():
        problem = "would be a folder of that name: a tokenizer is one tokenizer.json, its settings included"
        return [
            Problem.at("out", config.out, problem, f"use out={Path(config.out).with_name('tokenizer.json')}")
        ]
    if path.is_file() and not is_stream(path):
        return (
            []
            if digest_at(path, config.eod) is not None
            else [f"out={path}: exists and is not a tokenizer; name another file, or delete it"]
        )
    return result_problems(path)


def is_tokenizer(path: str) -> bool:
    """True if `input` names a tokenizer to convert: its file, or a folder with its files and no text."""
    place = Path(path)
    if place.is_dir():
        parts = {*FILES, "merges.txt"}
        if not any((place / name).is_file() for name in FILES):
            return False
        return not any(kind_of(file) for file in place.iterdir() if file.name not in parts)
    return place.suffix == ".json" or place.name == "merges.txt" or place.name.endswith("vocab.txt")


def digest_at(path: Path, eod: str | None) -> str | None:
    """Digest of the tokenizer in a file; None if it is not one."""
    try:
        return Tokenizer.load(path, eod=eod).digest
    except UserError:
        return None


def learn(config: DataTokenizerConfig) -> Tokenizer:
    """Train on the texts of `input`. Raises UserError."""
    texts, lowercase = texts_of(config), config.lowercase
    if config.kind == "wordpiece":
        return train_wordpiece(texts, config.vocab_size, lowercase=lowercase)
    return train_bpe(texts(), config.vocab_size)


def texts_of(config: DataTokenizerConfig) -> Texts:
    """Return an iterable over the documents of `input` that are not held out, with a bar. Raises UserError.

    Iterating raises UserError for a bad record, and at the end if all texts were empty.
    """
    inputs = [item for item in search(config.input).inputs if item.split in (None, "train")]
    shards = split_inputs(inputs, SHARD_BYTES)

    def reject(error: BadRecordError) -> None:
        raise error.to_user_error("fix or delete it")

    def texts() -> Iterator[str]:
        seen = False
        with progress_bar("reading", len(shards)) as advance:
            for shard in shards:
                for document in read_shard(
                    shard,
                    text_key=config.text_key,
                    max_bytes=MAX_DOCUMENT_BYTES,
                    reject=reject,
                ):
                    seen = seen or bool(document.text)
                    yield document.text
                advance(1)
        if not seen:
            raise UserError(f"input={config.input} holds no text to train on; name a file with documents")

    return texts


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE: 256 bytes, <|endoftext|>, and merges up to `vocab_size` tokens.

    A small corpus may offer fewer merges. Equal documents give equal bytes, whatever the number of threads.
    Raises UserError for a vocab_size below 257.
    """
    if vocab_size < BYTES + 1:
        raise UserError(
            f"vocab_size={vocab_size} is less than 256 bytes and {EOD}: set vocab_size to 257 or more"
        )
    backend = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return Tokenizer(backend.to_str())


def train_wordpiece(texts: Texts, vocab_size: int, *, lowercase: bool = True) -> Tokenizer:
    """Learn a WordPiece vocabulary as BERT's: special tokens, letters, and pieces up to `vocab_size` tokens.

    Reads the documents twice. By default the library numbers letters inside words in the order of a hash
    table and breaks ties by those numbers, so that each run learns different pieces: here all letters are
    given first. Raises UserError for a vocab_size too small for them.
    """
    backend = word_piece(models.WordPiece(unk_token=UNK), lowercase=lowercase)
    letters = alphabet(texts(), backend.normalizer.normalize_str)
    first = [*BERT_SPECIAL, *letters, *(CONTINUES + letter for letter in letters)]
    if vocab_size < len(first):
        raise UserError(
            f"vocab_size={vocab_size} is less than {len(BERT_SPECIAL)} special tokens and twice "
            f"{len(letters)} letters, at the start of a word and inside one: set vocab_size to {len(first)} "
            f"or more"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=first,
        limit_alphabet=len(letters),
        initial_alphabet=letters,
        show_progress=False,
    )
    backend.train_from_iterator(texts(), trainer=trainer)
    # Rebuilt from the ids alone: to the trainer all letters were special tokens.
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return Tokenizer(word_piece(models.WordPiece(vocabulary, unk_token=UNK), lowercase=lowercase).to_str())


def alphabet(texts: Iterable[str], normalise: Callable[[str], str]) -> list[str]:
    """Return the commonest letters of texts, at most LETTERS of them, sorted."""
    counts = Counter[str]()
    for text in texts:
        counts.update(normalise(text))
    letters = [letter for letter in counts if not letter.isspace()]
    return sorted(sorted(letters, key=lambda letter: (-counts[letter], letter))[:LETTERS])
