"""Conversion of GPT-2's vocab.json and merges.txt and BERT's vocab.txt to tokenizer.json."""

from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mlm.data.tokenizer_settings import ADDED, EOD, SETTINGS, check_size, named_tokens, read_config
from mlm.util.errors import CorruptFileError, UserError

UNK, CLS, SEP, PAD, MASK = "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"
BERT_SPECIAL = (PAD, UNK, CLS, SEP, MASK)
BOS, EOS = "[BOS]", "[EOS]"
"""Special tokens that Megatron-LM adds to BERT's."""
CONTINUES = "##"
"""Prefix of a WordPiece token inside a word."""


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
    tokens = named_tokens(folder) or {}
    ids = backend.get_vocab()
    special = sorted({EOD, *tokens.values()} & ids.keys(), key=lambda name: ids[name])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    cls, sep = tokens.get("cls_token"), tokens.get("sep_token")
    if cls in ids and sep in ids:  # RoBERTa's
        backend.post_processor = processors.RobertaProcessing((sep, ids[sep]), (cls, ids[cls]))
    add_tokens(backend, folder)
    return backend.to_str()


def add_tokens(backend: Backend, folder: Path) -> None:
    """Add the tokens of added_tokens.json, {name: id}, and of added_tokens_decoder of tokenizer_config.json.

    The latter decides if a token is special and normalized. Without it, tokens that a file or the class of
    the tokenizer declares are special, as in `transformers`; others are found in texts. Raises
    CorruptFileError if ids do not continue the vocabulary's.
    """
    path, special_names = folder / ADDED, set((named_tokens(folder) or {}).values())
    decoder = read_config(folder / SETTINGS).get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, dict) else ()
    declared = {str(entry["content"]): (id, entry) for id, entry in entries if isinstance(entry, dict)}
    ids = {name: int(id) if id.isdigit() else id for name, (id, _) in declared.items()} | read_config(path)
    for name, id in sorted(ids.items(), key=lambda item: str(item[1]).zfill(12)):
        flags = {"special": name in special_names, "normalized": name not in special_names}
        entry = declared[name][1] if name in declared else {}
        for flag in ("special", "normalized", "lstrip", "rstrip", "single_word"):
            if isinstance(entry.get(flag), bool):
                flags[flag] = entry[flag]
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
    present = [name for name in (*BERT_SPECIAL, BOS, EOS) if backend.token_to_id(name) is not None]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in present])
    sep_id, cls_id = backend.token_to_id(SEP), backend.token_to_id(CLS)
    if sep_id is not None and cls_id is not None:
        backend.post_processor = processors.BertProcessing((SEP, sep_id), (CLS, cls_id))
    return backend


def read_bert(file: Path) -> str:
    """Make a tokenizer.json from BERT's vocab.txt: one token a line, its id the line's number.

    A tokenizer_config.json next to it decides on lower case and Chinese characters; without one, text is
    lowered if the vocabulary has no upper-case letters. Raises UserError and CorruptFileError.
    """
    check_size(file)
    try:
        names = file.read_text(encoding="utf-8").split("\n")
        # BERT encodes longer words as [UNK].
        model = models.WordPiece.from_file(str(file), unk_token=UNK, max_input_chars_per_word=100)
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


def damaged(source: str, error: BaseException) -> CorruptFileError:
    """Describe a tokenizer file that the library rejects.

    It raises bare Exception, and PanicException, a BaseException, if its Rust code panics. Interrupts pass.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CorruptFileError(f"{source} is not a tokenizer ({reason}): replace it, or train one")
