"""Text to token ids and back, with the library `tokenizers`: byte-level BPE as GPT-2's, WordPiece as BERT's.

mlm/corpus/train_tokenizer.py trains them.
"""

import json
import os
import re
import secrets
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mlm.data.tokenizer_settings import (
    ADDED,
    CONFIG,
    EOD,
    GENERATION_CONFIG,
    SETTINGS,
    check_size,
    named_tokens,
    read_config,
)
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import digest_bytes, read_input_text, write_atomic
from mlm.util.ownership import file_type_name

if TYPE_CHECKING:
    from mlm.data.chat_template import ChatTemplate

UNK, CLS, SEP, PAD, MASK = "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"
BERT_SPECIAL = (PAD, UNK, CLS, SEP, MASK)
EOD_NAMES = (EOD, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", SEP)
"""The first that exists counts. BERT's vocabulary has only [SEP]; Megatron-LM adds an [EOS]."""
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", EOD)
"""GPT-2's beginning of a sequence is its end of a document, as in transformers."""
CONTINUES = "##"
"""Prefix of a WordPiece token inside a word."""
LONGEST_WORD = 100
"""Letters; BERT has no token for a longer word (its max_input_chars_per_word)."""
FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
"""A folder with a tokenizer has one of these."""
ADDED_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
BYTE_LEVEL_SPACES = "ĠĊĉčċČ"
"""Byte-level BPE's letters for space, \\n, \\t, \\r, \\v and \\f."""
PRIVATE = 0x100000
"""Letter of the first special token for `encode_private`: the second plane for private use."""
MAX_TOKENS = 1 << 24  # of a vocabulary: tables have a row for each
Placed = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Token ids [n], and begin and end [n, 2] of each in letters of the text."""


class Tokenizer:
    """Text to token ids and back.

    Special tokens spelled out in a text are text: every type of model encodes them as letters.

    Attributes:
        vocab_size                        one more than the largest id
        eod_id                            end of document
        bos_id                            beginning of a sequence, or None
        cls_id, sep_id, mask_id, pad_id   BERT's special tokens, None where the vocabulary has none
        digest                            of tokenizer.json
        chat_template                     of a model for conversations, where a command has read it

    Raises UserError if no end-of-document token is known.
    """

    def __init__(self, content: str, source: str = "tokenizer", eod: str | int | None = None) -> None:
        self._content = content
        self._backend = parse(content, source)
        self._vocabulary = vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MAX_TOKENS:
            raise CorruptFileError(f"{source}: token id {self.vocab_size - 1}; {MAX_TOKENS - 1} is the limit")
        eod_id = first_of((eod,) if isinstance(eod, str) else EOD_NAMES, vocabulary)
        if isinstance(eod, int) and self._backend.id_to_token(eod) is not None:
            eod_id = eod
        if eod_id is None and isinstance(eod, str):
            raise UserError(f"eod={eod} is not a token of {source}; name one of its vocabulary")
        if eod_id is None:
            marks = "|".join(("end", "eos", "eot", "/s", "sep"))
            near = [name for name in self.special_names if re.search(marks, name, re.IGNORECASE)]
            fix = " or ".join(f"eod={name}" for name in (near or self.special_names)[:3])
            raise UserError(
                f"{source} has no end-of-document token: set {fix or 'eod=NAME of one of its tokens'}, "
                f"or add one of {', '.join(EOD_NAMES)} to its vocabulary"
            )
        self.eod_id = eod_id
        self.bos_id = first_of(BOS_NAMES, vocabulary)
        self.cls_id, self.sep_id = vocabulary.get(CLS), vocabulary.get(SEP)
        self.mask_id, self.pad_id = vocabulary.get(MASK), vocabulary.get(PAD)
        self.digest = digest_bytes(content.encode())
        self.chat_template: ChatTemplate | None = None

    @cached_property
    def _encoder(self) -> Backend:
        """The library's tokenizer with its special tokens under names that no text contains.

        With encode_special_tokens the library still finds special tokens that are not marked as such, and
        those that are pieces of a Unigram, WordPiece or word vocabulary.
        """
        content = json.loads(self._content)
        reserved = self._reserved(content)
        if not any(can_spell(content, name) for name in reserved):
            return self._backend
        secret = {name: f"{secrets.token_hex(16)}{n}" for n, name in enumerate(sorted(reserved))}
        return parse(json.dumps(with_names(content, secret)), "tokenizer")

    @cached_property
    def _with_special(self) -> Backend:
        """The library's tokenizer, which finds special tokens in a text; no space is missing in offsets."""
        backend = parse(json.dumps(json.loads(self._content) | {"post_processor": None}), "tokenizer")
        backend.encode_special_tokens = False
        return backend

    @cached_property
    def _with_private(self) -> Backend:
        """The library's tokenizer, which finds special tokens by letters of private use."""
        private = {name: chr(PRIVATE + n) * len(name) for n, name in enumerate(self.special_names)}
        backend = parse(json.dumps(with_names(json.loads(self._content), private)), "tokenizer")
        backend.encode_special_tokens = False
        return backend

    @cached_property
    def special_names(self) -> tuple[str, ...]:
        """Names of the tokens that are marked as special, sorted."""
        added = self._backend.get_added_tokens_decoder().values()
        return tuple(sorted({token.content for token in added if token.special}))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that are marked as special."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    def name_of(self, id: int) -> str:
        """Return the name of a token."""
        return str(self._backend.id_to_token(id))

    def _reserved(self, content: dict[str, Any]) -> set[str]:
        """Return the names of special tokens but the unknown token."""
        marked = {token["content"] for token in content.get("added_tokens") or () if token["special"]}
        named = {*EOD_NAMES, *BOS_NAMES, *BERT_SPECIAL} & self._vocabulary.keys()
        return (marked | named) - {UNK, content["model"].get("unk_token")}

    @cached_property
    def adds_bos(self) -> bool:
        """True if the tokenizer itself puts `bos_id` before a text, as `transformers` does then."""
        return self._backend.encode("a", add_special_tokens=True).ids[:1] == [self.bos_id]

    def __contains__(self, name: str) -> bool:
        return name in self._vocabulary

    @property
    def prefix_id(self) -> int:
        """The context of a text that has none: beginning of a sequence, else end of a document."""
        return self.eod_id if self.bos_id is None else self.bos_id

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of the tokens that are found whole in a text: special ones, and others that were added."""
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def vocabulary_digest(self) -> str:
        """Digest of all tokens with their ids, and of the merges.

        It is the same for a tokenizer.json and the vocab.json and merges.txt that it was made from, and for
        both spellings of merges in JSON.
        """
        pairs = merges_of(json.loads(self._content).get("model", {}))
        return digest_bytes(json.dumps([sorted(self._vocabulary.items()), pairs]).encode())

    @cached_property
    def is_word_start(self) -> NDArray[np.bool_]:
        """Mask of tokens that begin a word: bool [vocab_size].

        WordPiece: those without ##. Byte-level BPE: those that begin with white space. Special tokens do, and
        all tokens of other types of models.
        """
        model = self._backend.model
        starts = np.ones(self.vocab_size, dtype=bool)
        if isinstance(model, models.WordPiece):
            inside = [id for name, id in self._vocabulary.items() if name.startswith(CONTINUES)]
        elif "ByteLevel" in str(self._backend.pre_tokenizer):
            spaces = tuple(BYTE_LEVEL_SPACES)
            inside = [id for name, id in self._vocabulary.items() if not name.startswith(spaces)]
        else:
            inside = []
        starts[inside] = False
        starts[list(self.added_ids)] = True
        return starts

    @classmethod
    def load(cls, path: str | Path, *, eod: str | int | None = None) -> "Tokenizer":
        """Read a tokenizer.json, GPT-2's vocab.json and merges.txt or BERT's vocab.txt, or a folder of them.

        `eod` names its end-of-document token, or is the id that a receipt or checkpoint records; None, or an
        id that it lacks, means that of the model folder that it is in (`eod_of_model`), else the first it has
        of EOD_NAMES. Raises UserError if there is none, CorruptFileError if it cannot be read.
        """
        file = Path(path)
        if file.is_dir():
            file = next((file / name for name in FILES if (file / name).is_file()), file / "tokenizer.json")
        if file.name in ("vocab.json", "merges.txt"):
            made = read_gpt2(file.parent)
            return cls(made, str(file.parent), eod_of_model(file.parent, made) if eod is None else eod)
        if file.suffix == ".txt" and file.is_file():
            return cls(read_bert(file), str(file), eod)
        if not file.is_file() and os.path.lexists(file):
            raise UserError(
                f"{file}: is {file_type_name(file)}, no regular file; put a tokenizer.json in its place"
            )
        if not file.is_file():
            raise UserError(
                f"no tokenizer at {file}: set tokenizer to a tokenizer.json; `mlm data tokenizer` trains one"
            )
        check_size(file)
        content = read_input_text(file)
        return cls(content, str(file), eod_of_model(file.parent, content) if eod is None else eod)

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json, byte for byte what was loaded or trained. Raises OSError."""
        write_atomic(Path(path), self.content)

    @property
    def content(self) -> bytes:
        """The bytes of its tokenizer.json."""
        return self._content.encode()

    def content_ending_texts(self) -> bytes:
        """Return a tokenizer.json that ends each text with `eod_id`, for programs that add such tokens."""
        backend, eod = parse(self._content, "tokenizer"), str(self._backend.id_to_token(self.eod_id))
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {eod}", pair=f"$A {eod} $B {eod}", special_tokens=[(eod, self.eod_id)]
        )
        return str(backend.to_str()).encode()

    def encode(self, text: str) -> list[int]:
        """Encode a text; nothing is added at its ends."""
        return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def encode_special(self, text: str) -> list[int]:
        """Encode a text in which the names of special tokens are these tokens."""
        return list(self._with_special.encode(text, add_special_tokens=False).ids)

    def encode_marked(self, texts: Sequence[str]) -> list[Placed]:
        """Encode texts in which the names of special tokens are these tokens; see `encode_with_offsets`."""
        return placed(self._with_special, texts)

    def encode_private(self, texts: Sequence[str]) -> list[Placed]:
        """Encode texts in which names of special tokens are text; see `encode_with_offsets`.

        The special token with the n-th name of `special_names` is chr(PRIVATE + n), as often as its name has
        letters.
        """
        return placed(self._with_private, texts)

    def encode_batch(self, texts: Sequence[str]) -> "list[array[int]]":
        """Encode many texts, on all cores: a uint32 array each."""
        encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encodings]  # a list of all lists would take longer

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Placed]:
        """Encode many texts: token ids [n], and begin and end [n, 2] of each in letters of the text."""
        return placed(self._encoder, texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids, special tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


def byte_level(model: models.Model, *, prefix_space: bool = False) -> Backend:
    """Wrap a BPE model in GPT-2's pipeline: no normaliser, byte-level splitting.

    `prefix_space`: a space is added before a text, as `add_prefix_space` of transformers does.
    """
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def read_gpt2(folder: Path) -> str:
    """Make a tokenizer.json from GPT-2's vocab.json and merges.txt."""
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocabulary.is_file() and merges.is_file()):
        raise UserError(
            f"no tokenizer in {folder}: set tokenizer to a folder with tokenizer.json, with vocab.json and "
            f"merges.txt, or with vocab.txt"
        )
    for file in (vocabulary, merges):
        check_size(file)
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except BaseException as error:
        raise damaged(f"{vocabulary} or {merges.name}", error) from error
    config = read_config(folder / "tokenizer_config.json")
    backend = byte_level(model, prefix_space=config.get("add_prefix_space") is True)
    named = named_tokens(folder) or {}
    ids = backend.get_vocab()
    special = sorted({EOD, *named.values()} & ids.keys(), key=lambda name: ids[name])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    add_tokens(backend, folder)
    return backend.to_str()


