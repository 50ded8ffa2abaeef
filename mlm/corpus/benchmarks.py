"""Evaluation texts that `mlm data build` keeps out of a corpus, from the Hub by name or from files.

Files:

- .jsonl, .json, .parquet, .csv, .tsv (also .jsonl.gz and the like): the string under "text" of each record,
  else every string in it;
- .txt, .tokens: one text per line; in WikiText's form, where `= Title =` begins an article, one per article.

The texts are not detokenised: decontaminate.py ignores the marks of WikiText's tokenisation.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlm.data.records import SUFFIXES, form_of, hub_records, read_records
from mlm.util.errors import UserError
from mlm.util.files import read_input_text

PLAIN = (".txt", ".tokens")
HUB = {
    "wikitext103": ("Salesforce/wikitext", "wikitext-103-raw-v1", ("validation", "test")),
    "lambada": ("EleutherAI/lambada_openai", "default", ("test",)),
}
"""Hub dataset, its configuration, and the splits that scores are reported on, by name."""
MAX_BYTES = 1 << 30  # of a file: WikiText103's test split has 1.3 MB, the largest sets some hundred
KEY = "decontaminate.against"


@dataclass(frozen=True, slots=True)
class EvaluationText:
    set: str
    """Name of the set in HUB, or of the file."""
    location: str
    """Line, or title of an article, in the set."""
    text: str


def read_benchmarks(against: Iterable[str]) -> list[EvaluationText]:
    """Read the texts of all sets in `decontaminate.against`, in its order.

    Raises UserError for a set that is unknown, given twice, unreadable or without text.
    """
    texts, names = list[EvaluationText](), dict[str, str]()
    for entry in against:
        name = entry if entry in HUB else Path(entry).name
        if name in names:
            raise UserError(f"{KEY}={entry} is a second set named {name}, as {names[name]}: rename the file")
        names[name] = entry
        located = read_hub(entry) if entry in HUB else read_file(entry)
        of_set = [EvaluationText(name, location, text) for location, text in located if text.strip()]
        if not of_set:
            raise UserError(f"{KEY}={entry} holds no text: name a file with evaluation texts")
        texts += of_set
    return texts


def read_file(entry: str) -> Iterator[tuple[str, str]]:
    path = Path(entry)
    if (form_of(path) not in SUFFIXES and path.suffix not in PLAIN) or not path.is_file():
        raise UserError(
            f"{KEY}={entry} is neither a known set nor a file of a known format: use {', '.join(HUB)} or a "
            f"{', '.join((*SUFFIXES, *PLAIN))} file"
        )
    if (size := path.stat().st_size) > MAX_BYTES:
        raise UserError(f"{KEY}={entry} has {size} bytes, {MAX_BYTES} is the limit: name an evaluation set")
    if path.suffix in PLAIN:
        # splitlines() would also split at U+2028 and the like inside a text.
        yield from articles(read_input_text(path).split("\n"))
        return
    for location, record in read_records(path):
        row = location.rpartition(":")[2]
        for text in strings(record):
            yield (f"line {row}" if row.isdigit() else row), text


def strings(record: Any) -> Iterator[str]:
    """Yield the string under "text" if there is one, else all string values."""
    if isinstance(record, str):
        yield record
    elif isinstance(record, dict) and isinstance(record.get("text"), str):
        yield record["text"]
    elif isinstance(record, dict | list):
        for value in record.values() if isinstance(record, dict) else record:
            yield from strings(value)


def articles(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of each article in WikiText's form, or (location, line) of other text.

    An article is one text, so that n-grams across its line ends are found too.
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
    """True for a stripped line `= Title =`; sections have more signs, `= = Section = =`."""
    return len(line) > 4 and line[:2] == "= " and line[-2:] == " =" and line[2] != "="


def read_hub(name: str) -> Iterator[tuple[str, str]]:
    """Yield (location, text) of a set on the Hub. Raises UserError if it cannot be read."""
    source, config, splits = HUB[name]
    bring = f"it as a file ({', '.join((*SUFFIXES, *PLAIN))})"
    for split in splits:
        rows = [row["text"] for row in hub_records(source, config, split, key=KEY, bring=bring)]
        numbered = ((f"row {number}", text) for number, text in enumerate(rows, 1))
        for location, text in articles("".join(rows).split("\n")) if name == "wikitext103" else numbered:
            yield f"{split} {location}", text


def dump_benchmarks(texts: Iterable[EvaluationText]) -> bytes:
    return "".join(json.dumps([text.set, text.location, text.text]) + "\n" for text in texts).encode()


def load_benchmarks(path: Path) -> list[EvaluationText]:
    with open(path, "rb") as f:
        return [EvaluationText(*json.loads(line)) for line in f]
