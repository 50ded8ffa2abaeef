"""Training speed and memory of `mlm` beside `transformers`, nanoGPT and picotron, measured fairly.

    python scripts/bench_train.py --shape tune
    python scripts/bench_train.py --family llama --shape 4x256 6x384
    python scripts/bench_train.py --shape report --contenders mlm mlm-mkl transformers --out results.json
    python scripts/bench_train.py --tp 2 --peers nanogpt=PATH picotron=PATH

The same weights, tokens and optimizer for all; losses and gradients are compared before anything is timed.
A step is zero_grad, forward, backward, clip, optimizer step; compiling and preparing data come before. All
contenders take turns, a step at a time: ABC, CBA, ABC, … A fixed matrix product between any two steps shows
whether the machine changed. Wall and processor time are compared: with --threads 1 the latter is a result on
a busy machine too. scripts/results/README.md describes how to read and repeat results.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from bench.command import add_round_options, guarded
from bench.compare import Plan, run_shape
from bench.llama import LlamaShape, check_llama
from bench.machine import describe_machine, describe_peers
from bench.report import print_shape
from bench.shapes import check_shape, shapes_of
from bench.spec import Spec
from rich.console import Console

from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

CONTENDERS = {
    "mlm": "as `mlm pretrain` runs it",
    "mlm-compiled": "the same with compile=true: each layer",
    "mlm-mkl": "mlm with float32 products by torch.mm's library, so that the library's gain shows apart",
    "transformers": "GPT2LMHeadModel (LlamaForCausalLM) as its configuration has it, sdpa attention",
    "transformers-gelu": "the same with PyTorch's one-kernel tanh GELU",
    "transformers-compiled": "`transformers`, each layer compiled",
    "nanogpt": "needs --peers nanogpt=PATH",
    "nanogpt-compiled": "the same, each layer compiled",
    "megatron": "Megatron Core's GPTModel, its layers without Transformer Engine",
    "megatron-compiled": "the same, each layer compiled",
}
OF_LLAMA = ("mlm", "mlm-compiled", "mlm-mkl", "transformers", "transformers-compiled")
"""Contenders of --family llama."""
PEERS = ("nanogpt", "picotron")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    return guarded("bench_train", lambda console: run(parse(arguments), console))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    listed = "\n".join(f"  {name:22} {words}" for name, words in CONTENDERS.items())
    parser = argparse.ArgumentParser(
        prog="bench_train.py",
        description=__doc__,
        epilog=f"contenders:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--shape",
        nargs="+",
        default=["tune"],
        metavar="WORD",
        help="tune, tiny, report or some of it (on a CPU 2x64 4x256 6x384 12x768), or custom L,H,N,S,V,B",
    )
    add(
        "--family",
        choices=("gpt2", "llama"),
        default="gpt2",
        help=f"of the model; llama, with the same layers, width and heads, has {', '.join(OF_LLAMA)}",
    )
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="of activations; master weights are float32"
    )
    add("--contenders", nargs="+", default=["mlm", "transformers"], help="the first is the reference")
    add("--peers", nargs="+", default=[], metavar="NAME=PATH", help="checkouts of nanogpt and picotron")
    add("--tp", type=int, default=1, help="also mlm (and picotron) split over this many processes")
    add_round_options(parser)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads of each contender")
    add(
        "--allocator",
        choices=("tuned", "default"),
        default="tuned",
        help="glibc's malloc, for all contenders",
    )
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--parts", action="store_true", help="also profile a CPU step: products, attention, loss and so on")
    add("--seed", type=int, default=1234, help="of weights and tokens")
    add("--out", type=Path, help="JSON file for machines: description, medians, all steps")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace, console: Console) -> int:
    """Benchmark every shape asked for, print tables, write the JSON."""
    peers = parse_peers(args.peers)
    shapes = shapes_of(args.shape, args.device)
    plan = make_plan(args, peers)
    for shape in shapes:
        check_shape(shape, plan.tp)
    if args.family == "llama":
        shapes = tuple(LlamaShape.of(shape) for shape in shapes)
        for shape in shapes:
            check_llama(shape, plan.tp)
    if args.out is not None and not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: its folder does not exist")
    spec = Spec(shapes[0], args.device, args.dtype, args.threads, args.allocator, args.seed, peers)
    if not spec.prepare_process():
        raise UserError(
            "--allocator tuned: this system's malloc has no such settings; use --allocator default"
        )
    document: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(spec),
        "peers": describe_peers(peers),
        "settings": {
            "device": spec.device,
            "dtype": spec.dtype,
            "allocator": spec.allocator,
            "seed": spec.seed,
        },
        "shapes": [],
    }
    out = Console() if sys.stdout.isatty() else Console(width=120)
    for shape in shapes:
        result = run_shape(
            replace(spec, shape=shape), plan, lambda line: console.print(line, highlight=False)
        )
        document["shapes"].append(result)
        print_shape(out, result, f"{shape.describe()}, {spec.dtype} on {spec.device}, {spec.threads} threads")
    if args.out is not None:
        write_atomic(args.out, (json.dumps(document, indent=1) + "\n").encode())
        console.print(f"wrote {args.out}", highlight=False)
    return 1 if any(result["doubts"] for result in document["shapes"]) else 0


def parse_peers(words: list[str]) -> dict[str, str]:
    """NAME=PATH words as a dictionary. Raises UserError."""
    peers = {}
    for word in words:
        name, _, path = word.partition("=")
        if name not in PEERS or not path:
            raise UserError(f"--peers {word!r}: give NAME=PATH with NAME one of {', '.join(PEERS)}")
        if not Path(path).is_dir():
            raise UserError(f"--peers {word}: no such folder; give the path of a checkout")
        peers[name] = str(Path(path).resolve())
    return peers


def make_plan(args: argparse.Namespace, peers: dict[str, str]) -> Plan:
    """Who competes, from the options. Raises UserError."""
    whole = list(dict.fromkeys(args.contenders))
    for name in whole:
        if name not in CONTENDERS:
            raise UserError(f"--contenders {name!r} is unknown: use some of {', '.join(CONTENDERS)}")
        if name.startswith("nanogpt") and "nanogpt" not in peers:
            raise UserError(f"--contenders {name} needs --peers nanogpt=PATH, the path of a checkout")
    if args.family == "llama" and (other := [*(name for name in whole if name not in OF_LLAMA), *peers]):
        raise UserError(f"--family llama: {other[0]} is compared as GPT-2; use {', '.join(OF_LLAMA)}")
    if "nanogpt" in peers and not any(name.startswith("nanogpt") for name in whole):
        whole.append("nanogpt")
    if args.parts and args.device != "cpu":
        raise UserError("--parts profiles a CPU: add --device cpu")
    if args.device == "cuda" and (count := torch.cuda.device_count()) < args.tp:
        raise UserError(f"--tp {args.tp} --device cuda: this host has {count} GPUs")
    for option, value, least in (
        ("--tp", args.tp, 1),
        ("--pairs", args.pairs, 1),
        ("--threads", args.threads, 1),
    ):
        if value < least:
            raise UserError(f"{option} {value} must be at least {least}")
    split = [f"mlm-tp{args.tp}"] if args.tp > 1 else []
    if "picotron" in peers:
        if args.tp == 1:
            raise UserError("--peers picotron is compared in tensor parallelism: add --tp 2")
        split.append(f"picotron-tp{args.tp}")
    return Plan(
        whole=tuple(whole),
        split=tuple(split),
        tp=args.tp,
        pairs=args.pairs,
        limit=args.attempts or 3 * args.pairs,
        seconds=args.seconds,
        memory=not args.no_memory,
        parts=args.parts,
    )


if __name__ == "__main__":
    sys.exit(main())