def add_tokens(backend: Backend, folder: Path) -> None:
    """Add the tokens of added_tokens.json, {name: id}, and of added_tokens_decoder of tokenizer_config.json.

    Each is special and normalized as the latter says. Without it, those that a file or the class of the
    tokenizer names are special, as in `transformers`: the others are found in texts. Raises CorruptFileError
    where ids do not follow those of the vocabulary.
    """
    path, named = folder / ADDED, set((named_tokens(folder) or {}).values())
    decoder = read_config(folder / SETTINGS).get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, dict) else ()
    known = {str(each["content"]): (id, each) for id, each in entries if isinstance(each, dict)}
    ids = {name: int(id) if id.isdigit() else id for name, (id, _) in known.items()} | read_config(path)
    for name, id in sorted(ids.items(), key=lambda item: str(item[1]).zfill(12)):
        flags = {"special": name in named, "normalized": name not in named}
        said = known[name][1] if name in known else {}
        flags |= {flag: said[flag] for flag in ADDED_FLAGS if isinstance(said.get(flag), bool)}
        token = AddedToken(name, **flags)
        (backend.add_special_tokens if flags["special"] else backend.add_tokens)([token])
        if backend.token_to_id(name) != id:
            raise CorruptFileError(
                f"{path}: {name[:40]!r} has id {str(id)[:20]}, {backend.token_to_id(name)} comes next in the "
                "vocabulary; save the tokenizer as tokenizer.json"
            )


