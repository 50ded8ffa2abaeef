"""The texts of WikiText-103 and LAMBADA, from a local file or the Hugging Face Hub. Every rank reads them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlm.corpus.benchmarks import is_title
from mlm.data.records import SUFFIXES, form_of, hub_records, read_records
from mlm.util.errors import UserError, lone_surrogate
from mlm.util.files import digest_bytes, digest_file, read_input_text


@dataclass(frozen=True, kw_only=True)
class EvalTexts:
    """The evaluation texts of one file or Hub data set."""

    name: str
    """File, or data set of the Hub."""
    form: str
    """Published form of the data set: raw, with <unk>, lower case, …"""
    texts: tuple[str, ...]
    locations: tuple[str, ...]
    """Location of each text: file:line."""
    digest: str
    """Digest of the texts, in any file format, as `xxh3:<hex>`."""
    file_digest: str | None = None
    """Digest of the file; None from the Hub."""

    def facts(self) -> dict[str, Any]:
        return {"data": self.name, "form": self.form, "digest": self.digest, "file_digest": self.file_digest}


# ----- WikiText: one text, the whole file


def wikitext(path: str | None, *, raw: bool) -> EvalTexts:
    """Read WikiText-103's test split as one text, from `path`, or from the Hub in its raw or tokenised form.

    Raises UserError, CorruptFileError.
    """
    key = "data.raw_path" if raw else "data.path"
    if path is None:
        name = "wikitext-103-raw-v1" if raw else "wikitext-103-v1"
        bring = f"{'wiki.test.raw' if raw else 'wiki.test.tokens'} as a file"
        rows = hub_records("Salesforce/wikitext", name, "test", key=key, bring=bring)
        text = text_of_lines([row["text"] for row in rows])
        name, file_digest = f"Salesforce/wikitext {name} test", None
    else:
        if form_of(Path(path)) in SUFFIXES:
            rows_of_file = read_column(path, ("page", "text"))
            texts, keys = [text for _, _, text in rows_of_file], {key for _, key, _ in rows_of_file}
            text = "\n".join(texts) if keys == {"page"} else text_of_lines(texts)
        else:
            text = read_input_text(path)
        if len(text.split()) < 2:
            raise UserError(f"{key}={path}: holds no text: give wiki.test.tokens, or a file of its form")
        name, file_digest = path, digest_file(Path(path))
    return EvalTexts(
        name=name,
        form="with <unk> for rare words (wikitext-103-v1)" if "<unk>" in text else "raw (no <unk>)",
        texts=(text,),
        locations=(name,),
        digest=digest_bytes(text.encode(errors="surrogatepass")),
        file_digest=file_digest,
    )


def text_of_lines(rows: Sequence[str]) -> str:
    """Join rows, one per line of the file, with or without their newlines."""
    if any(row.endswith("\n") for row in rows):
        # a blank line of the files holds a space; the Hub's loading script made it an empty row
        return "".join(row if row.strip() else " \n" for row in rows)
    return "\n".join(rows)


def articles(text: str) -> list[str]:
    """Split a file into articles at its ` = Title = ` lines.

    Lines before the first title are an article too, unless they are blank. As in EleutherAI's
    wikitext_document_level, which lm-eval scores, an article lacks the newline before the next.
    """
    lines = text.split("\n")
    starts = [n for n, line in enumerate(lines) if is_article_title(line)]
    edges = [*([] if starts[:1] == [0] else [0]), *starts, len(lines)]
    parts = ["\n".join(lines[a:b]) for a, b in pairwise(edges)]
    return [article for article in parts if article.strip()]


def is_article_title(line: str) -> bool:
    """True for ` = Title = `; sections are ` = = Section = = `."""
    stripped = line.strip()
    return is_title(stripped) and not stripped.endswith("= =")


# ----- LAMBADA: passages


def lambada(path: str | None, *, standard: bool) -> EvalTexts:
    """Read LAMBADA's test passages from `path`, or from the Hub, with `standard` in the lower-case form.

    Raises UserError, CorruptFileError.
    """
    key = "data.standard_path" if standard else "data.path"
    if path is None:
        name, config = "EleutherAI/lambada_openai", "default"
        if standard:
            name, config = "cimec/lambada", "plain_text"
        bring = "a .jsonl with a passage under `text` in each line"
        texts = [row["text"] for row in hub_records(name, config, "test", key=key, bring=bring)]
        name, file_digest = f"{name} test", None
        locations = [f"{name} row {n}" for n in range(1, len(texts) + 1)]
    else:
        name = path
        if form_of(Path(path)) in SUFFIXES:
            rows = read_column(path, ("text",))
            locations, texts = [location for location, _, _ in rows], [text for _, _, text in rows]
        else:
            texts = read_input_text(path).removesuffix("\n").split("\n")
            locations = [f"{path}:{n}" for n in range(1, len(texts) + 1)]
        file_digest = digest_file(Path(path))
    if not any(texts):
        raise UserError(f"{key}={path}: holds no passage: give a .jsonl with `text` in each line")
    form = "original (EleutherAI/lambada_openai)"
    if not any(letter.isupper() for text in texts for letter in text):
        form = "lower case, words set apart (cimec/lambada)"
    return EvalTexts(
        name=name,
        form=form,
        texts=tuple(texts),
        locations=tuple(locations),
        digest=digest_bytes(json.dumps(texts).encode()),
        file_digest=file_digest,
    )


# ----- files


def read_column(path: str, keys: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return (location, key, text) per row of a file of SUFFIXES, under the first of `keys` that it has.

    Raises UserError, CorruptFileError.
    """
    rows = []
    for location, record in read_records(Path(path)):
        key = next((key for key in keys if isinstance(record.get(key), str)), None)
        if key is None:
            raise UserError(f"{location}: no text under {' or '.join(map(repr, keys))}: fix or delete it")
        if not record[key].isascii() and (half := lone_surrogate(record[key])) is not None:
            raise UserError(f"{location}: holds {half}: fix or delete it")
        rows.append((location, key, record[key]))
    return rows
