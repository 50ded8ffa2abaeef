"""Stage `merge`, which joins the shards of each part, and the end of a build: publication and account."""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console, Group
from rich.table import Table

from mlm.corpus.decontaminate import Tally
from mlm.corpus.stages.clean import TEXT
from mlm.corpus.stages.markers import Advance, Counts, counts_of, write_marker
from mlm.corpus.stages.plan import Plan
from mlm.corpus.stages.tokenise import load_contaminants
from mlm.data.corpus_files import origins_of
from mlm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype
from mlm.data.receipt import REJECTED
from mlm.util.atomic import fsync_directory, write_atomic
from mlm.util.errors import UserError


def merge(plan: Plan, task: int) -> None:
    """Merge one part. The result stays in the work folder until all parts are complete."""
    stage, tokenised = plan.stages["merge"], plan.stages["tokenise"]
    part = plan.parts[task]
    advance = Advance(stage.folder, task)
    names, files = [part], list[Path]()
    if plan.config.keep_ids:
        names.append(origins_of(Path(part)).name)
    for name in names:
        suffix = name.removeprefix(part)
        shards = [tokenised.folder / f"{part}-{shard:05d}{suffix}" for shard in range(tokenised.tasks)]
        dtype = TEXT if suffix else token_dtype(plan.load_tokenizer().vocab_size)
        with IndexedWriter(stage.folder / name, dtype) as writer:
            for shard in shards:
                found = IndexedDataset(shard, allow_empty=True)
                writer.append(found)
                advance(0 if suffix else found.num_tokens)
        files += [bin_path(stage.folder / name), idx_path(stage.folder / name)]
    write_marker(stage.folder, task, {}, files)


def publish(plan: Plan, out: Path) -> list[str]:
    """Move the merged files into the corpus folder; their names are returned. Raises OSError.

    An .idx vouches for its .bin, so it comes second.
    """
    merged = plan.stages["merge"].folder
    prefixes = [Path(part) for part in plan.parts]
    prefixes += [origins_of(prefix) for prefix in prefixes] if plan.config.keep_ids else []
    names = [path(prefix).name for prefix in prefixes for path in (bin_path, idx_path)]
    for name in names:
        move(merged / name, out / name)
    fsync_directory(out)
    return names


def move(source: Path, target: Path) -> None:
    """Rename a file; to another file system, copy it."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise

        def copy(f: BinaryIO) -> None:
            with open(source, "rb") as content:
                shutil.copyfileobj(content, f, 1 << 22)

        write_atomic(target, copy)


Facts = dict[str, Any]


def outcome(plan: Plan) -> Facts:
    """Return the counts of a finished build: documents read, removed by each rule, and kept in each part."""
    cleaned, tokenised = (plan.stages[name] for name in ("clean", "tokenise"))
    read = counts_of(cleaned.folder, cleaned.tasks)
    written = counts_of(tokenised.folder, tokenised.tasks)
    num_bytes = total(counts["removed_bytes"] for counts in (*read, *written))
    documents = total(counts["removed"] for counts in (*read, *written))
    pieces = total(counts["removed_pieces"] for counts in written)
    cut = total(counts["cut"] for counts in written)
    facts = {
        "read": {key: sum(counts[key] for counts in read) for key in ("documents", "bytes")},
        "mended": {"bytes": sum(counts["mended_bytes"] for counts in read)},
        "rejected": total(counts["rejected"] for counts in read),
        "removed": {
            rule: {"documents": documents.get(rule, 0), "bytes": num_bytes[rule]}
            | ({"pieces": pieces[rule]} if rule in pieces else {})
            for rule in {**documents, **pieces}
        },
        "cut": cut if cut.get("documents") else None,
        "contamination": contamination(plan, written),
        "splits": {part: total(counts["parts"][part] for counts in written) for part in plan.parts},
    }
    check_balance(facts)
    return facts


def check_balance(facts: Facts) -> None:
    """Assert that all that was read is kept, removed or cut away, in documents and in bytes.

    Pieces replace a document that is cut; fixing text changes its bytes.
    """
    removed, kept, cut = facts["removed"].values(), facts["splits"].values(), facts["cut"] or {}
    come = facts["read"]["documents"] + cut.get("pieces", 0)
    gone = sum(count["documents"] + count.get("pieces", 0) for count in removed) + cut.get("documents", 0)
    assert come == gone + sum(count["documents"] for count in kept), facts
    come = facts["read"]["bytes"] + facts["mended"]["bytes"]
    gone = sum(count["bytes"] for count in removed) + cut.get("bytes", 0)
    assert come == gone + sum(count["bytes"] for count in kept), facts


def contamination(plan: Plan, written: list[Counts]) -> Facts | None:
    """Report on text of evaluation sets that was cut out, None if no sets were given."""
    if plan.evaluation is None:
        return None
    return load_contaminants(plan).report(Tally.merge(counts["contamination"] for counts in written))


def total(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up counters, key by key, in the order of first occurrence."""
    added = Counter[str]()
    for count in counts:
        for key, value in count.items():
            added[key] += value
    return dict(added)


