"""Single bits flipped over every file of a run and its corpus: no model may differ in silence.

    python scripts/torture_files.py --flips 500 --seed 0 --out scripts/results/torture_files.json

A tiny GPT-2 trained on a tiny corpus is damaged in one bit of one file (checkpoints, `latest`, tokenizer,
settings, log, corpus, receipt in turn). Then training is resumed in two ways, text generated, the loss
evaluated and the model exported, each on a copy of its own. Each must end in an error line, or in the result
of the undamaged run, or say what it found.
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
from pathlib import Path

import torch
from bench.command import guarded
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torture.flips import Flip, make_template, one_flip, references, targets

import mlm
from mlm.util.atomic import write_atomic


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="torture_files.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--flips", type=int, default=100, help="flipped bits, all files in turn (default %(default)s)")
    add("--only", default="", help="only files whose path contains this")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="JSON file for machines")
    return parser.parse_args(arguments)


def torture(args: argparse.Namespace, folder: Path, console: Console) -> list[Flip]:
    """All flips, with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # No thread of its own: this process forks.
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as bar:
        task = bar.add_task("undamaged runs", total=args.flips)
        bar.refresh()
        template = folder / "template"
        make_template(template)
        usual = references(template, folder / "usual")
        files = [name for name in targets(template) if args.only in name]
        flips = []
        for number in range(args.flips):
            file = files[number % len(files)]
            bar.update(task, description=file)
            rng = random.Random(f"{args.seed}-{number}")
            flips.append(one_flip(template, usual, folder, file, rng))
            for line in flips[-1].wrong:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            bar.advance(task)
            bar.refresh()
    return flips


def summary(flips: list[Flip], words: list[str], seconds: float) -> dict[str, object]:
    """The record for machines."""
    by_file: dict[str, Counter[str]] = {}
    for flip in flips:
        by_file.setdefault(flip.file, Counter()).update(flip.verdicts.values())
    return {
        "command": shlex.join(["python", "scripts/torture_files.py", *words]),
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
        "flips": len(flips),
        "commands": sum(len(flip.verdicts) for flip in flips),
        "verdicts": dict(Counter(verdict for flip in flips for verdict in flip.verdicts.values())),
        "by_file": {name: dict(counts) for name, counts in sorted(by_file.items())},
        "wrong": [line for flip in flips for line in flip.wrong],
        "seconds": round(seconds),
    }


def run(args: argparse.Namespace, console: Console) -> int:
    """Flip, run, report; 1 if anything was found."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    begin, folder = time.perf_counter(), Path(tempfile.mkdtemp(prefix="flips-"))
    try:
        record = summary(torture(args, folder, console), args.words, time.perf_counter() - begin)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, counts in record["by_file"].items():  # type: ignore[attr-defined]
        console.print(f"{name:60} {counts}", markup=False, highlight=False)
    console.print(f"{record['flips']} flips, {record['commands']} commands: {record['verdicts']}")
    if args.out:
        write_atomic(args.out, f"{json.dumps(record, indent=1)}\n".encode())
    return 1 if record["wrong"] else 0


def main(arguments: list[str] | None = None) -> int:
    """Flip bits; the exit code."""
    args = parse(arguments)
    args.words = list(sys.argv[1:] if arguments is None else arguments)
    return guarded("torture_files", lambda console: run(args, console))


if __name__ == "__main__":
    sys.exit(main())
