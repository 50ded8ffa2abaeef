"""`mlm data tokenizer`, `mlm data inspect` and `mlm data verify`; corpus/build.py has `mlm data build`."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from mlm.cli.data.settings import DataInspectConfig, DataTokenizerConfig, DataVerifyConfig
from mlm.corpus.inspect import Facts, facts_of
from mlm.corpus.read.finding import kind_of
from mlm.corpus.train_tokenizer import texts_of, train_bpe, train_wordpiece
from mlm.corpus.verify import verify_corpus
from mlm.data.corpus_files import corpora_at, eod_of, tokenizer_beside
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import read_receipt
from mlm.data.tokenizer import FILES, Tokenizer
from mlm.util.errors import CheckFailedError, Problem, UserError
from mlm.util.results import is_stream, result_problems, target_name, write_result
from mlm.util.terminal import add_row, console, format_bytes, one_line, table


def run_tokenizer(config: DataTokenizerConfig) -> Path:
    """Write tokenizer.json; return its path.

    Raises UserError: no text, bad input, or another tokenizer at `out`.
    """
    path = tokenizer_path(config.out)
    if problems := preflight_tokenizer(config):
        raise UserError(problems[0])
    if is_tokenizer(config.input):
        tokenizer = Tokenizer.load(config.input, eod=config.eod)
    elif config.kind == "wordpiece":
        texts = texts_of(config.input, config.text_key)
        tokenizer = train_wordpiece(texts, config.vocab_size, lowercase=config.lowercase)
    else:
        tokenizer = train_bpe(texts_of(config.input, config.text_key)(), config.vocab_size)
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
    console().print(f"{path}: {tokenizer.vocab_size} tokens, {tokenizer.digest}")
    return path


def tokenizer_path(out: str) -> Path:
    """Return the file that `out` means: itself, or tokenizer.json in it."""
    return Path(out) if out.endswith(".json") or is_stream(out) else Path(out) / "tokenizer.json"


def preflight_tokenizer(config: DataTokenizerConfig) -> list[str]:
    """Return the problem of a file at `out` that is not a tokenizer; called before the input is read."""
    path = tokenizer_path(config.out)
    if Path(config.out).suffix in (".txt", ".model") and not Path(config.out).is_dir():
        problem = "would be a folder of that name: a tokenizer is one tokenizer.json, its settings included"
        return [
            Problem.at("out", config.out, problem, f"use out={Path(config.out).with_name('tokenizer.json')}")
        ]
    if path.is_file() and not is_stream(path):
        if digest_at(path, config.eod) is not None:
            return []
        return [f"out={path}: exists and is not a tokenizer; name another file, or delete it"]
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


def run_inspect(config: DataInspectConfig) -> None:
    """Print tables, write out. Raises UserError, CorruptFileError for a damaged pair."""
    folder, prefixes = corpora_at(config.path)
    if config.document is not None or config.token is not None:
        run_document(config, folder, prefixes[0])
        return
    receipt = read_receipt(folder)
    tokenizer, note = tokenizer_for(config, folder)
    eod_id = eod_of(receipt, tokenizer)
    corpora = [facts_of(prefix, tokenizer, eod_id, config.samples) for prefix in prefixes]
    if config.out is not None:
        result = {"task": "data inspect", "path": config.path, "corpora": corpora, "receipt": receipt}
        write_result(config.out, result)
    show(config, corpora, note)


def run_document(config: DataInspectConfig, folder: Path, prefix: Path) -> None:
    """Show one document whole. Raises UserError."""
    corpus, (tokenizer, _) = IndexedDataset(prefix), tokenizer_for(config, folder)
    key, number = ("document", config.document) if config.token is None else ("token", config.token)
    assert number is not None
    count = corpus.num_documents if key == "document" else corpus.num_tokens
    if not 0 <= number < count:
        raise UserError(f"{key}={number}: {corpus.prefix} holds {count} {key}s; use 0 to {count - 1}")
    number = number if key == "document" else corpus.document_of(number)
    ids = [int(token) for token in corpus.document(number)]
    known = tokenizer is not None and all(0 <= token < tokenizer.vocab_size for token in ids)
    text = tokenizer.decode(ids) if tokenizer is not None and known else None
    if config.out is not None:
        facts = {"document": number, "tokens": len(ids), "ids": ids, "text": text}
        write_result(config.out, {"task": "data inspect", "path": str(prefix), **facts})
    out = console()
    out.print(f"{prefix} · document {number:,} · {len(ids):,} tokens")
    shown = text if text is not None else " ".join(map(str, ids))
    for line in shown.split("\n"):
        out.print(
            "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def tokenizer_for(config: DataInspectConfig, folder: Path) -> tuple[Tokenizer | None, str | None]:
    """Return the tokenizer for samples, and a note if there is none. Raises UserError for a named one."""
    if config.tokenizer is not None:
        return Tokenizer.load(config.tokenizer), None
    try:
        tokenizer = tokenizer_beside(folder)
    except UserError as error:
        return None, str(error)
    note = "no tokenizer.json beside the corpus: set tokenizer=… to read samples as text"
    return tokenizer, None if tokenizer else note


ROWS: dict[str, Callable[[Facts], str]] = {
    "tokens are": lambda facts: f"{facts['dtype']} (version {facts['version']})",
    "documents": lambda facts: f"{facts['documents']:,}",
    "sequences": lambda facts: f"{facts['sequences']:,}",
    "tokens": lambda facts: f"{facts['tokens']:,}",
    "shortest document": lambda facts: f"{facts['tokens_per_document']['min']:,}",
    "median document": lambda facts: f"{facts['tokens_per_document']['median']:,}",
    "mean document": lambda facts: f"{facts['tokens_per_document']['mean']:,.1f}",
    "longest document": lambda facts: f"{facts['tokens_per_document']['max']:,}",
    "size of .bin": lambda facts: format_bytes(facts["bytes"]),
    "end with eod": lambda facts: (
        "unknown"
        if facts["ends_with_eod"] is None
        else f"{facts['ends_with_eod']:.1%} of {facts['looked_at']:,}"
    ),
}


def show(config: DataInspectConfig, corpora: list[Facts], note: str | None) -> None:
    """Print the tables."""
    out, names = console(), [Path(facts["prefix"]).name for facts in corpora]
    header = table(f"data inspect · {config.path}", "", *(f"{name}#" for name in names))
    for name, cell in ROWS.items():
        add_row(header, name, *map(cell, corpora))
    out.print(header)
    samples = table("samples", "", "document#", "tokens#", "begins")
    for name, facts in zip(names, corpora, strict=True):
        for sample in facts["samples"]:
            begins = sample["text"] if sample["text"] is not None else " ".join(map(str, sample["ids"][:16]))
            add_row(samples, name, f"{sample['document']:,}", f"{sample['tokens']:,}", begins)
    if samples.row_count:
        out.print(samples)
        if note is not None:
            out.print(f"note: {one_line(note)}")
    if config.out is not None:
        out.print(f"written to {target_name(config.out)}")


def run_verify(config: DataVerifyConfig) -> None:
    """Read a whole corpus, print a table, write out. Raises CheckFailedError if a check fails."""
    folder, checks = verify_corpus(config.path, config.vocab_size)
    errors = [check for check in checks if check.state == "error"]
    if config.out is not None:
        facts = {"whole": not errors, "checks": [asdict(check) for check in checks]}
        write_result(config.out, {"task": "data verify", "path": config.path, **facts})
    made = table(f"data verify · {config.path}", "file", "check", "", "")
    for check in checks:
        add_row(made, check.file, check.name, check.state, check.detail)
    console().print(made)
    if config.out is not None:
        console().print(f"written to {target_name(config.out)}")
    if errors:
        more = f" (and {len(errors) - 1} more)" if errors[1:] else ""
        raise CheckFailedError(
            f"{folder / errors[0].file}: {errors[0].detail}{more}: restore it from a copy, or write it again"
        )
