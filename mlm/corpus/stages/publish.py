"""Stage `merge`, which joins the shards of each part, and the end of a build: publication and account."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group

from mlm.config.tree import nested
from mlm.corpus.stages.plan import BuildPlan
from mlm.corpus.stages.tokenise import MATCHES, load_ngram_index
from mlm.data.config import SPLITS
from mlm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype
from mlm.data.receipt import REJECTED
from mlm.util.errors import UserError, format_value
from mlm.util.files import fsync_directory, write_atomic
from mlm.util.terminal import add_row, table

Facts = dict[str, Any]


def merge(plan: BuildPlan, task: int) -> None:
    """Merge one part. The result stays in the work folder until all parts are complete."""
    stage, tokenised = plan.stages["merge"], plan.stages["tokenise"]
    prefix = stage.folder / (part := plan.parts[task])
    with IndexedWriter(prefix, token_dtype(plan.load_tokenizer().vocab_size)) as writer:
        for shard in range(tokenised.tasks):
            writer.append(IndexedDataset(tokenised.folder / f"{part}-{shard:05d}", allow_empty=True))
    stage.finish(task, {}, [bin_path(prefix), idx_path(prefix)])


def publish(plan: BuildPlan, out: Path) -> list[str]:
    """Move the merged files into the corpus folder, with a list of rejected records; return their names.

    An .idx is moved after its .bin, which it declares complete. Parts of a killed command are deleted. Raises
    OSError.
    """
    merged = plan.stages["merge"].folder
    names = [path(Path(part)).name for part in plan.parts for path in (bin_path, idx_path)]
    for part in set(SPLITS) - set(plan.parts):
        idx_path(out / part).unlink(missing_ok=True)
        bin_path(out / part).unlink(missing_ok=True)
    for name in names:
        os.replace(merged / name, out / name)
    fsync_directory(out)
    shards = [shard for shard in rejected_shards(plan) if shard.stat().st_size]

    def write(f: Any) -> None:
        for shard in shards:
            with open(shard, "rb") as lines:
                shutil.copyfileobj(lines, f)

    if shards:
        write_atomic(out / REJECTED, write)
        names.append(REJECTED)
    return names


def count_documents(plan: BuildPlan) -> Facts:
    """Return the counts of a finished build: documents read, removed by each rule, and kept in each part.

    Documents and bytes that were read are kept, removed or cut. Passages replace a document that is split,
    pieces one that is cut; fixing text changes its bytes.
    """
    total = plan.stages["clean"].total()
    total.update(plan.stages["tokenise"].total())
    tree = nested({name.replace("/", "."): n for name, n in total.items() if not name.startswith(MATCHES)})
    removed = {rule: {"documents": 0} | counts for rule, counts in tree.get("removed", {}).items()}
    index, cut = load_ngram_index(plan), tree.get("cut")
    matches = {name.removeprefix(MATCHES): n for name, n in total.items() if name.startswith(MATCHES)}
    facts = {
        "read": tree["read"],
        "fixed": tree["fixed"],
        "rejected": tree.get("rejected", {}),
        "removed": removed,
        "cut": cut,
        "passages": tree.get("passages"),
        "contamination": index.report(matches) if index else None,
        "splits": tree["splits"],
    }
    lost, parts, cut = list(removed.values()), list(tree["splits"].values()), Counter(cut)
    documents = add_up(lost, "documents") + add_up(lost, "pieces") + add_up(parts, "documents")
    replaced = cut + Counter(facts["passages"])
    assert tree["read"]["documents"] + replaced["pieces"] == documents + replaced["documents"], facts
    num_bytes = add_up(lost, "bytes") + add_up(parts, "bytes") + cut["bytes"]
    assert tree["read"]["bytes"] + tree["fixed"]["bytes"] == num_bytes, facts
    return facts


def add_up(counts: Iterable[Mapping[str, int]], key: str) -> int:
    return sum(count.get(key, 0) for count in counts)


def reject_empty_parts(plan: BuildPlan, facts: Facts) -> None:
    empty = next((part for part, counts in facts["splits"].items() if not counts["documents"]), None)
    if empty is None:
        return
    removed = {rule: words for rule, n in facts["removed"].items() if (words := describe_removed(n))}
    account = f"removed: {', '.join(f'{rule} {words}' for rule, words in removed.items()) or 'none'}"
    example = " (filter.min_tokens=null)" * ("min_tokens" in removed)
    fixes = [f"loosen the rules{example}"] * bool(removed) + ["name a file with documents"]
    if rejected := sum(facts["rejected"].values()):
        with open(next(shard for shard in rejected_shards(plan) if shard.stat().st_size), "rb") as lines:
            first: Facts = json.loads(lines.readline())
        account += f"; rejected: {rejected:,}, first {first['place']}: {first['detail']}"
        fixes.insert(0, "repair the input")
    if plan.is_divided and add_up(facts["splits"].values(), "documents"):
        fixes = [f"give it a larger share than split={plan.config.split}, or 0 to leave it out"]
    setting = f"input={format_value(plan.config.input)}"
    raise UserError(f"{setting}: no document for {empty} ({account}); {', or '.join(fixes)}")


def describe_removed(counts: dict[str, int]) -> str:
    """Return the numbers of documents and pieces of documents that a rule removed; "" for none."""
    documents, pieces = counts["documents"], counts.get("pieces", 0)
    return " and ".join([f"{documents:,}"] * (documents > 0) + [f"{pieces:,} pieces"] * (pieces > 0))


def rejected_shards(plan: BuildPlan) -> list[Path]:
    stage = plan.stages["clean"]
    return [stage.folder / f"{task:05d}.{REJECTED}" for task in range(stage.tasks)]


def summary(out: Path, receipt: Facts) -> Group:
    title = f"{out} · vocabulary {receipt['vocab_size']}"
    parts = table(title, "part", "documents#", "tokens#", "bytes#", "bytes/token#")
    for split, count in receipt["splits"].items():
        numbers = [f"{count[key]:,}" for key in ("documents", "tokens", "bytes")]
        add_row(parts, split, *numbers, f"{count['bytes'] / count['tokens']:.2f}")
    read = receipt["read"]["documents"]
    losses = table(f"of {read:,} documents read", "removed by", "documents#", "bytes#")
    for rule, count in receipt["removed"].items():
        add_row(losses, rule, describe_removed(count) or "0", f"{count['bytes']:,}")
    if (cut := receipt["cut"]) is not None:
        add_row(losses, "cut to pieces", f"{cut['documents']:,}", f"{cut['bytes']:,}")
    for rule, documents in receipt["rejected"].items():
        add_row(losses, f"bad input: {rule} (see {REJECTED})", f"{documents:,}", "")
    return Group(parts, losses) if losses.row_count else Group(parts)