def reject_empty_parts(plan: Plan, facts: Facts) -> None:
    """Raise UserError if a part of the corpus received no document."""
    kept = sum(counts["documents"] for counts in facts["splits"].values())
    removed = {rule: words for rule, gone in facts["removed"].items() if (words := in_words(gone))}
    for part, counts in facts["splits"].items():
        if counts["documents"]:
            continue
        config, divided = plan.config, plan.is_divided
        if removed and plan.shards[0].split and divided:
            rules = ", ".join(removed)
            raise UserError(
                f"input={config.input} is one text, and {rules} removed its part for {part}: loosen the "
                f"rule, or set recipe=plain"
            )
        if kept and divided:
            raise UserError(
                f"{part} got none of the {kept} documents of input={config.input} with split={config.split}: "
                f"give it a larger share, or 0 to leave it out"
            )
        where = config.input if divided else f"{config.input}, its part {part},"
        if removed.keys() <= {"empty"}:
            raise UserError(f"input={where} holds no text: the corpus is empty; name a file with documents")
        rules = ", ".join(f"{rule} {words}" for rule, words in removed.items())
        raise UserError(
            f"input={where}: the rules left no document ({rules}): loosen them, or set recipe=plain"
        )


def in_words(gone: dict[str, int]) -> str:
    """Return the numbers of documents, and of pieces of others, that a rule removed; empty for none."""
    documents, pieces = gone["documents"], gone.get("pieces", 0)
    return " and ".join([f"{documents:,}"] * (documents > 0) + [f"{pieces:,} pieces"] * (pieces > 0))


def write_rejected(plan: Plan, out: Path) -> list[str]:
    """Write rejected.jsonl, if anything was rejected; return its name. Raises OSError."""
    stage = plan.stages["clean"]
    shards = [stage.folder / f"{task:05d}.{REJECTED}" for task in range(stage.tasks)]
    if not any(shard.stat().st_size for shard in shards):
        return []

    def write(f: Any) -> None:
        for shard in shards:
            with open(shard, "rb") as lines:
                shutil.copyfileobj(lines, f)

    write_atomic(out / REJECTED, write)
    return [REJECTED]


def summary(out: Path, receipt: Facts) -> Group:
    """Return the tables that a build ends with."""
    parts = Table(title=f"{out} · vocabulary {receipt['vocab_size']}", title_justify="left")
    for heading in ("part", "documents", "tokens", "bytes", "bytes/token"):
        parts.add_column(heading, justify="left" if heading == "part" else "right")
    for split, count in receipt["splits"].items():
        numbers = [f"{count[key]:,}" for key in ("documents", "tokens", "bytes")]
        parts.add_row(split, *numbers, f"{count['bytes'] / count['tokens']:.2f}")
    tables = [parts]
    if receipt["removed"] or receipt["rejected"]:
        gone = Table(title=f"of {receipt['read']['documents']:,} documents read", title_justify="left")
        for heading in ("removed by", "documents", "bytes"):
            gone.add_column(heading, justify="left" if heading == "removed by" else "right")
        for rule, count in receipt["removed"].items():
            gone.add_row(rule, in_words(count) or "0", f"{count['bytes']:,}")
        if (cut := receipt["cut"]) is not None:
            gone.add_row("cut to pieces", f"{cut['documents']:,}", f"{cut['bytes']:,}")
        for rule, documents in receipt["rejected"].items():
            gone.add_row(f"bad input: {rule} (see {REJECTED})", f"{documents:,}", "")
        tables.append(gone)
    return Group(*tables)


def warn(config: Any, console: Console) -> None:
    """Warn if no evaluation set is kept out."""
    if config.dedup.enabled and not config.decontaminate.against:
        console.print(
            "no evaluation set is kept out of this corpus: set decontaminate.against=[wikitext103,lambada] to"
            " have scores on them mean something",
            soft_wrap=True,
            markup=False,
        )
