"""The texts of WikiText-103 and LAMBADA, from a local file or the Hugging Face Hub.

Every rank reads them. Nothing is taken from a file but strings.
"""

import json
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlm.corpus.benchmarks import is_title
from mlm.util.atomic import digest_bytes
from mlm.util.errors import CorruptFileError, UserError, half_pair
from mlm.util.extras import load_extra

MAX_BYTES = 1 << 28  # of one file: WikiText-103's test split has 1.3 MB
BLANK_LINE = " \n"
"""A blank line in WikiText's files. The Hub's loading script made it an empty row."""
HUB_WIKITEXT, HUB_WIKITEXT_RAW = "wikitext-103-v1", "wikitext-103-raw-v1"
HUB_LAMBADA, HUB_LAMBADA_STANDARD = "EleutherAI/lambada_openai", "cimec/lambada"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts that one setting names."""

    name: str
    """A file, or what was taken from the Hub."""
    form: str
    """The form of the data set, in words."""
    texts: tuple[str, ...]
    places: tuple[str, ...]
    """Location of each text: file:line."""
    digest: str
    """Digest of the texts, in any file format, as `xxh3:<hex>`."""
    file_digest: str | None = None
    """Digest of the file; None from the Hub."""

    def facts(self) -> dict[str, Any]:
        """Return the entries of the receipt."""
        return {"data": self.name, "form": self.form, "digest": self.digest, "file_digest": self.file_digest}


# ----- WikiText: one text, the whole file


def wikitext(path: str | None, *, raw: bool, key: str | None = None) -> Texts:
    """WikiText's test split as the text of one file, from `path` or the Hub, there in its raw form or not.

    Errors name `key`, or data.path and data.raw_path. Raises UserError, CorruptFileError.
    """
    key = key or ("data.raw_path" if raw else "data.path")
    if path is None:
        name = HUB_WIKITEXT_RAW if raw else HUB_WIKITEXT
        rows = hub_column("Salesforce/wikitext", name, key, "wiki.test.raw" if raw else "wiki.test.tokens")
        return make_wikitext(f"Salesforce/wikitext {name} test", text_of_lines(rows), None)
    content = read_file(path, key=key)
    if Path(path).suffix in (".jsonl", ".parquet"):
        records = list(rows_of(path, content, ("page", "text")))
        found, keys = [text for _, _, text in records], {key for _, key, _ in records}
        text = "\n".join(found) if keys == {"page"} else text_of_lines(found)
    else:
        text = decode(content, path)
    if len(text.split()) < 2:
        raise UserError(f"{key}={path}: holds no text: give wiki.test.tokens, or a file of its form")
    return make_wikitext(path, text, digest_bytes(content))


def make_wikitext(name: str, text: str, file_digest: str | None) -> Texts:
    """The whole text, and what form it is in."""
    form = "with <unk> for rare words (wikitext-103-v1)" if "<unk>" in text else "raw (no <unk>)"
    digest = digest_bytes(text.encode(errors="surrogatepass"))
    return Texts(name=name, form=form, texts=(text,), places=(name,), digest=digest, file_digest=file_digest)


def text_of_lines(rows: Sequence[str]) -> str:
    """The file that rows were made of: lines with their newline, blank ones empty; or without newlines."""
    if any(row.endswith("\n") for row in rows):
        return "".join(row if row.strip() else BLANK_LINE for row in rows)
    return "\n".join(rows)


def articles(text: str) -> list[str]:
    """The articles of a file, each from its ` = Title = ` line to the next one's.

    The lines before the first title are an article too, unless they are blank. As EleutherAI's
    wikitext_document_level was made, which lm-eval scores: an article lacks the newline before the next.
    """
    lines = text.split("\n")
    starts = [n for n, line in enumerate(lines) if is_article_title(line)]
    edges = [*([] if starts[:1] == [0] else [0]), *starts, len(lines)]
    found = ["\n".join(lines[a:b]) for a, b in pairwise(edges)]
    return [article for article in found if article.strip()]


def is_article_title(line: str) -> bool:
    """True for the line ` = Title = `; a section's is ` = = Section = = `."""
    stripped = line.strip()
    return is_title(stripped) and not stripped.endswith("= =")


# ----- LAMBADA: passages


