"""The targets of `mlm data …` but `mlm data build`, which is in corpus/build.py."""

from dataclasses import asdict
from pathlib import Path

from mlm.cli.data.settings import (
    DataInspectConfig,
    DataMergeConfig,
    DataSplitConfig,
    DataTokenizerConfig,
    DataVerifyConfig,
)
from mlm.corpus.inspect import Facts, facts_of
from mlm.corpus.read.finding import kind_of
from mlm.corpus.recombine import merge_corpora, split_corpus
from mlm.corpus.train_tokenizer import texts_of, train_bpe, train_wordpiece
from mlm.corpus.verify import verify_corpus
from mlm.data.corpus_files import corpora_at, eod_of, tokenizer_beside
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
    # Convert a file, or a folder of tokenizer files without text; learn from anything else.
    is_learned, source = True, Path(config.input) if isinstance(config.input, str) else None
    if source is not None and source.is_dir():
        other_files = (file for file in source.iterdir() if file.name not in {*FILES, "merges.txt"})
        is_learned = not any((source / name).is_file() for name in FILES) or any(map(kind_of, other_files))
    elif source is not None:
        name = source.name
        is_learned = not (source.suffix == ".json" or name == "merges.txt" or name.endswith("vocab.txt"))
    if not is_learned:
        tokenizer = Tokenizer.load(str(config.input), eod=config.eod)
    else:
        texts = texts_of(config.input, config.text_key, config.encoding)
        if config.kind == "wordpiece":
            tokenizer = train_wordpiece(texts, config.vocab_size, lowercase=config.lowercase)
        else:
            tokenizer = train_bpe(texts(), config.vocab_size)
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
    if not path.is_file():  # an existing file has the same digest
        write_result(path, tokenizer.content)
    console().print(f"{path}: {tokenizer.vocab_size} tokens, {tokenizer.digest}")
    if is_learned and tokenizer.vocab_size < config.vocab_size:
        learned = f"{tokenizer.vocab_size} tokens were learned"
        console().print(f"vocab_size={config.vocab_size} is more than the text supports: {learned}")
    return path


def tokenizer_path(out: str) -> Path:
    """The file that `out` means: itself, or tokenizer.json in it."""
    return Path(out) if out.endswith(".json") or is_stream(out) else Path(out) / "tokenizer.json"


def preflight_tokenizer(config: DataTokenizerConfig) -> list[str]:
    """Return the problem of a file at `out` that is not a tokenizer. Reads no input."""
    path = tokenizer_path(config.out)
    out = Path(config.out)
    if out.suffix in (".txt", ".model") and not out.is_dir():
        problem = "would be a folder of that name: a tokenizer is one tokenizer.json, its settings included"
        return [Problem.at("out", config.out, problem, f"use out={out.with_name('tokenizer.json')}")]
    if not path.is_file() or is_stream(path):
        return result_problems(path)
    if digest_at(path, config.eod) is not None:
        return []
    return [f"out={path}: exists and is not a tokenizer; name another file, or delete it"]


def digest_at(path: Path, eod: str | None) -> str | None:
    try:
        return Tokenizer.load(path, eod=eod).digest
    except UserError:
        return None


def run_merge(config: DataMergeConfig) -> None:
    merge_corpora(config.paths, config.out)


def run_split(config: DataSplitConfig) -> None:
    split_corpus(config.path, config.out, config.split)


def run_inspect(config: DataInspectConfig) -> None:
    """Print tables, write out. Raises UserError, CorruptFileError for a damaged pair."""
    folder, prefixes = corpora_at(config.path)
    receipt, note = read_receipt(folder), None
    if config.tokenizer is not None:
        tokenizer: Tokenizer | None = Tokenizer.load(config.tokenizer)
    else:
        try:
            tokenizer = tokenizer_beside(folder)
            if tokenizer is None:
                note = "no tokenizer.json beside the corpus: set tokenizer=… to read samples as text"
        except UserError as error:
            tokenizer, note = None, str(error)
    eod_id = eod_of(receipt, tokenizer)
    corpora = [facts_of(prefix, tokenizer, eod_id, config.samples) for prefix in prefixes]
    if config.out is not None:
        result = {"task": "data inspect", "path": config.path, "corpora": corpora, "receipt": receipt}
        write_result(config.out, result)
    print_tables(config, corpora, note)


def print_tables(config: DataInspectConfig, corpora: list[Facts], note: str | None) -> None:
    out, names = console(), [Path(facts["prefix"]).name for facts in corpora]
    header = table(f"data inspect · {config.path}", "", *(f"{name}#" for name in names))
    columns = []
    for facts in corpora:
        lengths, share = facts["tokens_per_document"], facts["ends_with_eod"]
        columns.append(
            {
                "tokens are": f"{facts['dtype']} (version {facts['version']})",
                "documents": f"{facts['documents']:,}",
                "sequences": f"{facts['sequences']:,}",
                "tokens": f"{facts['tokens']:,}",
                "shortest document": f"{lengths['min']:,}",
                "median document": f"{lengths['median']:,}",
                "mean document": f"{lengths['mean']:,.1f}",
                "longest document": f"{lengths['max']:,}",
                "size of .bin": format_bytes(facts["bytes"]),
                "end with eod": "unknown" if share is None else f"{share:.1%} of {facts['looked_at']:,}",
            }
        )
    for name in columns[0]:
        add_row(header, name, *(column[name] for column in columns))
    out.print(header)
    samples = table("samples", "", "document#", "tokens#", "begins")
    for name, facts in zip(names, corpora, strict=True):
        for sample in facts["samples"]:
            start = sample["text"] if sample["text"] is not None else " ".join(map(str, sample["ids"][:16]))
            add_row(samples, name, f"{sample['document']:,}", f"{sample['tokens']:,}", start)
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
    rows = table(f"data verify · {config.path}", "file", "check", "", "")
    for check in checks:
        add_row(rows, check.file, check.name, check.state, check.detail)
    console().print(rows)
    if config.out is not None:
        console().print(f"written to {target_name(config.out)}")
    if errors:
        more = f" (and {len(errors) - 1} more)" if errors[1:] else ""
        raise CheckFailedError(
            f"{folder / errors[0].file}: {errors[0].detail}{more}: restore it from a copy, or write it again"
        )
