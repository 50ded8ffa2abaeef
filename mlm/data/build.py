"""`mlm data tokenizer` and `mlm data build`: from text to a tokenizer and to Megatron's .bin/.idx."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mlm.config.data_schema import DataBuildConfig, DataTokenizerConfig
from mlm.config.errors import UserError
from mlm.data.indexed import IndexedWriter, bin_path, idx_path, token_dtype
from mlm.data.receipt import RECEIPT, Receipt, check_corpus, damaged_file, read_receipt, write_receipt
from mlm.data.text import SPLITS, Document, Source, find_sources, parse_split, part_of, read_documents
from mlm.data.tokenizer import Tokenizer, train_bpe
from mlm.files import digest_file, write_atomic

__all__ = ["check_corpus", "run_build", "run_tokenizer"]

MARKER = ".building"  # in `out` while a build is under way: what lies there is ours to replace
BATCH_BYTES = 1 << 22  # text handed to the tokenizer at a time
BATCH_DOCUMENTS = 4096


@dataclass
class Counts:
    """What went into one part of the corpus."""

    documents: int = 0
    tokens: int = 0
    """End-of-document tokens included."""
    bytes: int = 0
    """UTF-8 bytes of text, for bits per byte."""
    empty: int = 0
    """Documents without text, left out."""


def run_tokenizer(config: DataTokenizerConfig, console: Console | None = None) -> Path:
    """Train a tokenizer and write tokenizer.json; its path is returned.

    Raises UserError: no text, bad input, or another tokenizer at `out`.
    """
    console = console or Console()
    path = Path(config.out) if config.out.endswith(".json") else Path(config.out) / "tokenizer.json"
    sources = [source for source in find_sources(config.input) if source.split in (None, "train")]
    texts = (document.text for source in sources for document in progress(source, config.text_key, console))
    tokenizer = train_bpe(refuse_empty(texts, config.input), config.vocab_size)
    if path.is_file() and Tokenizer.load(path).digest != tokenizer.digest:
        raise UserError(
            f"out={path} is another tokenizer: corpora may depend on it; set another out=, or delete it"
        )
    with explain_disk_faults(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(path)
    console.print(f"{path}: {tokenizer.vocab_size} tokens, {tokenizer.digest}", soft_wrap=True)
    return path


def run_build(config: DataBuildConfig, console: Console | None = None) -> Receipt:
    """Write a corpus folder, its receipt last; the receipt is returned. Nothing to do if it is there already.

    Raises UserError: bad input, an empty part, or a folder that holds something else.
    """
    console = console or Console()
    sources = find_sources(config.input)
    shares = parse_split(config.split)
    tokenizer = Tokenizer.load(config.tokenizer)
    out = Path(config.out)
    made_of = ingredients(config, sources, shares, tokenizer)
    if (receipt := reusable(out, made_of)) is not None:
        console.print(f"{out} is up to date", soft_wrap=True)
        return receipt
    with explain_disk_faults(out):
        claim(out)
        counts = write_splits(sources, shares, tokenizer, config, console)
        tokenizer.save(out / "tokenizer.json")
        names = [path(out / split).name for split in counts for path in (bin_path, idx_path)]
        splits = {split: asdict(count) for split, count in counts.items()}
        receipt = write_receipt(out, made_of, splits, [*names, "tokenizer.json"])
        (out / MARKER).unlink()
    console.print(summary(out, receipt))
    return receipt


def ingredients(
    config: DataBuildConfig, sources: list[Source], shares: tuple[float, ...], tokenizer: Tokenizer
) -> Receipt:
    """Everything the output is a function of."""
    divided = sources[0].split is None
    return {
        "format": "mlm-corpus-1",
        "tokenizer": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "text_key": config.text_key,
        "split": list(shares) if divided else None,
        "seed": config.seed,
        "inputs": {source.path.name: digest_file(source.path) for source in sources},
    }


def reusable(out: Path, made_of: Receipt) -> Receipt | None:
    """The receipt of an equal corpus that is already whole. Raises UserError when another one is there."""
    receipt = read_receipt(out)
    if receipt is None:
        return None
    remedy = "set another out=, or delete the folder"
    differing = [key for key, value in made_of.items() if receipt.get(key) != value]
    if differing:
        raise UserError(f"out={out} holds a corpus made with other {', '.join(differing)}: {remedy}")
    if (name := damaged_file(out, receipt)) is not None:
        raise UserError(f"out={out}: {name} is not what {RECEIPT} says: {remedy}")
    return receipt


def claim(out: Path) -> None:
    """Make `out` ours. A build that was killed is begun anew; files of anyone else are not touched."""
    out.mkdir(parents=True, exist_ok=True)
    files = [path(out / split) for split in SPLITS for path in (bin_path, idx_path)]
    present = [file for file in files if file.exists()]
    if present and not (out / MARKER).exists():
        raise UserError(
            f"out={out} holds {present[0].name} but no {RECEIPT}: set another out=, or delete the files"
        )
    write_atomic(out / MARKER, b"")
    for file in [*present, *out.glob(".*.partial")]:
        file.unlink()


def write_splits(
    sources: list[Source],
    shares: tuple[float, ...],
    tokenizer: Tokenizer,
    config: DataBuildConfig,
    console: Console,
) -> dict[str, Counts]:
    """Tokenise all sources into the parts of the corpus. None appears before all text has been read."""
    wanted = [split for split, share in zip(SPLITS, shares, strict=True) if share > 0]
    parts = wanted if sources[0].split is None else [source.split for source in sources if source.split]
    counts = {part: Counts() for part in parts}
    dtype = token_dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        writers = {p: stack.enter_context(IndexedWriter(Path(config.out, p), dtype)) for p in parts}
        for source in sources:
            number = 0
            for batch in batches(progress(source, config.text_key, console)):
                for document, ids in zip(batch, tokenizer.encode_batch([d.text for d in batch]), strict=True):
                    part = source.split or part_of(number, shares, config.seed)
                    add(document, ids, writers[part], counts[part], tokenizer.eod_id)
                    number += 1
        for part, count in counts.items():
            if count.documents == 0:
                raise UserError(empty_part(part, config, counts, divided=sources[0].split is None))
    return counts


def add(document: Document, ids: list[int], writer: IndexedWriter, count: Counts, eod_id: int) -> None:
    """Append one document and its end-of-document token."""
    if not ids:
        count.empty += 1
        return
    writer.add_document([*ids, eod_id])
    count.documents += 1
    count.tokens += len(ids) + 1
    count.bytes += document.num_bytes


def empty_part(part: str, config: DataBuildConfig, counts: dict[str, Counts], *, divided: bool) -> str:
    """What to say when a part got no document."""
    total = sum(count.documents for count in counts.values())
    if total and divided:
        return (
            f"{part} got none of the {total} documents of input={config.input} with split={config.split}: "
            f"give it a larger share, or 0 to leave it out"
        )
    where = config.input if divided else f"{config.input}, its part {part},"
    return f"input={where} holds no text: the corpus is empty; name a file with documents"


def refuse_empty(texts: Iterator[str], name: str) -> Iterator[str]:
    """Pass texts on. Raises UserError at the end when all of them were empty."""
    seen = False
    for text in texts:
        seen = seen or bool(text)
        yield text
    if not seen:
        raise UserError(f"input={name} holds no text: a tokenizer needs some; name a file with documents")


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents so that memory stays bounded however many there are."""
    batch, size = list[Document](), 0
    for document in documents:
        batch.append(document)
        size += document.num_bytes
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def progress(source: Source, text_key: str, console: Console) -> Iterator[Document]:
    """Documents of a source, with a bar and time left when someone watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(source.path.name, total=source.path.stat().st_size)
        for document in read_documents(source.path, text_key):
            yield document
            bar.update(task, completed=document.end)


@contextmanager
def explain_disk_faults(out: Path) -> Iterator[None]:
    """Turn a full or read-only disk into a UserError. What was half written is gone by then."""
    try:
        yield
    except OSError as error:
        place = error.filename or out
        raise UserError(
            f"out={out}: {place}: {error.strerror}: free space there or set another out="
        ) from error


def summary(out: Path, receipt: Receipt) -> Table:
    """The small table a build ends with."""
    table = Table(title=f"{out} · vocabulary {receipt['vocab_size']}", title_justify="left")
    for heading in ("part", "documents", "tokens", "bytes", "bytes/token"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for split, count in receipt["splits"].items():
        numbers = [f"{count[key]:,}" for key in ("documents", "tokens", "bytes")]
        table.add_row(split, *numbers, f"{count['bytes'] / count['tokens']:.2f}")
    return table
