"""Mutated command lines: no traceback, no exit code but 0, 1, 2 and 130, no failure without a word.

    python scripts/torture_commands.py --lines 1000 --seed 0 --out scripts/results/torture_commands.json

Each line runs as a user types it, in a forked child, in a folder with a small run, corpus and texts.
Exit code: 0 nothing was found, 1 something was, 2 a mistake.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from bench.command import guarded
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torture.command_lines import Verdict, mutate, try_line
from torture.flips import make_template

from mlm.util.atomic import write_atomic


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="torture_commands.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--lines", type=int, default=100, help="mutated lines (default %(default)s)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="JSON file for machines")
    return parser.parse_args(arguments)


def torture(args: argparse.Namespace, folder: Path, console: Console) -> list[Verdict]:
    """All lines, with a progress bar; those that ended badly."""
    template, found = folder / "template", []
    make_template(template)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # No thread of its own: this process forks.
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task("lines", total=args.lines)
        for number in range(args.lines):
            words = mutate(random.Random(f"{args.seed}-{number}"))
            if (verdict := try_line(words, template, folder / "place")) is not None:
                found.append(verdict)
                console.print(f"{verdict.why}: {words!r}: {verdict.last}", markup=False, soft_wrap=True)
            bar.advance(task)
            bar.refresh()
    return found


def run(args: argparse.Namespace, console: Console) -> int:
    """Mutate, run, report; 1 if anything was found."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    begin, folder = time.perf_counter(), Path(tempfile.mkdtemp(prefix="lines-"))
    try:
        found = torture(args, folder, console)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record = {
        "command": shlex.join(["python", "scripts/torture_commands.py", *args.words]),
        "lines": args.lines,
        "found": dict(Counter(verdict.why for verdict in found)),
        "log": [asdict(verdict) for verdict in found],
        "seconds": round(time.perf_counter() - begin),
    }
    console.print(f"{args.lines} lines: {record['found'] or 'all ended as documented'}")
    if args.out:
        write_atomic(args.out, f"{json.dumps(record, indent=1)}\n".encode())
    return 1 if found else 0


def main(arguments: list[str] | None = None) -> int:
    """Torture the command line; the exit code."""
    args = parse(arguments)
    args.words = list(sys.argv[1:] if arguments is None else arguments)
    return guarded("torture_commands", lambda console: run(args, console))


if __name__ == "__main__":
    sys.exit(main())
