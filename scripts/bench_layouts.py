"""Step times of `mlm`'s layouts against each other on this machine, in pairs.

    python scripts/bench_layouts.py tp=2 tp=2,overlap=false
    python scripts/bench_layouts.py pp=2,micro_batches=8 pp=2,micro_batches=8,pipeline=zb_h1
    python scripts/bench_layouts.py --shape 4,512,8,512,8192,8 tp=2 tp=2,sequence_parallel=true

The first layout is the reference; the ratio of a pair is its speed over the other's. Every layout runs in
processes of its own, which wait while others are timed; threads are shared among a layout's processes.
`overlap=false` waits for the sum of a column-parallel layer's input gradient before its weight gradient.
Exit code: 0 a result, 1 a run with doubts, 2 a mistake.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.command import guarded
from bench.layouts import parse_layout
from bench.machine import Probe, describe_machine
from bench.ranks import WARM_UP_STEPS, Ranks
from bench.shapes import shapes_of
from bench.spec import Spec
from bench.stats import MIN_PAIRS
from bench.timing import Clock, Series
from rich.console import Console
from rich.table import Table

from mlm.errors import UserError
from mlm.files.atomic import write_atomic


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_layouts.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("layouts", nargs="+", metavar="LAYOUT", help="key=value,… of mlm's parallel settings; two or more")
    add("--shape", default="4,512,8,512,8192,8", help="L,H,N,S,V,B, or tune (default %(default)s)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--pairs", type=int, default=MIN_PAIRS)
    add("--attempts", type=int, help="pairs begun at most (default 3 * pairs)")
    add("--min-sample-s", type=float, default=0.5)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--out", type=Path, help="JSON file for machines")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace, console: Console) -> int:
    """Time every layout against the first."""
    layouts = {words: parse_layout(words) for words in dict.fromkeys(args.layouts)}
    if len(layouts) < 2:
        raise UserError("give two layouts or more: the first is what the others are compared with")
    words = ["custom", args.shape] if "," in args.shape else [args.shape]
    spec = Spec(shapes_of(words, args.device)[0], args.device, args.dtype, args.threads, "tuned")
    probe = Probe(spec)
    clock = Clock(probe, args.min_sample_s)
    reference, *others = layouts
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(spec),
        "shape": asdict(spec.shape),
        "dtype": spec.dtype,
        "series": [],
    }
    enough = True
    with Ranks(reference, spec, layouts[reference].processes) as first:
        for other in others:
            with Ranks(other, spec, layouts[other].processes) as second:
                for ranks in (first, second):
                    ranks.time(0, WARM_UP_STEPS)
                series = Series(reference, other)
                limit = args.attempts or 3 * args.pairs
                clock.fill(
                    series,
                    first,
                    second,
                    pairs=args.pairs,
                    limit=limit,
                    say=lambda line: console.print(line, highlight=False),
                )
            entry = summary(series, probe.median())
            enough = enough and entry["kept"] >= args.pairs
            result["series"].append(entry)
    show(result)
    if args.out is not None:
        write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0 if enough else 1


def summary(series: Series, session_median: float) -> dict[str, Any]:
    """Medians and samples of one comparison."""
    kept = series.kept(session_median)
    ratios = sorted(pair.ratio for pair in kept)
    return {
        "reference": series.reference,
        "other": series.other,
        "kept": len(kept),
        "dropped": series.attempts - len(kept),
        "ratio": median(ratios) if ratios else None,
        "ratios": ratios,
        "reference_ms": 1e3 * median(p.reference.seconds for p in kept) if kept else None,
        "other_ms": 1e3 * median(p.other.seconds for p in kept) if kept else None,
    }


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    table = Table()
    for name in ("reference", "other"):
        table.add_column(name, no_wrap=True)
    for name in ("ms/step", "ms/step of other", "speed ratio", "lowest to highest", "pairs kept", "dropped"):
        table.add_column(name, justify="right")
    for s in result["series"]:
        if s["ratio"] is None:
            table.add_row(s["reference"], s["other"], "", "", "none kept", "", "0", str(s["dropped"]))
            continue
        numbers = (f"{s['reference_ms']:.1f}", f"{s['other_ms']:.1f}", f"{s['ratio']:.3f}")
        spread = f"{s['ratios'][0]:.3f} to {s['ratios'][-1]:.3f}"
        table.add_row(s["reference"], s["other"], *numbers, spread, str(s["kept"]), str(s["dropped"]))
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    return guarded("bench_layouts", lambda console: run(parse(arguments), console))


if __name__ == "__main__":
    sys.exit(main())