def word_piece(
    model: models.WordPiece,
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    chinese_chars: bool = True,
) -> Backend:
    """Wrap a WordPiece model in BERT's pipeline, with the special tokens that the vocabulary has.

    `strip_accents` None means as `lowercase`; `chinese_chars`: each of them is a word.
    """
    backend = Backend(model)
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese_chars
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=CONTINUES)
    present = [name for name in BERT_SPECIAL if backend.token_to_id(name) is not None]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in present])
    sep_id, cls_id = backend.token_to_id(SEP), backend.token_to_id(CLS)
    if sep_id is not None and cls_id is not None:
        backend.post_processor = processors.BertProcessing((SEP, sep_id), (CLS, cls_id))
    return backend


def read_bert(file: Path) -> str:
    """Make a tokenizer.json from BERT's vocab.txt: one token a line, its id the line's number.

    A tokenizer_config.json beside it decides if case is lowered and if Chinese characters are words; without
    one, case is lowered if the vocabulary has no upper-case letters. Raises UserError and
    CorruptFileError.
    """
    check_size(file)
    try:
        names = file.read_text(encoding="utf-8").split("\n")
        model = models.WordPiece.from_file(str(file), unk_token=UNK, max_input_chars_per_word=LONGEST_WORD)
    except BaseException as error:
        raise damaged(str(file), error) from error
    if model.token_to_id(UNK) is None or model.token_to_id(SEP) is None:
        raise UserError(f"{file} is not a vocabulary of BERT: it has no lines {UNK} and {SEP}; name another")
    config = read_config(file.with_name("tokenizer_config.json"))
    cased = any(name != name.lower() for name in names if not name.startswith("["))
    lowercase, strip = config.get("do_lower_case"), config.get("strip_accents")
    backend = word_piece(
        model,
        lowercase=lowercase if isinstance(lowercase, bool) else not cased,
        strip_accents=strip if isinstance(strip, bool) else None,
        chinese_chars=config.get("tokenize_chinese_chars") is not False,
    )
    add_tokens(backend, file.parent)
    return backend.to_str()


