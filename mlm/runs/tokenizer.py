"""The tokenizer of a run, which must not change during training."""

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
    """Return the tokenizer of a run spec or its corpora, with the corpora's special tokens; None without one.

    Raises UserError, CorruptFileError.
    """
    path, (eod, bos) = tokenizer_path(data), recorded_special(data)
    return None if path is None else Tokenizer.load(path, eod=eod, bos=bos)


def tokenizer_now(data: DataConfig) -> TokenizerDigest | None:
    """Return the tokenizer digests of a run spec's corpora; None if unknown, or for synthetic data.

    Raises UserError, CorruptFileError.
    """
    tokenizer = tokenizer_of(data)
    if tokenizer is not None:
        return digests_of_tokenizer(tokenizer)
    digests = (source_facts(corpus)["tokenizer"] for corpus in corpora(data))
    return next((TokenizerDigest(digest) for digest in digests if digest), None)


def tokenizer_errors(data: DataConfig, trained: TokenizerDigest | None, weights: str, fix: str) -> list[str]:
    """Return an error unless `weights`, trained on tokens of `trained`, fit the tokens of a run's corpora."""
    named = f"data.tokenizer={tokenizer_path(data) or 'of the receipt'}"
    problem = other_tokenizer(named, tokenizer_now(data), weights, trained, fix)
    return [] if problem is None else [problem]


def other_tokenizer(
    tokens: str, corpus: TokenizerDigest | None, weights: str, trained: TokenizerDigest | None, fix: str
) -> str | None:
    """Problem of weights of the tokenizer `trained` that would read tokens of `corpus`; None if they fit.

    A tokenizer that nothing records fits.
    """
    if corpus is None or trained is None or corpus.is_same(trained):
        return None
    return f"{tokens}: tokens of {corpus.digest}, and {weights} was trained with {trained.digest}; {fix}"


def corpus_tokenizer_errors(data: DataConfig) -> list[str]:
    """Return an error for each corpus built with another tokenizer than the run spec's."""
    try:
        path, tokenizer = tokenizer_path(data), tokenizer_of(data)
    except UserError as error:
        return list(error.problems)
    if path is None or tokenizer is None:
        return []
    digests, problems = digests_of_tokenizer(tokenizer), list[str]()
    for folder in (corpus.train.parent for corpus in corpora(data)):
        recorded = receipt_tokenizer(folder)
        if recorded is not None and not digests.is_same(recorded):
            problems.append(
                f"data.tokenizer={path}: has digest {digests.digest}, {folder} was written with "
                f"{recorded.digest}; name that tokenizer, or another corpus"
            )
    return problems


def receipt_tokenizer(folder: Path) -> TokenizerDigest | None:
    """Return the tokenizer digest in a corpus's receipt, with its vocabulary if tokenizer.json is there too.

    Raises CorruptFileError.
    """
    digest = known_digest((read_receipt(folder) or {}).get("tokenizer"))
    if not digest:
        return None
    try:
        loaded = tokenizer_beside(folder)
    except (UserError, OSError):
        loaded = None
    return digests_of_tokenizer(loaded) if loaded and loaded.digest == digest else TokenizerDigest(digest)


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
