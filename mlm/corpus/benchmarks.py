"""Evaluation texts that `mlm data build` keeps out of a corpus, from the Hub by name or from files.

Files:

- .jsonl: the string under "text" of each line, else every string in the line;
- .txt, .tokens: one text per line; in WikiText's form, where `= Title =` begins an article, one per article;
- .parquet: the column "text", else every column of strings.

They keep their form: decontaminate.py ignores the marks of WikiText's tokenisation.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlm.util.errors import CorruptFileError, UserError
from mlm.util.extras import load_extra
from mlm.util.files import write_atomic

TEXT_KEY = "text"
HUB = {
    "wikitext103": ("Salesforce/wikitext", "wikitext-103-raw-v1", ("validation", "test")),
    "lambada": ("EleutherAI/lambada_openai", "default", ("test",)),
}
"""Hub dataset, its configuration, and the splits that scores are reported on, by name."""
MAX_BYTES = 1 << 30  # of one file: WikiText103's test split has 1.3 MB, the largest sets in use some hundred
KEY = "decontaminate.against"


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """One text of an evaluation set."""

    set: str
    """Name of the set: as in HUB, or the file's name."""
    place: str
    """Location in the set: a line, or the title of an article."""
    text: str


def read_benchmarks(against: Iterable[str]) -> list[EvaluationText]:
    """Read the texts of all sets in `decontaminate.against`, in its order.

    Raises UserError for a set that is unknown, given twice, unreadable or without text.
    """
    texts, names = list[EvaluationText](), dict[str, str]()
    for entry in against:
        name = entry if entry in HUB else Path(entry).name
        if name in names:
            raise UserError(
                f"{KEY}={entry} is a second set named {name} beside {names[name]}: rename the file"
            )
        names[name] = entry
        read = [text for text in read_set(entry, name) if text.text.strip()]
        if not read:
            raise UserError(f"{KEY}={entry} holds no text: name a file with evaluation texts")
        texts += read
    return texts


def read_set(entry: str, name: str) -> Iterator[EvaluationText]:
    """Read the texts of one set, from the Hub or a file."""
    if entry in HUB:
        return read_hub(entry)
    readers: dict[str, Callable[[Path], Iterator[tuple[str, str]]]] = {
        ".jsonl": read_jsonl,
        ".txt": read_lines,
        ".tokens": read_lines,
        ".parquet": read_parquet,
    }
    path = Path(entry)
    if path.suffix not in readers or not path.is_file():
        what = (
            "is not a file"
            if path.suffix in readers
            else "is neither a known set nor a file of a known format"
        )
        raise UserError(f"{KEY}={entry} {what}: use {', '.join(HUB)} or a {', '.join(readers)} file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UserError(f"{KEY}={entry} has {size} bytes, {MAX_BYTES} is the limit: name an evaluation set")
    return (EvaluationText(name, place, text) for place, text in readers[path.suffix](path))


def read_jsonl(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of every string that counts as text."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                listed = list(strings(record))
            except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8 too
                raise UserError(f"{KEY}: {path}:{number}: not a line of JSON: fix or delete it") from error
            for text in listed:
                yield f"line {number}", text


def strings(record: Any) -> Iterator[str]:
    """Yield the value of "text" if it is a string, else all strings inside but keys."""
    if isinstance(record, str):
        yield record
    elif isinstance(record, dict):
        if isinstance(record.get(TEXT_KEY), str):
            yield record[TEXT_KEY]
        else:
            for value in record.values():
                yield from strings(value)
    elif isinstance(record, list):
        for value in record:
            yield from strings(value)


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of a plain file: its articles, or its lines. Raises UserError."""
    try:
        content = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{KEY}={path} is not UTF-8 ({error.reason}): convert it") from error
    # not splitlines(), which would also split at U+2028 and its like inside a text
    return articles(content.split("\n"))


def articles(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of each article in WikiText's form, or (place, line) of any other.

    A text is an article and not a line because its page has the lines in sequence: n-grams across line ends
    are found too.
    """
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered or not is_title(numbered[0][1]):
        yield from ((f"line {number}", line) for number, line in numbered)
        return
    starts = [i for i, (_, line) in enumerate(numbered) if is_title(line)]
    for begin, end in zip(starts, [*starts[1:], len(numbered)], strict=True):
        body = [line for _, line in numbered[begin:end]]
        yield body[0].strip("= "), "\n".join(body)


def is_title(line: str) -> bool:
    """True if a stripped line is `= Title =`; sections have more signs, spaced: `= = Section = =`."""
    return len(line) > 4 and line[:2] == "= " and line[-2:] == " =" and line[2] != "="


def read_parquet(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of every string in the column "text", or in all columns of strings."""
    pa, pq = (load_extra(module, f"{KEY}={path}") for module in ("pyarrow", "pyarrow.parquet"))
    try:
        file = pq.ParquetFile(path)
        columns = [
            field.name for field in file.schema_arrow if field.type in (pa.string(), pa.large_string())
        ]
        row = 0
        for batch in file.iter_batches(columns=[TEXT_KEY] if TEXT_KEY in columns else columns):
            for record in batch.to_pylist():
                row += 1
                yield from ((f"row {row}", text) for text in strings(list(record.values())))
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{KEY}={path} is not a Parquet file, or damaged: replace it") from error


def read_hub(name: str) -> Iterator[EvaluationText]:
    """Read the texts of a set on the Hub. Raises UserError if it cannot be read."""
    source, config, splits = HUB[name]
    fix = f"get it as a file (.jsonl, .txt, .tokens, .parquet) and name that in {KEY}"
    load_dataset = load_extra("datasets", f"{KEY}={name}").load_dataset
    for split in splits:
        try:
            rows = list(load_dataset(source, config, split=split)[TEXT_KEY])
        except Exception as error:  # of datasets, huggingface_hub, httpx and pyarrow: no base class in common
            raise UserError(
                f"{KEY}={name}: {source} could not be read from the Hub ({type(error).__name__}): {fix}"
            ) from error
        for place, text in articles("".join(rows).split("\n")) if name == "wikitext103" else enumerated(rows):
            yield EvaluationText(name, f"{split} {place}", text)


def enumerated(rows: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Number the rows of a table: (place, text)."""
    return ((f"row {number}", text) for number, text in enumerate(rows, 1))


def save_benchmarks(texts: Iterable[EvaluationText], path: Path) -> None:
    """Write the texts to one .jsonl for all tasks. Raises OSError."""
    lines = (json.dumps([text.set, text.place, text.text]) + "\n" for text in texts)
    write_atomic(path, "".join(lines).encode())


def load_benchmarks(path: Path) -> list[EvaluationText]:
    """Read the texts that `save_benchmarks` wrote. Raises CorruptFileError."""
    try:
        with open(path, "rb") as f:
            return [EvaluationText(*json.loads(line)) for line in f]
    except (ValueError, TypeError) as error:
        fix = "delete the work folder and build again"
        raise CorruptFileError(f"{path} is not a file of evaluation texts: {fix}") from error