def lambada(path: str | None, *, standard: bool, key: str | None = None) -> Texts:
    """LAMBADA's test passages, from `path` or the Hub, there in the lower-case form or not.

    Errors name `key`, or data.path and data.standard_path. Raises UserError, CorruptFileError.
    """
    key = key or ("data.standard_path" if standard else "data.path")
    if path is None:
        name = HUB_LAMBADA_STANDARD if standard else HUB_LAMBADA
        config = "plain_text" if standard else "default"
        found = hub_column(name, config, key, "a .jsonl with a passage under `text` in each line")
        places, file_digest = [f"{name} test row {n}" for n in range(1, len(found) + 1)], None
        name = f"{name} test"
    else:
        name, content = path, read_file(path, key=key)
        if Path(path).suffix in (".jsonl", ".parquet"):
            rows = list(rows_of(path, content, ("text",)))
        else:
            lines = decode(content, path).split("\n")
            rows = [(f"{path}:{n}", "", line) for n, line in enumerate(lines, 1)]
            if not lines[-1]:  # after the last newline
                rows.pop()
        places, found = [place for place, _, _ in rows], [text for _, _, text in rows]
        file_digest = digest_bytes(content)
    if not found:
        raise UserError(f"{key}={path}: holds no passage: give a .jsonl with `text` in each line")
    lower = not any(letter.isupper() for text in found for letter in text)
    return Texts(
        name=name,
        form="lower case, words set apart (cimec/lambada)"
        if lower
        else "original (EleutherAI/lambada_openai)",
        texts=tuple(found),
        places=tuple(places),
        digest=digest_bytes(json.dumps(found).encode()),
        file_digest=file_digest,
    )


# ----- files


def read_file(path: str, *, key: str) -> bytes:
    """The bytes of a file of the user's. Raises UserError."""
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):  # a pipe may never end
            raise UserError(f"{key}={path}: is a pipe or device: give a file")
        if (size := found.st_size) > MAX_BYTES:
            raise UserError(f"{key}={path} has {size} bytes, {MAX_BYTES} is the limit: give the test split")
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{key}={path}: {error.strerror}: give a file that can be read") from error


def decode(content: bytes, path: str) -> str:
    """Bytes as text, newlines as they are. Raises UserError."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: is not UTF-8 ({error.reason}): convert it") from error


def rows_of(path: str, content: bytes, keys: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(place, key, text) of each row of a .jsonl or .parquet, the text under the first of `keys` there is.

    Raises UserError, CorruptFileError.
    """
    source = parquet_rows(path, keys) if path.endswith(".parquet") else jsonl_rows(path, content)
    for place, record in source:
        key = next((key for key in keys if isinstance(record.get(key), str)), None)
        if key is None:
            raise UserError(f"{place}: no text under {' or '.join(map(repr, keys))}: fix or delete it")
        if not record[key].isascii() and (half := half_pair(record[key])) is not None:
            raise UserError(f"{place}: holds {half}: fix or delete it")
        yield place, key, record[key]


def jsonl_rows(path: str, content: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each line that is not blank."""
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8 too
            raise UserError(f"{path}:{number}: not a line of JSON: fix or delete it") from error
        if not isinstance(record, dict):
            raise UserError(f"{path}:{number}: not a JSON object: fix or delete it")
        yield f"{path}:{number}", record


def parquet_rows(path: str, keys: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, columns) of each row."""
    pa, pq = (load_extra(module, f"data.path={path}") for module in ("pyarrow", "pyarrow.parquet"))
    try:
        file, row = pq.ParquetFile(path), 0
        columns = [name for name in file.schema_arrow.names if name in keys]
        for batch in file.iter_batches(columns=columns):
            for record in batch.to_pylist():
                row += 1
                yield f"{path}:row {row}", record
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{path} is no Parquet file, or a damaged one: replace it") from error


# ----- the Hub


@lru_cache(maxsize=4)
def hub_column(dataset: str, config: str, key: str, bring: str) -> list[str]:
    """The column `text` of a test split on the Hub. Raises UserError, naming the file to bring instead."""
    load_dataset = load_extra("datasets", f"{key}=null").load_dataset
    try:
        return [str(text) for text in load_dataset(dataset, config, split="test")["text"]]
    except Exception as error:  # of datasets, huggingface_hub, httpx and pyarrow: no base class in common
        raise UserError(
            f"{key}=null: {dataset} ({config}, test) could not be had from the Hub "
            f"({type(error).__name__}): bring {bring} as a file and give {key}=…"
        ) from error
