"""A training step of BERT, masked-language-model and sentence-order loss: `mlm` against `transformers`.

    python scripts/bench_bert.py --shape base-128 base-512 --dropout 0 0.1 --threads 2 1 --out results.json
    python scripts/bench_bert.py --shape tune-128 --pairs 4
    python scripts/bench_bert.py --shape 4,768,12,128,30522,8 --norm pre --corpus CORPUS

The same weights, micro-batches, losses and optimizer for both; losses and gradients are compared before
anything is timed. `transformers` is BertForPreTraining (--norm post) or MegatronBertForPreTraining (--norm
pre), used as its users do: a padding mask, and -100 where nothing is masked. A step is zero_grad, forward,
backward, clip, optimizer step. The contenders take turns, a step at a time, as in bench_train.py.

Exit code: 0 a result, 1 doubts or a ratio below the target (1.6), 2 a mistake.
"""

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from bench.bert_shapes import BERT_NAMED, BertShape, bert_batches, bert_shape
from bench.command import add_round_options, guarded
from bench.compare import Plan, quoted, run_shape
from bench.machine import describe_machine
from bench.report import print_shape
from bench.spec import Spec
from rich.console import Console

from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

TARGET = 1.6
"""Target speedup of mlm over `transformers`."""
CONTENDERS = {
    "mlm": "as `mlm pretrain` runs it",
    "mlm-compiled": "the same with compile=true: each layer",
    "mlm-mkl": "mlm with float32 products by torch.mm's library",
    "transformers": "sdpa attention, or with --norm pre eager: MegatronBert has no other",
    "transformers-eager": "eager attention",
    "transformers-compiled": "as transformers, each layer compiled",
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    listed = "\n".join(f"  {name:22} {words}" for name, words in CONTENDERS.items())
    shapes = "\n".join(f"  {name:22} {','.join(map(str, sizes))}" for name, sizes in BERT_NAMED.items())
    parser = argparse.ArgumentParser(
        prog="bench_bert.py",
        description=__doc__,
        epilog=f"contenders:\n{listed}\nshapes, L,H,N,S,V,B (layers, hidden, heads, sequence, vocabulary, "
        f"micro-batch):\n{shapes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", nargs="+", default=["tune-128"], metavar="WORD", help="named below, or L,H,N,S,V,B")
    add("--layers", type=int, help="instead of the shape's")
    add("--norm", nargs="+", choices=("post", "pre"), default=["post"], help="order of layer norm")
    add("--dropout", nargs="+", type=float, default=[0.0], help="0 and 0.1 are worth a look")
    add("--threads", nargs="+", type=int, default=[len(os.sched_getaffinity(0))], help="of each contender")
    add("--corpus", type=Path, help="folder by `mlm data build sentences=true`; without it random tokens")
    add("--contenders", nargs="+", default=["mlm", "transformers"], help="the first is the reference")
    add_round_options(parser)
    add("--allocator", choices=("tuned", "default"), default="tuned", help="glibc's malloc, for all")
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--seed", type=int, default=1234, help="of weights and samples")
    add("--out", type=Path, help="JSON file for machines: description, medians, all steps")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace, console: Console) -> int:
    """Benchmark every combination asked for, print tables, write the JSON."""
    plan, shapes = make_plan(args), make_shapes(args)
    if args.out is not None and not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: its folder does not exist")
    results, machine = [], None
    out = Console() if sys.stdout.isatty() else Console(width=120)
    for shape, threads in product(shapes, args.threads):
        spec = Spec(shape, "cpu", "fp32", threads, args.allocator, args.seed)
        if not spec.prepare_process():
            raise UserError("--allocator tuned: this system's malloc has no such settings; use default")
        machine = machine or describe_machine(spec)
        result = run_shape(spec, plan, lambda line: console.print(line, highlight=False))
        results.append(result | {"threads": threads})
        print_shape(out, result, f"{shape.describe()}, fp32, {threads} threads")
    document = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {**(machine or {}), "threads": args.threads},
        "settings": {"dtype": "fp32", "allocator": args.allocator, "seed": args.seed, "target": TARGET},
        "shapes": results,
    }
    if args.out is not None:
        write_atomic(args.out, (json.dumps(document, indent=1) + "\n").encode())
        console.print(f"wrote {args.out}", highlight=False)
    return 0 if all(not result["doubts"] and reached(result) for result in results) else 1


def reached(result: dict[str, Any]) -> bool:
    """True if mlm reaches the target against each contender of `transformers`."""
    series = [s for s in result["series"] if s["other"].startswith("transformers")]
    return all((ratio := quoted(s)) is not None and ratio["median"] >= TARGET for s in series)


def make_shapes(args: argparse.Namespace) -> list[BertShape]:
    """Every combination of shape, order and dropout. Raises UserError."""
    for dropout in args.dropout:
        if not 0 <= dropout < 1:
            raise UserError(f"--dropout {dropout:g} must be from 0 to below 1")
    shapes = []
    for word, norm, dropout in product(args.shape, args.norm, args.dropout):
        shape = bert_shape(word, norm, dropout, args.corpus, layers=args.layers)
        bert_batches(shape, args.seed)  # a corpus that does not fit is told now
        shapes.append(shape)
    return shapes


def make_plan(args: argparse.Namespace) -> Plan:
    """Who competes, from the options. Raises UserError."""
    names = tuple(dict.fromkeys(args.contenders))
    for name in names:
        if name not in CONTENDERS:
            raise UserError(f"--contenders {name!r} is unknown: use some of {', '.join(CONTENDERS)}")
    if args.pairs < 1 or min(args.threads) < 1 or (args.layers is not None and args.layers < 1):
        raise UserError("--pairs, --threads and --layers must be at least 1")
    return Plan(
        whole=names,
        split=(),
        tp=1,
        pairs=args.pairs,
        limit=args.attempts or 3 * args.pairs,
        seconds=args.seconds,
        memory=not args.no_memory,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    return guarded("bench_bert", lambda console: run(parse(arguments), console))


if __name__ == "__main__":
    sys.exit(main())