def eod_of_model(folder: Path, content: str) -> int | None:
    """Return the end-of-document token of a model folder; None if it names none of the special tokens.

    It is the first eos_token_id of config.json, else of generation_config.json, else eos_token of
    tokenizer_config.json; none in a folder without config.json, which is no model's.
    """
    if not (folder / CONFIG).is_file():
        return None
    special = special_tokens(content)
    for name in (CONFIG, GENERATION_CONFIG):
        found = [
            id for id in ids_of(read_config(folder / name).get("eos_token_id")) if id in special.values()
        ]
        if found:
            return found[0]
    return special.get((named_tokens(folder) or {}).get("eos_token", ""))


def special_tokens(content: str) -> dict[str, int]:
    """Return the ids of the special tokens of a tokenizer.json by name; {} if it is none."""
    try:
        added = json.loads(content)["added_tokens"]
        return {each["content"]: each["id"] for each in added if each["special"] is True}
    except (ValueError, RecursionError, KeyError, TypeError):  # reported where it is read
        return {}


def ids_of(value: Any) -> list[int]:
    """Return the token ids of a model's setting: one, a list, or none."""
    items = value if isinstance(value, list) else [value]
    return [id for id in items if type(id) is int and id >= 0]


def can_spell(content: dict[str, Any], name: str) -> bool:
    """True if a text that contains the name of a special token could become that token."""
    model, added = content["model"], content.get("added_tokens") or ()
    if any(token["content"] == name and not token["special"] for token in added):
        return True
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):  # a Unigram's: [[piece, score], …]
        return any(piece == name for piece, _ in vocabulary)
    if model.get("type", "BPE") != "BPE" or "merges" not in model or model.get("ignore_merges"):
        return name in vocabulary
    return any("".join(pair) == name for pair in merges_of(model))


