"""Text to token ids and back, with the library `tokenizers`: byte-level BPE as GPT-2's, WordPiece as BERT's.

mlm/corpus/train_tokenizer.py trains tokenizers.
"""

import json
import os
import re
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from mlm.data.encoding_cache import EncodingCache, is_cacheable
from mlm.data.tokenizer_settings import EOD, ROBERTA, TokenizerDeclarations, check_size, ids_of
from mlm.data.vocabulary_files import BOS, CLS, CONTINUES, MASK, PAD, SEP, UNK, damaged, read_bert, read_gpt2
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import digest_bytes, read_input_text, write_atomic
from mlm.util.ownership import file_type_name

if TYPE_CHECKING:
    from mlm.data.chat_template import ChatTemplate

EOD_NAMES = (EOD, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", SEP)
"""Names of the end of document if none is declared: the first that is a special token counts, or any token if
none is special. BERT's vocabulary has only [SEP]; Megatron-LM adds an [EOS]."""
FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
"""Files of a tokenizer, of which a folder has at least one."""
PRIVATE = 0x100000
"""Letter of the first special token for special="private", in the second plane for private use."""
MAX_TOKENS = 1 << 24  # of a vocabulary: tables have a row for each
TokensWithOffsets = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Token ids [n], and begin and end [n, 2] of each in letters of the text."""


class Tokenizer:
    """Text to token ids and back.

    Names of special tokens in a text are encoded as text, by every type of model.

    Attributes:
        vocab_size                        one more than the largest id
        eod_id                            end of document
        bos_id                            beginning of a sequence, or None
        cls_id, sep_id, mask_id, pad_id   BERT's special tokens, None where the vocabulary has none
        end_ids                           tokens that end what a model generates, `eod_id` among them
        digest                            of tokenizer.json
        declared                          declarations of the files next to it
        chat_template                     of a model for conversations, if a command has read it

    `eod` and `bos` are recorded by a receipt or a checkpoint, and take precedence over declarations. Raises
    UserError without an end-of-document token.
    """

    def __init__(
        self,
        content: str,
        source: str = "tokenizer",
        eod: str | int | None = None,
        bos: int | None = None,
        declared: TokenizerDeclarations | None = None,
    ) -> None:
        self._content, self.declared = content, declared or TokenizerDeclarations()
        self._backend = parse(content, source)
        self._vocabulary = vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MAX_TOKENS:
            raise CorruptFileError(f"{source}: token id {self.vocab_size - 1}; {MAX_TOKENS - 1} is the limit")
        self.eod_id = self._find_eod(eod, source)
        self.cls_id, self.sep_id = (
            self._token_of_role("cls_token", CLS),
            self._token_of_role("sep_token", SEP),
        )
        self.mask_id, self.pad_id = (
            self._token_of_role("mask_token", MASK),
            self._token_of_role("pad_token", PAD),
        )
        self.bos_id = bos if self._is_token(bos) else self._token_of_role("bos_token", BOS)
        if self.bos_id is None:  # the token that the tokenizer puts before a text
            declared_ids = ids_of(self.declared.generation.get("bos_token_id"))
            usable = self.special_ids - {self.cls_id}
            self.bos_id = next((id for id in (*declared_ids, *self.opening) if id in usable), None)
        ends = ids_of(self.declared.generation.get("eos_token_id"))
        self.end_ids = frozenset({self.eod_id, *(id for id in ends if id < self.vocab_size)})
        self.digest = digest_bytes(content.encode())
        self.chat_template: ChatTemplate | None = None

    def _find_eod(self, eod: str | int | None, source: str) -> int:
        """Return `eod`, else the model's end of text, else the first special token of EOD_NAMES."""
        if isinstance(eod, str):
            if eod not in self._vocabulary:
                raise UserError(f"eod={eod} is not a token of {source}; name one of its vocabulary")
            return self._vocabulary[eod]
        if eod is not None and self._is_token(eod):
            return eod
        special = self.special_names
        model_ends = [self.name_of(id) for id in self.declared.model_ends if id in self.special_ids]
        declared = [self.declared.names.get("eos_token", "")]  # of a chat's tokenizer alone the end of a turn
        for name in (*model_ends, *(declared if self.declared.is_model else ()), *EOD_NAMES, *declared):
            if name in (special or self._vocabulary):
                return self._vocabulary[name]
        similar = [name for name in special if re.search("end|eos|eot|/s|sep", name, re.IGNORECASE)]
        fix = " or ".join(f"eod={name}" for name in (similar or special)[:3])
        raise UserError(
            f"{source} has no end-of-document token: set {fix or 'eod=NAME of one of its tokens'}, "
            f"or add one of {', '.join(EOD_NAMES)} to its special tokens"
        )

    def _is_token(self, id: int | None) -> bool:
        return id is not None and 0 <= id < self.vocab_size and self._backend.id_to_token(id) is not None

    def _token_of_role(self, role: str, default: str) -> int | None:
        """Return the token declared for a role, else BERT's or RoBERTa's if it is special.

        If no token is marked as special, its name is enough.
        """
        if name := self.declared.names.get(role):
            return self._vocabulary.get(name)
        names = self.special_names or self._vocabulary
        if ROBERTA["mask_token"] in names:
            default = ROBERTA[role]
        return self._vocabulary.get(default) if default in names else None

    @cached_property
    def opening(self) -> list[int]:
        """Tokens that the tokenizer puts before a text, as `transformers` does by default."""
        plain, full = (self._backend.encode("a", add_special_tokens=add).ids for add in (False, True))
        starts = (n for n in range(len(full)) if full[n : n + len(plain)] == plain)
        return list(full[: next(starts, 0)])

    @cached_property
    def pair_separators(self) -> int:
        """Number of [SEP] between the texts of a pair: 2 for RoBERTa, else 1."""
        pair = self._backend.encode("a", "a", add_special_tokens=True).ids
        return max(1, sum(id == self.sep_id for id in pair[1:-1]))

    def encode_prompt(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Encode a text to continue, after `opening`; an empty one becomes an end of document.

        With `special_tokens` names of special tokens in the text are these tokens, and the opening is not
        repeated.
        """
        ids = self.encode_special(text) if special_tokens else self.encode(text)
        opening = [] if ids[: len(self.opening)] == self.opening else self.opening
        return [*opening, *ids] or [self.eod_id]

    @cached_property
    def _encoder(self) -> Backend:
        """The library's tokenizer with special tokens under names that no text contains.

        encode_special_tokens of the library still finds special tokens that are not marked as such, or are
        pieces of a Unigram, WordPiece or word vocabulary.
        """
        content = json.loads(self._content)
        special = {token["content"] for token in content.get("added_tokens") or () if token["special"]}
        roles = (self.eod_id, self.bos_id, self.cls_id, self.sep_id, self.mask_id, self.pad_id)
        role_names = {self.name_of(id) for id in roles if id is not None}
        reserved = (special | role_names) - {UNK, content["model"].get("unk_token")}
        if not any(can_spell(content, name) for name in reserved):
            return self._backend
        secret = {name: f"{secrets.token_hex(16)}{n}" for n, name in enumerate(sorted(reserved))}
        return parse(json.dumps(with_names(content, secret)), "tokenizer")

    @cached_property
    def _with_special(self) -> Backend:
        """The library's tokenizer that finds special tokens in a text; offsets include spaces."""
        backend = parse(json.dumps(json.loads(self._content) | {"post_processor": None}), "tokenizer")
        backend.encode_special_tokens = False
        return backend

    @cached_property
    def _with_private(self) -> Backend:
        private = {name: chr(PRIVATE + n) * len(name) for n, name in enumerate(self.special_names)}
        backend = parse(json.dumps(with_names(json.loads(self._content), private)), "tokenizer")
        backend.encode_special_tokens = False
        return backend

    @cached_property
    def special_names(self) -> tuple[str, ...]:
        added = self._backend.get_added_tokens_decoder().values()
        return tuple(sorted({token.content for token in added if token.special}))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    def name_of(self, id: int) -> str:
        return str(self._backend.id_to_token(id))

    def id_of(self, name: str) -> int:
        return self._vocabulary[name]

    @cached_property
    def adds_bos(self) -> bool:
        """True if the tokenizer puts `bos_id` before a text."""
        return self.opening[:1] == [self.bos_id]

    def __contains__(self, name: str) -> bool:
        return name in self._vocabulary

    @property
    def prefix_id(self) -> int:
        """First token of a text without context: beginning of a sequence, else end of a document."""
        return self.eod_id if self.bos_id is None else self.bos_id

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of added tokens, special or not, which are matched before the text is split."""
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def vocabulary_digest(self) -> str:
        """Digest of all tokens with their ids, and of the merges.

        It is equal for a tokenizer.json and the vocab.json and merges.txt that it was made from, and for both
        spellings of merges in JSON.
        """
        pairs = merges_of(json.loads(self._content).get("model", {}))
        return digest_bytes(json.dumps([sorted(self._vocabulary.items()), pairs]).encode())

    @cached_property
    def is_word_start(self) -> NDArray[np.bool_]:
        """Mask of tokens that begin a word: bool [vocab_size].

        WordPiece: tokens without ##. Byte-level BPE: tokens that begin with white space. Special tokens, and
        all tokens of other models, begin a word.
        """
        model = self._backend.model
        starts = np.ones(self.vocab_size, dtype=bool)
        if isinstance(model, models.WordPiece):
            inside = [id for name, id in self._vocabulary.items() if name.startswith(CONTINUES)]
        elif "ByteLevel" in str(self._backend.pre_tokenizer):
            spaces = tuple("ĠĊĉčċČ")  # letters for space, \n, \t, \r, \v and \f
            inside = [id for name, id in self._vocabulary.items() if not name.startswith(spaces)]
        else:
            inside = []
        starts[inside] = False
        starts[list(self.added_ids)] = True
        return starts

    @classmethod
    def load(cls, path: str | Path, *, eod: str | int | None = None, bos: int | None = None) -> "Tokenizer":
        """Read a tokenizer.json, GPT-2's vocab.json and merges.txt or BERT's vocab.txt, or a folder of them.

        `eod` is the name of the end-of-document token, or the id that a receipt or checkpoint records, like
        `bos`; None or an unknown id means the model folder's, else the first special token of EOD_NAMES.
        Raises UserError without an end of document, CorruptFileError if the file cannot be read.
        """
        file = Path(path)
        if file.is_dir():
            file = next((file / name for name in FILES if (file / name).is_file()), file / "tokenizer.json")
        if not file.is_file() and os.path.lexists(file):
            raise UserError(
                f"{file}: is {file_type_name(file)}, no regular file; put a tokenizer.json in its place"
            )
        if file.name in ("vocab.json", "merges.txt"):
            content, source = read_gpt2(file.parent), str(file.parent)
        elif not file.is_file():
            raise UserError(
                f"no tokenizer at {file}: set tokenizer to a tokenizer.json; `mlm data tokenizer` trains one"
            )
        elif file.suffix == ".txt":
            content, source = read_bert(file), str(file)
        else:
            check_size(file)
            content, source = read_input_text(file), str(file)
        return cls(content, source, eod, bos, TokenizerDeclarations.read(file.parent))

    def save(self, folder: Path) -> None:
        """Write tokenizer.json byte for byte, declarations, and the chat template. Raises OSError."""
        write_atomic(folder / "tokenizer.json", self.content)
        template = {} if self.chat_template is None else self.chat_template.settings
        self.declared.save(folder, {**self.settings, **template})
        if self.chat_template is not None:
            self.chat_template.save_sources(folder)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of tokenizer_config.json, and the special tokens of its class in the vocabulary.

        `transformers` would add missing ones, beyond the rows of the model's token table.
        """
        in_vocabulary = {role: name for role, name in self.declared.names.items() if name in self}
        return {**in_vocabulary, **self.declared.settings}

    @property
    def content(self) -> bytes:
        return self._content.encode()

    def content_ending_texts(self) -> bytes:
        """Return a tokenizer.json that ends each text with `eod_id`, for programs that add special tokens."""
        backend, eod = parse(self._content, "tokenizer"), str(self._backend.id_to_token(self.eod_id))
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {eod}", pair=f"$A {eod} $B {eod}", special_tokens=[(eod, self.eod_id)]
        )
        return str(backend.to_str()).encode()

    def encode(self, text: str) -> list[int]:
        """Encode a text; nothing is added at its ends."""
        return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def encode_special(self, text: str) -> list[int]:
        """Encode a text; names of special tokens in it are these tokens."""
        return list(self._with_special.encode(text, add_special_tokens=False).ids)

    @cached_property
    def encode_batch(self) -> "Callable[[Sequence[str]], list[array[int]]]":
        """Encode many texts as `encode` does: a uint32 array each."""

        def encode(texts: Sequence[str]) -> "list[array[int]]":
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
            return [array("I", encoding.ids) for encoding in encodings]  # faster than a list of lists

        is_known = is_cacheable(json.loads(self._encoder.to_str()))
        return EncodingCache(encode).encode_batch if is_known else encode

    def encode_with_offsets(
        self, texts: Sequence[str], special: Literal["text", "tokens", "private"] = "text"
    ) -> list[TokensWithOffsets]:
        """Encode many texts: token ids [n], and begin and end [n, 2] of each in letters of the text.

        Names of special tokens are text, or with special="tokens" these tokens. With "private" they are text,
        and the token with the n-th name of `special_names` is chr(PRIVATE + n), repeated to the length of the
        name.
        """
        if special == "text":
            backend = self._encoder
        else:
            backend = self._with_special if special == "tokens" else self._with_private
        encodings = backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(e.ids, dtype=np.int32), np.array(e.offsets, dtype=np.int32).reshape(-1, 2))
            for e in encodings
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids, special tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


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


def with_names(content: dict[str, Any], secret: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer.json in which these tokens keep their ids under other names."""
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
    """Return the merges of a BPE model as pairs; files may spell them "a b"."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]


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
        backend.model.dropout = None  # encode deterministically
    return backend
