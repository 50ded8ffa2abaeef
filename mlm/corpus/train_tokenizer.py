"""Training of a tokenizer on text: a byte-level BPE, or a WordPiece vocabulary."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from tokenizers import models, pre_tokenizers, trainers

from mlm.corpus.config import MAX_DOCUMENT_BYTES, Paths
from mlm.corpus.read.finding import search
from mlm.corpus.read.read import read_shard
from mlm.corpus.read.records import BadRecordError
from mlm.corpus.read.shards import split_inputs, with_encoding
from mlm.data.tokenizer import Tokenizer
from mlm.data.tokenizer_settings import EOD
from mlm.data.vocabulary_files import BERT_SPECIAL, CONTINUES, UNK, byte_level, word_piece
from mlm.util.errors import UserError, format_value
from mlm.util.terminal import progress_bar

LETTERS = 1000
"""Size limit of a WordPiece alphabet; words with other letters become [UNK]."""
Texts = Callable[[], Iterable[str]]


def texts_of(paths: Paths, text_key: str, encoding: str) -> Texts:
    """Return a function that iterates over the training documents of `input=`, with a progress bar.

    Raises UserError; so does iterating, for a bad record, and at the end if all texts were empty.
    """
    inputs = [item for item in search(paths).inputs if item.split in (None, "train")]
    shards = split_inputs([with_encoding(item, encoding) for item in inputs], 1 << 26)

    def reject(error: BadRecordError) -> None:
        raise error.to_user_error("fix or delete it")

    def texts() -> Iterator[str]:
        has_text = False
        with progress_bar("reading", len(shards)) as advance:
            for shard in shards:
                for document in read_shard(
                    shard, text_key=text_key, max_bytes=MAX_DOCUMENT_BYTES, reject=reject
                ):
                    has_text = has_text or bool(document.text)
                    yield document.text
                advance(1)
        if not has_text:
            raise UserError(
                f"input={format_value(paths)} holds no text to train on; name a file with documents"
            )

    return texts


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE: 256 bytes, <|endoftext|>, and merges up to `vocab_size` tokens.

    A small corpus may offer fewer merges. Equal documents give equal bytes, whatever the number of threads.
    Raises UserError for a vocab_size below 257.
    """
    if vocab_size < 257:
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

    Reads the documents twice: all letters are passed to the library first. Otherwise it numbers letters
    inside words in the order of a hash table and breaks ties by these numbers, so that each run learns
    different pieces. Raises UserError for a vocab_size too small for the letters.
    """
    backend = word_piece(models.WordPiece(unk_token=UNK), lowercase=lowercase)
    counts = Counter[str]()
    for text in texts():
        counts.update(backend.normalizer.normalize_str(text))
    commonest = sorted(counts, key=lambda letter: (-counts[letter], letter))
    letters = sorted([letter for letter in commonest if not letter.isspace()][:LETTERS])
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
    # Rebuild from the ids alone: the trainer has marked all letters as special tokens.
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return Tokenizer(word_piece(models.WordPiece(vocabulary, unk_token=UNK), lowercase=lowercase).to_str())