def placed(backend: Backend, texts: Sequence[str]) -> list[Placed]:
    """Encode texts: ids [n], and the letters [n, 2] of each token."""
    encodings = backend.encode_batch(list(texts), add_special_tokens=False)
    return [
        (np.array(e.ids, dtype=np.int32), np.array(e.offsets, dtype=np.int32).reshape(-1, 2))
        for e in encodings
    ]


def with_names(content: dict[str, Any], secret: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer.json in which these tokens keep their ids and have other names."""
    names = secret.keys()
    model = dict(content["model"])
    if isinstance(model.get("vocab"), list):
        model["vocab"] = [[secret.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {secret.get(name, name): id for name, id in model["vocab"].items()}
    if "merges" in model:
        model["merges"] = [pair for pair in merges_of(model) if not names & {*pair, "".join(pair)}]
    added = [
        {**token, "content": secret[token["content"]], "special": True, "normalized": False}
        if token["content"] in names
        else token
        for token in content.get("added_tokens") or ()
    ]
    return {**content, "model": model, "added_tokens": added, "post_processor": None}


def merges_of(model: dict[str, Any]) -> list[list[str]]:
    """Return the merges of a BPE model as pairs; files have them as "a b" too."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]


def first_of(names: Sequence[str], vocabulary: dict[str, int]) -> int | None:
    """Return the id of the first of these tokens that exists."""
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def parse(content: str, source: str) -> Backend:
    """Load the library's tokenizer without truncation, padding or special tokens. Raises CorruptFileError."""
    try:
        backend = Backend.from_str(content)
    except BaseException as error:
        raise damaged(source, error) from error
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    if getattr(backend.model, "dropout", None):
        backend.model.dropout = None  # a text has the same tokens each time
    return backend


def damaged(source: str, error: BaseException) -> CorruptFileError:
    """Describe a tokenizer file that the library rejects.

    It raises bare Exception, and PanicException, which is not one, when its Rust code panics. Interrupts pass
    through.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CorruptFileError(f"{source} is not a tokenizer ({reason}): replace it, or train one")
