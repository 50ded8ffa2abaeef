"""Byte-level BPE in the style of GPT-2, on the `tokenizers` library."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from mlm.config.errors import CorruptFileError, UserError
from mlm.files import digest_bytes, write_atomic

EOD = "<|endoftext|>"
"""End of document, GPT-2's only special token."""
EOD_NAMES = (EOD, "<|end_of_text|>", "</s>")
BYTES = 256
MAX_BYTES = 1 << 28  # 256 MiB of tokenizer.json: the largest vocabularies in use need 40


class Tokenizer:
    """Text to token ids and back. Special tokens written out in a text are text: they encode as letters.

    `vocab_size` is one more than the largest id. Raises UserError when no end-of-document token is known.
    """

    def __init__(self, content: str, source: str = "tokenizer") -> None:
        self._content = content
        self._backend = parse(content, source)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        known = [vocabulary[name] for name in EOD_NAMES if name in vocabulary]
        if not known:
            raise UserError(
                f"{source} has no end-of-document token: add one of {', '.join(EOD_NAMES)} to its vocabulary"
            )
        self.eod_id = known[0]
        self.digest = digest_bytes(content.encode())
        """Digest of tokenizer.json."""

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json, a folder that holds one, or a folder with vocab.json and merges.txt.

        Raises UserError when there is none, CorruptFileError when it cannot be read.
        """
        file = Path(path)
        if file.is_dir() and not (file / "tokenizer.json").is_file():
            return cls(read_gpt2(file), str(file))
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise UserError(
                f"no tokenizer at {file}: set tokenizer to a tokenizer.json; `mlm data tokenizer` trains one"
            )
        check_size(file)
        try:
            return cls(file.read_bytes().decode("utf-8"), str(file))
        except UnicodeDecodeError as error:
            raise CorruptFileError(f"{file} is not UTF-8 ({error.reason}): replace it") from error

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json, byte for byte what was loaded or trained. Raises OSError."""
        write_atomic(Path(path), self._content.encode())

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is added at its ends."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, on all cores."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens written out; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE: 256 bytes, <|endoftext|>, and merges up to `vocab_size` tokens.

    A small corpus may have fewer merges to offer. Raises UserError for a vocab_size below 257.
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


def byte_level(model: models.Model) -> Backend:
    """GPT-2's pipeline around a BPE model: no normaliser, byte-level splitting, no added prefix space."""
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def read_gpt2(folder: Path) -> str:
    """A tokenizer.json made of GPT-2's vocab.json and merges.txt."""
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocabulary.is_file() and merges.is_file()):
        raise UserError(
            f"no tokenizer in {folder}: set tokenizer to a folder with tokenizer.json, or with vocab.json "
            f"and merges.txt"
        )
    for file in (vocabulary, merges):
        check_size(file)
    try:
        backend = byte_level(models.BPE.from_file(str(vocabulary), str(merges)))
    except BaseException as error:
        raise damaged(f"{vocabulary} or {merges.name}", error) from error
    if backend.token_to_id(EOD) is not None:
        backend.add_special_tokens([AddedToken(EOD, special=True, normalized=False)])
    return backend.to_str()


def parse(content: str, source: str) -> Backend:
    """The library's tokenizer, set to leave lengths and special tokens alone. Raises CorruptFileError."""
    try:
        backend = Backend.from_str(content)
    except BaseException as error:
        raise damaged(source, error) from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def check_size(file: Path) -> None:
    """Refuse what is too large to be a tokenizer's, before it is read. Raises CorruptFileError."""
    if (size := file.stat().st_size) > MAX_BYTES:
        raise CorruptFileError(f"{file}: {size} bytes, {MAX_BYTES} is the limit: replace it, or train one")


def damaged(source: str, error: BaseException) -> CorruptFileError:
    """What to say about a tokenizer file the library refuses.

    It raises bare Exception, and PanicException, which is none, where its Rust code gives up. What is not of
    the file passes through.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CorruptFileError(f"{source} is no tokenizer ({reason}): replace it, or train one")
