"""The tokenizer of a run, which may not change between its steps."""

from collections.abc import Iterator
from pathlib import Path

from mlm.checkpoint.native.format import Manifest
from mlm.checkpoint.native.tokenizer_digest import TokenizerDigest, file_beside
from mlm.data.blend_history import known_digest
from mlm.data.config import DataConfig
from mlm.data.corpus_files import tokenizer_beside
from mlm.data.receipt import read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.training.corpora import Corpus, corpora, source_facts, tokenizer_path
from mlm.training.documents import recorded_eod
from mlm.util.errors import UserError


def digest_of(tokenizer: Tokenizer) -> TokenizerDigest:
    """Return a tokenizer's digests, as checkpoints save them."""
    return TokenizerDigest(tokenizer.digest, tokenizer.vocabulary_digest, tokenizer.eod_id)


def tokenizer_of(data: DataConfig) -> Tokenizer | None:
    """Return the tokenizer of a run spec or beside its corpora; None without one.

    It has the end-of-document token that the corpora were built with. Raises UserError, CorruptFileError.
    """
    path = tokenizer_path(data)
    return None if path is None else Tokenizer.load(path, eod=recorded_eod(data))


def tokenizer_now(data: DataConfig) -> TokenizerDigest | None:
    """Return the digests of the tokenizer of a run spec's corpora; None if unknown or for synthetic data.

    Raises UserError, CorruptFileError.
    """
    tokenizer = tokenizer_of(data)
    if tokenizer is not None:
        return digest_of(tokenizer)
    written = (source_facts(corpus)["tokenizer"] for corpus in corpora(data))
    return next((TokenizerDigest(digest) for digest in written if digest), None)


def tokenizer_then(path: Path, manifest: Manifest) -> TokenizerDigest | None:
    """Return the digests of the tokenizer that a checkpoint was trained with; None if unknown.

    For a checkpoint of an older version they are in its corpora's receipts, or in its run directory.
    """
    known = TokenizerDigest.of(manifest.state)
    if known is not None:
        return known
    for digest in _written_with(manifest):
        return TokenizerDigest(digest)
    file = file_beside(path)
    try:
        return digest_of(Tokenizer.load(file)) if file.is_file() else None
    except UserError:
        return None


def _written_with(manifest: Manifest) -> Iterator[str]:
    """Yield the tokenizer's digests in the receipts of a checkpoint's corpora."""
    try:
        for source in manifest.state["data"]["segments"][-1]["sources"]:
            if digest := known_digest(source["tokenizer"]):
                yield digest
    except (KeyError, TypeError, IndexError):
        return


def tokenizer_errors(data: DataConfig, path: Path, manifest: Manifest) -> list[str]:
    """Return an error if a run would resume from a checkpoint with corpora of another tokenizer."""
    now, then = tokenizer_now(data), tokenizer_then(path, manifest)
    if now is None or then is None or now.is_same(then):
        return []
    named = tokenizer_path(data) or "of the corpus's receipt"
    return [
        f"data.tokenizer={named}: has digest {now.digest}, the run in {path.parent.parent} was trained with "
        f"{then.digest}; use corpora of that tokenizer, or set another out=…"
    ]


def corpus_tokenizer_errors(data: DataConfig) -> list[str]:
    """Return an error for each corpus of another tokenizer than the one saved with the run."""
    try:
        path, tokenizer = tokenizer_path(data), tokenizer_of(data)
        if path is None or tokenizer is None:
            return []
        saved = digest_of(tokenizer)
        return [error for corpus in corpora(data) if (error := _unlike(corpus, saved, path))]
    except UserError as error:
        return list(error.problems)


def _unlike(corpus: Corpus, saved: TokenizerDigest, path: Path) -> str | None:
    digest = source_facts(corpus)["tokenizer"]
    if not digest or saved.is_same(written_with(corpus.train.parent, digest)):
        return None
    return (
        f"data.tokenizer={path}: has digest {saved.digest}, {corpus.train.parent} was written with {digest}; "
        "name that tokenizer, or another corpus"
    )


def written_with(folder: Path, digest: str) -> TokenizerDigest:
    """Return the digests of a corpus folder's tokenizer, that of its vocabulary only if the file is there."""
    try:
        beside = tokenizer_beside(folder)
    except (UserError, OSError):
        return TokenizerDigest(digest)
    return digest_of(beside) if beside and beside.digest == digest else TokenizerDigest(digest)


def receipt_tokenizer(prefix: Path) -> TokenizerDigest | None:
    """Return the tokenizer's digests from the receipt beside a .bin/.idx. Raises CorruptFileError."""
    digest = known_digest((read_receipt(prefix.parent) or {}).get("tokenizer"))
    return written_with(prefix.parent, digest) if digest else None
