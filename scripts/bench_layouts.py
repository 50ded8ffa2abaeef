"""Step times of `mlm`'s layouts against each other on this machine, in pairs.

    python scripts/bench_layouts.py tp=2 tp=2,overlap=false
    python scripts/bench_layouts.py pp=2,micro_batches=8 pp=2,micro_batches=8,pipeline=zb_h1
    python scripts/bench_layouts.py --shape 4,512,8,512,8192,8 tp=2 tp=2,sequence_parallel=true
    python scripts/bench_layouts.py --shape 4,256,4,4096,1024,1 cp=1 cp=2

The first layout is the reference; a ratio is its speed over the other's. Every layout runs in processes of
its own, all up at once; they take turns, a step at a time. Threads are shared among a layout's processes.
Memory is the most of a layout's processes, above weights and optimizer state.
`overlap=false` waits for the sum of a column-parallel layer's input gradient before its weight gradient.
Exit code: 0 a result, 1 a run with doubts, 2 a mistake.
"""

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.command import add_round_options, guarded
from bench.compare import compare, doubts, measures_of
from bench.layouts import parse_layout
from bench.machine import Probe, describe_machine
from bench.ranks import WARM_UP_STEPS, Ranks
from bench.report import ratio_cells
from bench.shapes import shapes_of
from bench.spec import Spec
from bench.timing import take_rounds
from rich.console import Console
from rich.table import Table

from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError


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
    add_round_options(parser)
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
    opponents = [(next(iter(layouts)), other) for other in list(layouts)[1:]]

    def say(line: str) -> None:
        console.print(line, highlight=False)

    with ExitStack() as stack:
        up = {words: stack.enter_context(Ranks(words, spec, one.processes)) for words, one in layouts.items()}
        for ranks in up.values():
            ranks.time(0, WARM_UP_STEPS)
        limit = args.attempts or 3 * args.pairs
        rounds = take_rounds(
            up,
            opponents,
            Probe(spec),
            measures=measures_of(spec),
            pairs=args.pairs,
            limit=limit,
            seconds=args.seconds,
            say=say,
        )
        peaks = {
            words: max(each["peak_above_bytes"] for each in ranks.memory()) for words, ranks in up.items()
        }
    series = [compare(rounds, *both, args.pairs) for both in opponents]
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(spec),
        "shape": asdict(spec.shape),
        "dtype": spec.dtype,
        "peak_bytes": peaks,
        "series": series,
        "rounds": [{name: asdict(turn) for name, turn in one.items()} for one in rounds],
        "doubts": doubts(args.pairs, series, spec),
    }
    show(result)
    for doubt in result["doubts"]:
        console.print(f"not a result: {doubt}", style="yellow", highlight=False)
    if args.out is not None:
        write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
    return 1 if result["doubts"] else 0


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    table = Table()
    for name in ("reference", "other"):
        table.add_column(name, no_wrap=True)
    for name in (
        "by",
        "ms/step",
        "ms/step of other",
        "MB",
        "MB of other",
        "speed",
        "quartiles",
        "range",
        "of minima",
        "pairs kept",
    ):
        table.add_column(name, justify="right")
    for s in result["series"]:
        for measure, key in (("wall", "tokens_ratio"), ("cpu", "tokens_ratio_cpu")):
            field = "seconds" if measure == "wall" else "cpu_s"
            times = [
                f"{1e3 * median(one[s[name]]['timing'][field] for one in result['rounds']):.1f}"
                for name in ("reference", "other")
            ]
            cells = ratio_cells(s[key], s["rounds"])
            sizes = [f"{result['peak_bytes'][s[name]] / 1e6:.1f}" for name in ("reference", "other")]
            table.add_row(s["reference"], s["other"], measure, *times, *sizes, *cells)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    return guarded("bench_layouts", lambda console: run(parse(arguments), console))


if __name__ == "__main__":
    sys.exit(main())
