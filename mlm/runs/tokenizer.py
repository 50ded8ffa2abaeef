"""The tokenizer of a run, which may not change between its steps."""

from pathlib import Path

from mlm.checkpoint.native.run_state import TokenizerDigest
from mlm.data.blend_history import known_digest
from mlm.data.config import DataConfig
from mlm.data.corpus_files import tokenizer_beside
from mlm.data.receipt import read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import ModelConfig
from mlm.runs.corpora import corpora, recorded_special, source_facts, tokenizer_path
from mlm.util.errors import UserError


def digests_of_tokenizer(tokenizer: Tokenizer) -> TokenizerDigest:
    return TokenizerDigest(tokenizer.digest, tokenizer.vocabulary_digest, tokenizer.eod_id, tokenizer.bos_id)


def tokenizer_of(data: DataConfig) -> Tokenizer | None:
    """Return the tokenizer of a run spec or next to its corpora; None without one.

    It has the special tokens that the corpora were built with. Raises UserError, CorruptFileError.
    """
    path, (eod, bos) = tokenizer_path(data), recorded_special(data)
    return None if path is None else Tokenizer.load(path, eod=eod, bos=bos)


def tokenizer_now(data: DataConfig) -> TokenizerDigest | None:
    """Return the digests of the tokenizer of a run spec's corpora; None if unknown or for synthetic data.

    Raises UserError, CorruptFileError.
    """
    tokenizer = tokenizer_of(data)
    if tokenizer is not None:
        return digests_of_tokenizer(tokenizer)
    written = (source_facts(corpus)["tokenizer"] for corpus in corpora(data))
    return next((TokenizerDigest(digest) for digest in written if digest), None)


def tokenizer_errors(data: DataConfig, then: TokenizerDigest | None, what: str, fix: str) -> list[str]:
    """Return an error if weights of `what`, trained on tokens of `then`, would train on a run's corpora."""
    named = f"data.tokenizer={tokenizer_path(data) or 'of the receipt'}"
    problem = other_tokenizer(named, tokenizer_now(data), what, then, fix)
    return [] if problem is None else [problem]


def other_tokenizer(
    tokens: str, now: TokenizerDigest | None, weights: str, then: TokenizerDigest | None, fix: str
) -> str | None:
    """Problem of `weights` of the tokenizer `then` that would read tokens of `now`; None where they fit.

    Every command that joins weights and tokens asks it; a tokenizer that nothing records fits.
    """
    if now is None or then is None or now.is_same(then):
        return None
    return f"{tokens}: tokens of {now.digest}, and {weights} was trained with {then.digest}; {fix}"


def corpus_tokenizer_errors(data: DataConfig) -> list[str]:
    """Return an error for each corpus of another tokenizer than the one saved with the run."""
    try:
        path, tokenizer = tokenizer_path(data), tokenizer_of(data)
    except UserError as error:
        return list(error.problems)
    if path is None or tokenizer is None:
        return []
    own, problems = digests_of_tokenizer(tokenizer), list[str]()
    for folder in (corpus.train.parent for corpus in corpora(data)):
        written = receipt_tokenizer(folder)
        if written is not None and not own.is_same(written):
            problems.append(
                f"data.tokenizer={path}: has digest {own.digest}, {folder} was written with "
                f"{written.digest}; name that tokenizer, or another corpus"
            )
    return problems


def receipt_tokenizer(folder: Path) -> TokenizerDigest | None:
    """Return the tokenizer by the receipt of a corpus folder, with its vocabulary if the file is there too.

    Raises CorruptFileError.
    """
    digest = known_digest((read_receipt(folder) or {}).get("tokenizer"))
    if not digest:
        return None
    try:
        beside = tokenizer_beside(folder)
    except (UserError, OSError):
        beside = None
    return digests_of_tokenizer(beside) if beside and beside.digest == digest else TokenizerDigest(digest)


def vocabulary_problem(
    named: str | None, tokenizer: Tokenizer, model: ModelConfig, key: str = "tokenizer"
) -> str | None:
    """Problem of a tokenizer (`key`=`named`) with more tokens than the vocabulary; None if it fits."""
    if tokenizer.vocab_size <= model.vocab_size:
        return None
    return (
        f"{key}={named or 'null'} has {tokenizer.vocab_size} tokens, the model model.vocab_size="
        f"{model.vocab_size}: give the {key}= the model was trained with"
    )
